"""What f clients can do to one step of the model at most, rule by rule, and a search for the worst that they can do.

h honest rows (what the others sent last, or their estimates) are fixed; f attackers choose theirs; N = h + f take part.
A bound is a function (Rows, aggregate) -> ratio: how far the aggregate is from a point that the attackers cannot move,
over the most that it can be. docs/bounds.md derives them.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from secureafl_ext import SecureAFL
from secureafl_ext.config import Config

LONGER = int(os.environ.get("SECUREAFL_SEARCH", "1"))  # times as long a search
N, D, ATTACKERS = 12, 14, [0, 4, 9]
HONEST = [k for k in range(N) if k not in ATTACKERS]
SLACK = 1e-5  # of rounding, in lengths of the longest honest row


@dataclass(frozen=True)
class Rows:
    honest: Tensor  # (h, d) float64
    f: int
    config: Config
    centre: Tensor  # (d): the last aggregate, for centered_clip

    @property
    def count(self) -> int:
        return len(self.honest) + self.f

    @property
    def slack(self) -> float:
        return SLACK * float(self.honest.norm(dim=1).max())


def middle(honest: Tensor, f: int, trim: int | None = None) -> tuple[Tensor, Tensor]:
    """Least and most of the trimmed mean (None: the median) per column, whatever f more values are.

    Of N sorted values the k-th lies between the honest ones of rank k - f and k.
    """
    ranks, count = honest.sort(0).values, len(honest) + f
    first, last = ((count - 1) // 2, count // 2) if trim is None else (trim, count - 1 - trim)
    assert first >= f, "more attackers than the rule tolerates"
    return ranks[first - f : last - f + 1].mean(0), ranks[first : last + 1].mean(0)


def median_norm(rows: Rows) -> float:
    """The largest median of all norms."""
    return float(middle(rows.honest.norm(dim=1, keepdim=True), rows.f)[1])


def _off(rows: Rows, distance: Tensor, most: float | Tensor) -> float:
    return float(((distance - rows.slack).clamp(min=0) / torch.as_tensor(most).clamp(min=1e-300)).max())


def _in_interval(rows: Rows, aggregate: Tensor, trim: int | None) -> float:
    least, most = middle(rows.honest, rows.f, trim)
    return _off(rows, (aggregate - (least + most) / 2).abs(), (most - least) / 2)


def median(rows: Rows, aggregate: Tensor) -> float:
    return _in_interval(rows, aggregate, None)


def trimmed_mean(rows: Rows, aggregate: Tensor) -> float:
    return _in_interval(rows, aggregate, rows.config.trim)


def centered_clip(rows: Rows, aggregate: Tensor) -> float:
    """A radius r: T iterations without the attackers' pull, T f r / N around. None: the radii added up, at most."""
    at, c, n = rows.centre, rows.config, rows.count
    if c.radius is not None:
        for _ in range(c.iterations):
            away = rows.honest - at
            at = at + (away * (c.radius / away.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / n
        return _off(rows, (aggregate - at).norm(), c.iterations * rows.f * c.radius / n)
    away = (rows.honest - at).norm(dim=1, keepdim=True)
    farthest, wide = float(away.max()), float(torch.cdist(rows.honest, rows.honest).max())
    radii = [float(middle(away, rows.f)[1])]
    while len(radii) < c.iterations:
        farthest = (len(rows.honest) * max(farthest, wide) + rows.f * (farthest + radii[-1])) / n
        radii.append(farthest)
    return _off(rows, (aggregate - at).norm(), sum(radii))


def cut_to_median(rows: Rows, aggregate: Tensor) -> float:
    """spectral, kinship: a mean of rows none of which is longer than the median norm of all."""
    return _off(rows, aggregate.norm(), median_norm(rows))


def two_medians(rows: Rows, aggregate: Tensor) -> float:
    """support: no client has more than two mean weights, and no row is longer than the median norm of all."""
    return _off(rows, aggregate.norm(), 2 * median_norm(rows))


def krum(rows: Rows, aggregate: Tensor) -> float:
    """Distance to the nearest honest row: the chosen one scores no worse than the best honest one would alone."""
    taken_for_malicious = int(rows.config.remove * rows.count)
    assert rows.f <= taken_for_malicious, "more attackers than the rule tolerates"
    neighbours = rows.count - taken_for_malicious - 2
    squares = torch.cdist(rows.honest, rows.honest).square().sort(1).values[:, 1 : neighbours + 1]
    best, honest_neighbours = squares.sum(1).min(), neighbours - (rows.f - 1)
    return _off(rows, (rows.honest - aggregate).norm(dim=1).min(), (best / honest_neighbours).sqrt())


def geometric_median(rows: Rows, aggregate: Tensor) -> float:
    """Distance to the honest mean: no step of Weiszfeld's brings a point farther than the start or R N / (N - 2f)."""
    centre, n = rows.honest.mean(0), rows.count
    assert 2 * rows.f < n, "more attackers than the rule tolerates"
    norms = rows.honest.norm(dim=1, keepdim=True)
    least, most = (float(x) for x in middle(norms, rows.f))
    starts = [(rows.honest * (m / norms).clamp(max=1) - centre).norm(dim=1) for m in (least, most)]
    start = (torch.maximum(*starts).sum() + rows.f * (most + centre.norm())) / n
    spread = (rows.honest - centre).norm(dim=1).max() * n / (n - 2 * rows.f)
    return _off(rows, (aggregate - centre).norm(), torch.maximum(start, spread))


BOUNDS = {
    "median": median,
    "trimmed_mean": trimmed_mean,
    "centered_clip": centered_clip,
    "spectral": cut_to_median,
    "krum": krum,
    "geometric_median": geometric_median,
    "kinship": cut_to_median,
    "support": two_medians,
}


def rows_of(server: SecureAFL, attackers: list[int], client: int, update: Tensor) -> Rows:
    """As the round of this upload has them, if it is accepted."""
    rows, seen = server.estimates().double().cpu(), server.seen.cpu().clone()
    rows[client], seen[client] = update.double().cpu(), True
    bad = torch.zeros_like(seen)
    bad[attackers] = True
    centre = server._engine.rows.centre.double().cpu() if server.config.row_wise else torch.zeros(rows.shape[1])
    return Rows(rows[seen & ~bad], int((seen & bad).sum()), server.config, centre)


def step_of(server: SecureAFL, *upload) -> tuple[Tensor, bool]:
    """The aggregate that the model stepped along (d), and whether it did."""
    before = server.model.double().cpu()
    accepted = bool(server.submit(*upload).accepted)
    return (before - server.model.double().cpu()) / server.lr, accepted


def search(ratio, start, change, random: torch.Generator, restarts: int, steps: int) -> float:
    """The largest ratio of candidates found: from random starts, whatever is better is kept and changed further.

    start(random) and change(candidate, size, random) give candidates. After a change that helped, the next is larger.
    """
    best = 0.0
    for _ in range(restarts):
        candidate, size = max((start(random) for _ in range(8)), key=ratio), 1.0
        value = ratio(candidate)
        for _ in range(steps):
            other = change(candidate, size, random)
            if (found := ratio(other)) >= value:
                size = min(size * (1.5 if found > value else 1), 10.0)
                candidate, value = other, found
            else:
                size = max(size * 0.9, 1e-4)
        best = max(best, value)
    return best


def number(random: torch.Generator, below: int) -> int:
    return int(torch.randint(below, (), generator=random))


def normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=random)
