"""Row-wise rules: each weighs whole rows by their inner products alone. The aggregate is the weighted sum of the rows.

gram: (r, r) float64 inner products of the rows    mask: (r) bool, rows that take part    config: the settings
returns: (r) float64 weights, zero where mask is false; any finite numbers if mask is false everywhere
centered_clip has one row more, its center: the last of gram and of the weights, not in mask.
Only the device knows how many rows take part: counts are tensors, and no rule waits for them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import Config

MAX_SQUARE = 1e300  # a row with a larger square takes no part: sums of such squares would overflow
POWER_STEPS = 32  # of spectral: a second eigenvalue of 80 % of the first is then damped to a thousandth
WEISZFELD_STEPS = 8
LEFT_OUT = 0.1  # a client is left out if its weight is below this share of the mean weight
SMOOTHING = 1e-6  # of geometric_median: floor for the distance to a row, in median norms


def mean(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Mean of the rows."""
    return mask / _count(mask)


def clipped_mean(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Mean of the rows, clipped to their median norm."""
    return mean(gram, mask, config) * _clip(gram, mask)


def centered_clip(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """v <- v + mean of (row - v) min(1, radius / |row - v|), from the last aggregate (Karimireddy et al. 2021).

    Without a radius, each iteration uses the median distance to v.
    """
    n = len(mask)
    weights = (_numbers(gram) == n).to(gram.dtype)
    for _ in range(config.iterations):
        distance = distances_to(gram, weights)[:n]
        radius = median_of(distance, mask) if config.radius is None else config.radius
        pull = clip_to(distance, radius) * mean(gram, mask, config)  # (n)
        weights = weights * (1 - pull.sum()) + torch.nn.functional.pad(pull, (0, 1))
    return weights


def spectral(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Mean of the rows, clipped to the median norm, without the share `remove` of them with the largest projection on
    the top singular direction of the centered rows (after DnC, Shejwalkar and Houmansadr 2021)."""
    scale, share = _clip(gram, mask), mean(gram, mask, config)
    clipped = gram * scale[:, None] * scale
    reach = clipped @ share  # (r): products with the mean of the clipped rows
    centred = torch.where(mask[:, None] & mask, clipped - reach[:, None] - reach + share @ reach, 0)
    kept = without_top(centred, mask, _removed(mask, config))
    return mean(gram, kept, config) * scale


def without_top(centred: Tensor, mask: Tensor, removed: Tensor | int) -> Tensor:
    """(r) bool: mask without the `removed` () rows that have the largest projections on the top singular direction.

    centred: (r, r) inner products of the centered rows, zero where mask is false
    """
    trace = centred.trace()
    # Scaled so, the top eigenvalue lies between 1/r and 1, and no step needs to normalize.
    centred = centred / torch.where(trace > 0, trace, 1)
    # The start is not constant (centering maps that to zero), and not a row (an attacker could choose it).
    along = (1 + _numbers(centred)).to(centred.dtype).cos()
    for _ in range(POWER_STEPS):
        along = centred @ along
    score = torch.where(mask, along.abs(), -1)
    return mask & (ranks(score.sort(descending=True, stable=True).indices) >= removed)


def krum(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """The row with the least sum of squared distances to its count - f - 2 nearest (Blanchard et al. 2017).

    f is the share `remove` of the rows. At least one neighbor counts; of equal rows the first is taken.
    """
    chosen = krum_scores(gram, mask, _removed(mask, config)).argmin()
    return (mask & (_numbers(gram) == chosen)).to(gram.dtype)


def krum_scores(gram: Tensor, mask: Tensor, removed: Tensor | int) -> Tensor:
    """(r): sums of squared distances to the count - removed - 2 nearest rows; inf where mask is false."""
    others = mask & ~torch.eye(len(mask), dtype=torch.bool, device=mask.device)
    nearest = torch.where(others, squared_distances(gram), torch.inf).sort(1).values
    neighbors = (mask.sum() - removed - 2).clamp(min=1)
    counted = (_numbers(gram) < neighbors) & nearest.isfinite()  # a lone row has none
    return torch.where(mask, torch.where(counted, nearest, 0).sum(1), torch.inf)


def squared_distances(gram: Tensor) -> Tensor:
    """(r, r): squared distances between the rows, from their inner products (r, r)."""
    norms = gram.diagonal()
    return (norms[:, None] + norms - (gram + gram.T)).clamp(min=0)  # symmetric, so that ties are ties


def geometric_median(gram: Tensor, mask: Tensor, config: Config) -> Tensor:
    """The point of least summed distance, by smoothed Weiszfeld steps (Pillutla et al. 2022).

    It starts from the mean of the rows clipped to their median norm. An attacker can move the plain mean too far away
    for so few steps.
    """
    weights = clipped_mean(gram, mask, config)
    least = (SMOOTHING * median_of(_norms(gram), mask)).clamp(min=1e-100)
    for _ in range(WEISZFELD_STEPS):
        pull = torch.where(mask, 1 / distances_to(gram, weights).clamp(min=least), 0)
        weights = pull / torch.where(mask.any(), pull.sum(), 1)
    return weights


WEIGHTS: dict[str, Callable[[Tensor, Tensor, Config], Tensor]] = {
    "mean": mean,
    "centered_clip": centered_clip,
    "spectral": spectral,
    "krum": krum,
    "geometric_median": geometric_median,
    "kinship": mean,  # of the rows that kinship.py kept in mask; engines/row_wise.py clips them
}


def left_out(weights: Tensor, mask: Tensor) -> Tensor:
    """(r) bool: rows of mask whose weight is below a tenth of the mean weight of mask; none if that is not positive.

    The mean, not 1 / count: the rows' weights add up to less than 1 if a rule clips rows or also weighs a center.
    """
    mean_weight = torch.where(mask, weights, 0).sum() / _count(mask)
    return mask & (mean_weight > 0) & (weights < LEFT_OUT * mean_weight)


def bucketed(mask: Tensor, draw: Tensor, size: int) -> Tensor:
    """(b, r) float64: the matrix that averages random buckets of `size` rows each. draw () int64 seeds the shuffle.

    Rows that take part fill the first buckets; the last of these may be smaller, and the other buckets are zero.
    A hash of draw and row gives the order: a generator would repeat itself at every replay of a CUDA graph.
    """
    keys = torch.where(mask, hash32((hash32(draw) + _numbers(mask)) & 0xFFFFFFFF), 1 << 32)
    buckets = torch.arange(-(-len(mask) // size), device=mask.device)
    chosen = mask & (ranks(keys.argsort()) // size == buckets[:, None])  # (b, r)
    return chosen / chosen.sum(1, keepdim=True, dtype=torch.float64).clamp(min=1)


def hash32(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, in int64: no product overflows, and no two rows share a key."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _numbers(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


def ranks(order: Tensor) -> Tensor:
    """(r): the rank of every row in a given order."""
    return torch.empty_like(order).scatter_(0, order, _numbers(order))


def _count(mask: Tensor) -> Tensor:
    """() float64: the number of rows in mask; 1 if there are none, as a divisor."""
    return mask.sum(dtype=torch.float64).clamp(min=1)


def _removed(mask: Tensor, config: Config) -> Tensor:
    """f, () int64: the share `remove` of the number of rows in mask, rounded down."""
    return (config.remove * mask.sum(dtype=torch.float64)).floor().long()


def _norms(gram: Tensor) -> Tensor:
    return gram.diagonal().sqrt()


def distances_to(gram: Tensor, weights: Tensor) -> Tensor:
    """(r): the distance of every row to the weighted sum of all rows."""
    reach = gram @ weights
    return (gram.diagonal() - 2 * reach + weights @ reach).clamp(min=0).sqrt()


def _clip(gram: Tensor, mask: Tensor) -> Tensor:
    """(r): factors that clip every row to the median norm."""
    norms = _norms(gram)
    return clip_to(norms, median_of(norms, mask))


def clip_to(norms: Tensor, bound: Tensor | float) -> Tensor:
    """Factors that clip vectors of these norms to `bound`, which may be 0 or inf."""
    return torch.where(norms > bound, bound / norms, 1)


def median_of(values: Tensor, mask: Tensor) -> Tensor:
    """() median of the values (r) that mask keeps; the mean of the two middle ones of an even count."""
    count = mask.sum()
    middle = torch.stack([(count - 1).clamp(min=0) // 2, count // 2])
    return torch.where(mask, values, torch.inf).sort().values.gather(0, middle).mean()


def row_norms(rows: Tensor) -> Tensor:
    """(n) float64: the norms of rows (n, d)."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
