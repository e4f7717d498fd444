"""Checks of arguments from callers and files. An error names the argument, the expected value and the value given."""

from collections.abc import Callable
from operator import index
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from . import _C

T = TypeVar("T")
MOST = 2**53  # largest whole number accepted: ranks exchange numbers as float64, which is exact up to here


def whole(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or abs(index(value)) > MOST:
        raise TypeError
    return index(value)


def number(value: Any) -> float:
    if isinstance(value, (bool, np.bool_, str, bytes, bytearray)):  # float("1") would read a text
        raise TypeError
    return float(value)


def flag(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError
    return bool(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(value)


def dtype_name(value: Any) -> str:
    return name_of(value) if isinstance(value, torch.dtype) else text(value)


def or_none(convert: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else convert(value)


def converted(
    caller: str,
    name: str,
    value: Any,
    convert: Callable[[Any], T],
    expected: str,
    holds: Callable[[T], bool] = lambda value: True,
) -> T:
    """The value as a plain Python value, or a ValueError that names the argument, the expectation and the value."""
    try:
        plain = convert(value)
        if holds(plain):
            return plain
    except (TypeError, ValueError, OverflowError, RuntimeError):  # tensors raise RuntimeError
        pass
    raise ValueError(f"{caller}: {name} must be {expected}, got {shown(value)}")


def shown(value: object) -> str:
    """A value for an error message, at most 80 characters: a hostile file cannot flood the log."""
    plain = (str, int, float, bool, np.generic, torch.dtype, type(None))
    words = repr(value) if isinstance(value, plain) else type(value).__name__
    return words if len(words) <= 80 else f"{words[:77]}..."


def printable(words: str, most: int | None = None, also: str = "") -> str:
    """At most `most` characters, with a blank for each that would steer a terminal, break a line of a log or turn the
    direction of writing. A client may choose its name and its reasons: all that is shown or logged passes here.

    also: characters that stay
    """
    words = words[:most]
    return words if words.isprintable() else "".join(c if c.isprintable() or c in also else " " for c in words)


def check_start(caller: str, model: Tensor, clients: int) -> int:
    """Check the arguments that every server starts from. Returns clients as a plain number."""
    if not isinstance(model, Tensor) or model.dim() != 1 or model.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{caller}: model must be a flat float32 or float64 tensor, got {describe(model)}")
    if not model.isfinite().all():
        raise ValueError(f"{caller}: model must be finite, got NaN or inf in it")
    if model.device.type == "cuda" and _C.build_info()["cuda"] is None:
        raise ValueError(f"{caller}: model must be on the CPU, this build has no CUDA kernels, got {model.device}")
    plain = converted(caller, "clients", clients, whole, "a whole number, 1 or more")
    if plain < 1:
        raise ValueError(f"{caller}: clients must be 1 or more, got {plain}")
    return plain


def check(
    caller: str,
    models: Tensor,
    dtype: torch.dtype,
    clients: int,
    newest: int,
    client: int,
    update: Tensor,
    version: int,
) -> tuple[int, int]:
    """Check one submission to a server with these models (rows, d). Returns (client, version) as plain numbers."""
    d, device = models.shape[1], models.device
    if not isinstance(update, Tensor) or update.shape != (d,) or update.dtype != dtype:
        raise ValueError(f"{caller}: update must be a tensor ({d},) {name_of(dtype)}, got {describe(update)}")
    if update.device != device:
        raise ValueError(f"{caller}: update must be on {device}, got {update.device}")
    client, version = index(client), index(version)
    if not 0 <= client < clients:
        raise ValueError(f"{caller}: client must lie in 0..{clients - 1}, got {client}")
    if not 0 <= version <= newest:
        raise ValueError(f"{caller}: version must lie in 0..{newest}, got {version}")
    return client, version


def check_kept(caller: str, version: int, newest: int, max_staleness: int) -> None:
    oldest = max(0, newest - max_staleness)
    if not oldest <= version <= newest:
        raise ValueError(f"{caller}: version must lie in {oldest}..{newest}, got {version}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {name_of(value.dtype)}"
