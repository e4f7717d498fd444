"""Checks of arguments from callers and files. An error names the argument, the expected value and the value given."""

from collections.abc import Callable
from operator import index
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from . import _C

T = TypeVar("T")
MOST = 2**53  # largest whole number accepted: ranks exchange numbers as float64, which is exact up to here

LAST = MOST // 2  # largest version: a forged state must leave room for whatever is counted beside it


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
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print one of thousands of digits
        return f"an integer of {value.bit_length()} bits"
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
    flat = is_dense(model) and model.dim() == 1
    if not flat or model.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{caller}: model must be a flat float32 or float64 tensor, got {describe(model)}")
    if model.device.type == "meta" or is_fake(model):
        raise ValueError(f"{caller}: model must have values, got a {'fake' if is_fake(model) else 'meta'} tensor")
    if not model.isfinite().all():
        raise ValueError(f"{caller}: model must be finite, got NaN or inf in it")
    if model.device.type == "cuda" and _C.build_info()["cuda"] is None:
        raise ValueError(f"{caller}: model must be on the CPU, this build has no CUDA kernels, got {model.device}")
    plain = converted(caller, "clients", clients, whole, "a whole number, 1 or more")
    if plain < 1:
        raise ValueError(f"{caller}: clients must be 1 or more, got {shown(plain)}")
    return plain


def checked_device(caller: str, device: Any) -> torch.device:
    """A device that a server can be on: this machine has it, and tensors on it have values."""
    plain = converted(caller, "device", device, torch.device, "a device such as 'cpu' or 'cuda'")
    try:
        torch.empty(0, device=plain)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA raises the first
        found = f"{plain}: {str(error).strip().partition(chr(10))[0]}"
        raise ValueError(f"{caller}: device must be one that this machine has, got {found}") from error
    if plain.type == "meta":
        raise ValueError(f"{caller}: device must be one whose tensors have values, got {plain}")
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
    check_room(caller, newest)
    d = models.shape[1]
    if not is_dense(update) or update.shape != (d,) or update.dtype != dtype:
        raise ValueError(f"{caller}: update must be a tensor ({d},) {name_of(dtype)}, got {describe(update)}")
    check_device(caller, "update", update, models)
    return number_in(caller, "client", client, 0, clients - 1), number_in(caller, "version", version, 0, newest)


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with values of its own, not one that wraps others, such as a DTensor."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
        return False
    return type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ or is_fake(value)


def plain(tensor: Tensor) -> Tensor:
    """The same values without the autograd graph, which would grow from round to round, and of no subclass: what it
    makes of an operation could stop a round half-way."""
    tensor = tensor.detach()
    return tensor if type(tensor) is Tensor or is_fake(tensor) else tensor.as_subclass(Tensor)


def check_room(caller: str, version: int) -> None:
    """No server gets there by rounds. A forged checkpoint may start there, and what follows it could not be loaded."""
    if version >= LAST:
        raise ValueError(f"{caller}: the server's version must be below 2**{LAST.bit_length() - 1}, got {version}")


def check_device(caller: str, name: str, tensor: Tensor, models: Tensor) -> None:
    """Refuse a tensor on another device than the models, and one without values: half of a round would run before torch
    did. A server whose models have no values either takes it."""
    without = is_fake(tensor) and not is_fake(models)
    if tensor.device != models.device or without:
        got = "a fake tensor" if without else tensor.device
        raise ValueError(f"{caller}: {name} must be on {models.device}, got {got}")


def is_fake(tensor: Tensor) -> bool:
    """Whether this is a FakeTensor, as torch.compile makes them: it names a device and has no values there."""
    return type(tensor) is not Tensor and hasattr(tensor, "fake_mode")


def check_kept(caller: str, version: int, newest: int, max_staleness: int) -> int:
    """The version as a plain number, if a server keeps it."""
    return number_in(caller, "version", version, max(0, newest - max_staleness), newest)


def number_in(caller: str, name: str, value: Any, low: int, high: int) -> int:
    """The number of a client or a version as a plain one. Integers of NumPy and integer tensors have one value too."""
    plain = value
    if type(value) is not int:  # checks of the others would cost every round half a microsecond
        try:
            truth = isinstance(value, (bool, np.bool_)) or (isinstance(value, Tensor) and value.dtype == torch.bool)
            plain = None if truth else index(value)
        except Exception:  # tensors raise ValueError and RuntimeError, other classes whatever they like
            plain = None
    if plain is None:
        raise ValueError(f"{caller}: {name} must be a whole number in {low}..{high}, got {shown(value)}")
    if not low <= plain <= high:
        raise ValueError(f"{caller}: {name} must lie in {low}..{high}, got {shown(plain)}")
    return plain


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor"
    layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
    return f"{tuple(value.shape)} {name_of(value.dtype)}{layout}"
