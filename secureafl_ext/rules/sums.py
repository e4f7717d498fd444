"""Sums over all coordinates, in float64. A slice of the coordinates has its share of each: ranks add them up."""

from functools import reduce

import torch
from torch import Tensor

CHUNK = 2**22  # values converted to float64 at a time: no copy of the whole history


def inner(rows: Tensor, others: Tensor) -> Tensor:
    """Inner products of rows (n, d) with others (d) or (k, d), in float64: (n) or (n, k)."""
    width = max(1, CHUNK // len(rows))
    chunks = zip(rows.split(width, 1), others.split(width, -1), strict=True)
    return reduce(torch.add, (a.double() @ b.double().movedim(-1, 0) for a, b in chunks))


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """() float64, of a and b (d). The difference of two floats may overflow a float."""
    chunks = zip(a.split(CHUNK), b.split(CHUNK), strict=True)
    return reduce(torch.add, ((x.double() - y.double()).square().sum() for x, y in chunks))
