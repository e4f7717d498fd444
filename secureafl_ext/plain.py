"""Plain Python values from what callers and files give: NumPy's numbers are welcome, look-alikes are not."""

from collections.abc import Callable
from operator import index

import numpy as np

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
