"""What the values of a state's tensors must be: one predicate per kind of tensor."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..rules.row_rules import MAX_SQUARE


def within(low: float, high: float, closed: bool = True) -> Callable[[Tensor], bool]:
    """A check that all values lie there; NaN does not. It allocates nothing: a history may fill most of the memory."""

    def holds(tensor: Tensor) -> bool:
        if not tensor.numel():
            return True
        least, most = (value.item() for value in tensor.detach().aminmax())
        return low <= least and most <= high if closed else low < least and most < high

    return holds


def ones(tensor: Tensor) -> bool:
    return within(1, 1)(tensor)


def powers(tensor: Tensor) -> bool:
    """float16 pairs are scaled by 2^-100 to 2^113 (csrc/round/judge.h)."""
    return within(2.0**-100, 2.0**113)(tensor) and within(0.5, 0.5)(tensor.frexp().mantissa)


def orthogonal(t: Tensor) -> bool:
    """Whether the columns of every matrix of t (.., n, n) are orthogonal and of length 1, up to rounding."""
    unit = torch.eye(t.shape[-1], dtype=t.dtype, device=t.device)
    return bool(((t.mT @ t - unit).abs() < 1e-6).all())


def symmetric(tensor: Tensor) -> bool:
    return bool(((tensor == tensor.T) | (tensor.isnan() & tensor.T.isnan())).all())


def products(tensor: Tensor) -> bool:
    """The square of a float64 update may be inf and its products NaN. A rule leaves such a row out."""
    squares = tensor.diagonal()
    short = squares <= MAX_SQUARE
    possible = tensor.isfinite() | ~short[:, None] | ~short
    return bool(possible.all()) and bool((squares >= 0).all()) and symmetric(tensor)
