"""Checks of the values in a state's tensors: one predicate per kind of tensor."""

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor

from ..rules.row_rules import MAX_SQUARE, row_norms
from ..rules.sums import CHUNK
from ..validation import is_dense, is_fake

# Bound on mean inner products of clipped updates, so that sums over the clients are finite. A server's own are at most
# about the root of d. After any state that passes `as_long` they stay far below this bound too.
LARGEST_MEAN = 1e150


def dense(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor whose shape and values can be read: not sparse, nested, fake or on meta."""
    return is_dense(value) and not value.is_meta and not is_fake(value)


def within(low: float, high: float, closed: bool = True) -> Callable[[Tensor], bool]:
    """A check that all values lie between low and high, and none is NaN. It allocates nothing: a history may fill most
    of the memory."""

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


def as_long(rows: Tensor, squares: Tensor) -> bool:
    """Whether the squared norms of rows (n, d) are at most `squares` (n), up to rounding.

    They may be smaller: a rank has slices of the rows, and an update that is clipped to almost nothing loses digits.
    """
    least = torch.finfo(rows.dtype).tiny
    rounding = rows.shape[1] * max(least * least, 1e-300)
    return bool((_row_squares(rows) <= 4 * squares.to(rows.device) + rounding).all())


def units(rows: Tensor) -> bool:
    """Whether no row of rows (n, d) is longer than 1, but for rounding: a rank has slices of longer ones."""
    rounding = 1e-2 if rows.dtype == torch.bfloat16 else 1e-3
    return bool((_row_squares(rows) <= 1 + rounding).all())


def _row_squares(rows: Tensor) -> Tensor:
    """(n) float64: the squares of rows (n, d), computed in pieces."""
    found = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for part in rows.detach().split(max(1, CHUNK // len(rows)), 1):
        found += row_norms(part).square()
    return found


def not_negative(tensor: Tensor) -> bool:
    """Finite, 0 or more, and no -0.0: a round that sorts by the bits of such a number would take it for the largest."""
    return bool(tensor.isfinite().all()) and not bool(tensor.signbit().any())


def short_products(tensor: Tensor) -> bool:
    """Of float32 updates, whose squares are far below the bound: a fused round does not look for longer ones."""
    return products(tensor) and bool((tensor.diagonal() <= MAX_SQUARE).all())


def products(tensor: Tensor) -> bool:
    """The square of a float64 update may be inf and its products NaN. A rule leaves such a row out."""
    squares = tensor.diagonal()
    short = squares <= MAX_SQUARE
    possible = tensor.isfinite() | ~short[:, None] | ~short
    return bool(possible.all()) and bool((squares >= 0).all()) and symmetric(tensor)
