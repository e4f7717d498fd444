"""What all fuzzers share: draws from a seed, a call of an op with its check, and the words for a difference."""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import secureafl_ext  # noqa: F401 - registers the ops

OPS = torch.ops.secureafl
ODD = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e20, 1e-45, -1e-38, -0.0, 0.0)


class MismatchError(AssertionError):
    """An op did not do what the oracle says."""


def need(holds: bool, *what: object) -> None:
    if not holds:
        raise MismatchError(" ".join(str(one) for one in what))


class Dice(random.Random):
    """Every draw of one case, from its number alone."""

    def __init__(self, *seed: object):
        super().__init__(" ".join(map(str, seed)))

    @functools.cached_property
    def numbers(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.getrandbits(64)))

    def chance(self, share: float) -> bool:
        return self.random() < share

    def normal(self, *shape: int) -> np.ndarray:
        return self.numbers.standard_normal(shape)

    def bools(self, count: int, share: float = 0.7) -> np.ndarray:
        return self.numbers.random(count) < share

    def spoil(self, values: np.ndarray, share: float = 0.15) -> np.ndarray:
        """Some of the values become odd ones; of all dtypes the cast decides what is left of them."""
        odd = self.numbers.choice(ODD, values.shape)
        return np.where(self.numbers.random(values.shape) < share, odd, values)

    def ties(self, *shape: int) -> np.ndarray:
        return self.numbers.integers(-2, 3, shape).astype(np.float64)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same values, in memory of another order."""
        kind = self.randrange(4)
        if kind == 0 or tensor.dim() == 0:
            return tensor
        if kind == 1:
            return torch.stack([tensor, tensor], -1)[..., 1]
        if kind == 2:
            return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        return offset(tensor)


def offset(tensor: Tensor, items: int = 1) -> Tensor:
    """Contiguous, but it begins in the middle of its memory."""
    room = tensor.new_zeros(tensor.numel() + items)
    room[items:] = tensor.reshape(-1)
    return room[items:].view(tensor.shape)


@functools.cache
def overload(op: str) -> torch._ops.OpOverload:
    return getattr(OPS, op).default


@functools.cache
def names_of(op: str) -> tuple[str, ...]:
    """Of its arguments, in order."""
    return tuple(argument.name for argument in overload(op)._schema.arguments)


@dataclass
class Call:
    op: str
    args: dict[str, object]
    check: Callable[[object], None] = lambda result: None
    facts: dict[str, int] = field(default_factory=dict)  # sizes that a broken call must know

    def run(self) -> object:
        return overload(self.op)(*(self.args[name] for name in names_of(self.op)))


def cast(values: np.ndarray, dtype: torch.dtype, device: str) -> Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).to(device)


def wide(tensor: Tensor) -> np.ndarray:
    """As NumPy's floats that hold them exactly, and sort them alike."""
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).cpu().numpy()
