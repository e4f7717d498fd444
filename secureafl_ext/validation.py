"""Arguments from callers and files: plain Python values, or an error that names the argument, expected and got."""

from collections.abc import Callable
from operator import index

import numpy as np
import torch
from torch import Tensor

from . import _C

MOST = 2**53  # a larger whole number is a mistake: float64, in which ranks tell each other theirs, does not hold it


def whole(value: object) -> int:
    if isinstance(value, (bool, np.bool_)) or abs(index(value)) > MOST:
        raise TypeError
    return index(value)


def number(value: object) -> float:
    if isinstance(value, (bool, np.bool_, str, bytes, bytearray)):  # float("1") would read a text
        raise TypeError
    return float(value)


def flag(value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError
    return bool(value)


def text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(value)


def or_none(convert: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None else convert(value)


def converted(
    who: str,
    name: str,
    value: object,
    convert: Callable[[object], object],
    expected: str,
    holds: Callable[[object], bool] = lambda value: True,
) -> object:
    """The plain value, or an error that says what was expected and what came."""
    try:
        plain = convert(value)
        if holds(plain):
            return plain
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's tensors raise the last
        pass
    raise ValueError(f"{who}: {name} must be {expected}, got {shown(value)}")


def shown(value: object) -> str:
    """A value as an error names it: no file may make its message as long as it likes."""
    words = repr(value) if isinstance(value, (str, int, float, bool, np.generic, type(None))) else type(value).__name__
    return words if len(words) <= 80 else f"{words[:77]}..."


def check_start(who: str, model: Tensor, clients: int) -> int:
    """Refuse what no server starts from; clients as a plain number."""
    if not isinstance(model, Tensor) or model.dim() != 1 or model.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{who}: model must be a flat float32 or float64 tensor, got {describe(model)}")
    if not model.isfinite().all():
        raise ValueError(f"{who}: model must be finite, got NaN or inf in it")
    if model.device.type == "cuda" and _C.build_info()["cuda"] is None:
        raise ValueError(f"{who}: model must be on the CPU, this build has no CUDA kernels, got {model.device}")
    clients = converted(who, "clients", clients, whole, "a whole number, 1 or more")
    if clients < 1:
        raise ValueError(f"{who}: clients must be 1 or more, got {clients}")
    return clients


def check(
    who: str, models: Tensor, dtype: torch.dtype, clients: int, newest: int, client: int, update: Tensor, version: int
) -> tuple[int, int]:
    """Refuse what no server takes; (client, version) as plain numbers. models: (rows, d)"""
    d, device = models.shape[1], models.device
    if not isinstance(update, Tensor) or update.shape != (d,) or update.dtype != dtype:
        raise ValueError(f"{who}: update must be a tensor ({d},) {name_of(dtype)}, got {describe(update)}")
    if update.device != device:
        raise ValueError(f"{who}: update must be on {device}, got {update.device}")
    client, version = index(client), index(version)
    if not 0 <= client < clients:
        raise ValueError(f"{who}: client must lie in 0..{clients - 1}, got {client}")
    if not 0 <= version <= newest:
        raise ValueError(f"{who}: version must lie in 0..{newest}, got {version}")
    return client, version


def check_kept(who: str, version: int, newest: int, max_staleness: int) -> None:
    oldest = max(0, newest - max_staleness)
    if not oldest <= version <= newest:
        raise ValueError(f"{who}: version must lie in {oldest}..{newest}, got {version}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {name_of(value.dtype)}"
