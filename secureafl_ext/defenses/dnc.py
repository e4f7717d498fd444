"""DnC, divide and conquer: spectral outlier removal on random coordinates."""

import torch
from torch import Tensor

from ..rules.row_rules import without_top
from .base import Arrival, Verdict, need
from .memory_rows import LastUpdates, counter_hash, malicious_count


class DnC(LastUpdates):
    """Mean of the rows, without those that have the largest projections on the top singular direction of the centered
    rows.

    Source: Shejwalkar and Houmansadr, NDSS 2021. Each iteration looks at `coordinates` random coordinates and removes
    `remove` * f rows; the rows that no iteration removes are averaged, on all coordinates.
    malicious: f. Default: a fifth of the clients
    iterations: the paper uses 5, common code 1    coordinates: b. The coordinates are cut into b parts, and a hash of
    the round draws one of each, so that no draw happens in the round and none is drawn twice
    momentum: of each client's row, beta * row + (1 - beta) * update; not in the source
    Fed with the memory of last updates.
    """

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        malicious: int | None = None,
        remove: float = 1.0,  # c, the filtering fraction
        iterations: int = 5,
        coordinates: int = 10_000,
        momentum: float = 0.0,
    ):
        count = malicious_count("DnC", clients, malicious)
        limits = f"0 or more, with remove * {count} below {clients}, the clients"
        need(remove >= 0 and remove * count <= clients - 1, "DnC", "remove", limits, remove)
        self.removed = round(remove * count)
        need(iterations >= 1, "DnC", "iterations", "1 or more", iterations)
        need(coordinates >= 1, "DnC", "coordinates", "1 or more", coordinates)
        super().__init__(model, clients, momentum)
        self.iterations, self.coordinates = iterations, min(coordinates, len(model))
        self.rounds = torch.zeros((), dtype=torch.int64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        kept = self.seen
        for iteration in range(self.iterations):
            centred = centered(self._sampled(iteration), self.seen)
            kept = kept & without_top(centred, self.seen, self.removed)
        self.rounds += 1
        # Many iterations can remove every row. Then the last good set is used, as there is no row to average.
        kept = torch.where(kept.any(), kept, without_top(centred, self.seen, self.removed))
        return self.weighted(arrival, stored, kept / kept.sum(dtype=torch.float64).clamp(min=1))

    def _sampled(self, iteration: int) -> Tensor:
        """(n, n) float64: inner products of the rows on the drawn coordinates."""
        size, count = self.rows.shape[1], self.coordinates
        if count == size:
            return self.products
        edges = torch.arange(count + 1, device=self.rows.device) * size // count
        draw = counter_hash(self.rounds * self.iterations + iteration, count)
        part = self.rows.index_select(1, edges[:-1] + draw % edges.diff()).double()  # (n, b)
        return part @ part.T


def centered(gram: Tensor, mask: Tensor) -> Tensor:
    """(n, n): inner products of the rows in mask minus their mean; zero where mask is false."""
    share = mask / mask.sum(dtype=torch.float64).clamp(min=1)
    reach = gram @ share  # (n): products with the mean
    return torch.where(mask[:, None] & mask, gram - reach[:, None] - reach + share @ reach, 0)
