"""Centered clipping: rows clipped around the last aggregate."""

import torch
from torch import Tensor

from ..config import MOST_ITERATIONS, Config
from ..rules import row_rules
from ..rules.sums import inner
from .base import Arrival, Verdict, dot, need
from .memory_rows import LastUpdates


class CenteredClip(LastUpdates):
    """v <- v + mean of (row - v) min(1, radius / |row - v|), `iterations` times, from the last aggregate v.

    Source: Karimireddy et al., ICML 2021; radius and iterations from the authors' later code
    (epfml/byzantine-robust-noniid-optimizer)
    radius: tau. 0: the median distance to v
    momentum: of each client's row. The source recommends 0.9; with it this is DeMoA around centered clipping
    Fed with the memory of last updates.
    """

    def __init__(
        self, model: Tensor, clients: int, *, radius: float = 10.0, iterations: int = 3, momentum: float = 0.0
    ):
        need(radius >= 0, "CenteredClip", "radius", "0 or more", radius)
        need(1 <= iterations <= MOST_ITERATIONS, "CenteredClip", "iterations", f"1 to {MOST_ITERATIONS}", iterations)
        super().__init__(model, clients, momentum)
        self.config = Config(rule="centered_clip", radius=radius or None, iterations=iterations)
        self.centre = torch.zeros_like(model)  # v

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        weights, of_centre = centered_weights(self.products, self.rows, self.centre, self.seen, self.config)
        step, *rest = self.weighted(arrival, stored, weights)
        step = step + torch.where(self.ready(), of_centre, 0).to(step.dtype) * self.centre
        # v stays between the rows, but float32 rows at the edge of their range may round to inf.
        finite = step.isfinite().all() & (dot(step, step) <= row_rules.MAX_SQUARE)
        self.centre.copy_(torch.where(stored & self.ready() & finite, step, self.centre))
        return Verdict(step, *rest)


def centered_weights(
    products: Tensor, rows: Tensor, centre: Tensor, mask: Tensor, config: Config
) -> tuple[Tensor, Tensor]:
    """Weights of the rows (n) and of the centre () in the aggregate. rows: (n, d)    centre: (d)    mask: (n)"""
    along = inner(rows, centre)
    last = torch.cat([along, dot(centre, centre)[None]])
    gram = torch.cat([torch.cat([products, along[:, None]], 1), last[None]])  # (n + 1, n + 1)
    weights = row_rules.centered_clip(gram, mask, config)
    return weights[:-1], weights[-1]
