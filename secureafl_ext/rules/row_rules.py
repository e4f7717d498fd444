"""Robust rules that weigh whole rows. Each sees only the rows' inner products, for its result is a sum of the rows.

gram: (r, r) float64 inner products of the rows    mask: (r) bool, who takes part    config: the rule's settings
returns: (r) float64 weights, zero where mask is false; any finite numbers if it is false everywhere
centered_clip has one row more, its centre: the last of gram and of the weights, not in mask.
How many take part is known to the device alone, so counts are tensors and nobody waits for them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import Config

POWER_STEPS = 32  # of spectral: a second direction of 80 % the strength is then down to a thousandth
WEISZFELD_STEPS = 8
SMOOTHING = 1e-6  # of geometric_median, in median norms: no row counts as nearer than this


def mean(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    return mask / _count(mask)


def clipped_mean(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Of the rows, cut to their median norm."""
    return mean(gram, mask, config) * _clip(gram, mask)


def centered_clip(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """v <- v + mean of (row - v) min(1, radius / |row - v|), from the last aggregate (Karimireddy et al. 2021).

    Without a radius it is the median distance to v, taken anew in every iteration.
    """
    n = len(mask)
    weights = (_numbers(gram) == n).to(gram.dtype)
    for _ in range(config.iterations):
        distance = _distances(gram, weights)[:n]
        radius = median_of(distance, mask) if config.radius is None else config.radius
        pull = shorten(distance, radius) * mean(gram, mask, config)  # (n)
        weights = weights * (1 - pull.sum()) + torch.nn.functional.pad(pull, (0, 1))
    return weights


def spectral(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Mean of the rows, clipped to the median norm, without the share `remove` of them that reaches farthest along
    the top singular direction of the centred stack (after DnC, Shejwalkar and Houmansadr 2021)."""
    scale, share = _clip(gram, mask), mean(gram, mask, config)
    clipped = gram * scale[:, None] * scale
    reach = clipped @ share  # (r): products with the mean of the clipped rows
    centred = torch.where(mask[:, None] & mask, clipped - reach[:, None] - reach + share @ reach, 0)
    trace = centred.trace()
    # So scaled, its top eigenvalue lies between 1/r and 1, and no step needs a norm.
    centred = centred / torch.where(trace > 0, trace, 1)
    # No constant start, which centring maps to zero; no row of the stack, which an attacker could choose.
    along = (1 + _numbers(gram)).to(gram.dtype).cos()
    for _ in range(POWER_STEPS):
        along = centred @ along
    score = torch.where(mask, along.abs(), -1)
    rank = _ranks(score.sort(descending=True, stable=True).indices)
    kept = mask & (rank >= _removed(mask, config))
    return mean(gram, kept, config) * scale


def krum(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """The row with the least sum of squared distances to its count - f - 2 nearest (Blanchard et al. 2017).

    f is the share `remove` of the rows. One neighbour at least is looked at; of equal rows the first is taken.
    """
    norms = gram.diagonal()
    squares = (norms[:, None] + norms - (gram + gram.T)).clamp(min=0)  # alike both ways, so that ties are ties
    others = mask & ~torch.eye(len(mask), dtype=torch.bool, device=mask.device)
    nearest = torch.where(others, squares, torch.inf).sort(1).values
    looked_at = (mask.sum() - _removed(mask, config) - 2).clamp(min=1)
    looked_at = (_numbers(gram) < looked_at) & nearest.isfinite()  # a lone row has none
    score = torch.where(looked_at, nearest, 0).sum(1)
    chosen = torch.where(mask, score, torch.inf).argmin()
    return (mask & (_numbers(gram) == chosen)).to(gram.dtype)


def geometric_median(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """The point of least summed distance, by smoothed Weiszfeld steps (Pillutla et al. 2022).

    From the mean of the rows clipped to their median norm: the plain mean an attacker puts anywhere, too far for
    so few steps.
    """
    weights = clipped_mean(gram, mask, config)
    least = (SMOOTHING * median_of(_norms(gram), mask)).clamp(min=1e-100)
    for _ in range(WEISZFELD_STEPS):
        pull = torch.where(mask, 1 / _distances(gram, weights).clamp(min=least), 0)
        weights = pull / torch.where(mask.any(), pull.sum(), 1)
    return weights


WEIGHTS: dict[str, Callable[[Tensor, Tensor, Config], Tensor]] = {
    "mean": mean,
    "centered_clip": centered_clip,
    "spectral": spectral,
    "krum": krum,
    "geometric_median": geometric_median,
    "kinship": mean,  # of those whom kinship.py has left in mask; rowwise.py cuts them
}


def bucketed(mask: Tensor, draw: Tensor, size: int) -> Tensor:
    """(b, r) float64: what turns rows into means of buckets of `size` rows each, dealt anew for every draw () int64.

    Rows that take part fill the first buckets, of which the last may be smaller; the other buckets are zero.
    The order is that of a hash of draw and row: a generator would deal the same way at every replay of a CUDA graph.
    """
    keys = torch.where(mask, _hash((_hash(draw) + _numbers(mask)) & 0xFFFFFFFF), 1 << 32)
    buckets = torch.arange(-(-len(mask) // size), device=mask.device)
    chosen = mask & (_ranks(keys.argsort()) // size == buckets[:, None])  # (b, r)
    return chosen / chosen.sum(1, keepdim=True, dtype=torch.float64).clamp(min=1)


def _hash(x: Tensor) -> Tensor:
    """A bijection of the 32-bit numbers, held in int64: no product overflows, and no two rows share a key."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _numbers(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


def _ranks(order: Tensor) -> Tensor:
    """(r): the place of every row in an order of them."""
    return torch.empty_like(order).scatter_(0, order, _numbers(order))


def _count(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64).clamp(min=1)


def _removed(mask: Tensor, config: Config) -> Tensor:
    """f: () int64"""
    return (config.remove * mask.sum(dtype=torch.float64)).floor().long()


def _norms(gram: Tensor) -> Tensor:
    return gram.diagonal().sqrt()


def _distances(gram: Tensor, weights: Tensor) -> Tensor:
    """(r): of every row to the point that the weights make of all."""
    reach = gram @ weights
    return (gram.diagonal() - 2 * reach + weights @ reach).clamp(min=0).sqrt()


def _clip(gram: Tensor, mask: Tensor) -> Tensor:
    """(r): what cuts every row to the median norm."""
    norms = _norms(gram)
    return shorten(norms, median_of(norms, mask))


def shorten(lengths: Tensor, most: Tensor | float) -> Tensor:
    """What to multiply vectors with so that none is longer than `most`, which may be 0 or inf."""
    return torch.where(lengths > most, most / lengths, 1)


def median_of(values: Tensor, mask: Tensor) -> Tensor:
    """() of the values (r) that mask keeps; the mean of the two middle ones of an even count."""
    count = mask.sum()
    middle = torch.stack([(count - 1).clamp(min=0) // 2, count // 2])
    return torch.where(mask, values, torch.inf).sort().values.gather(0, middle).mean()
