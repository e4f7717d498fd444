"""The weighted rule of "Weight for Robustness": rows weigh as much as their clients have uploaded."""

import torch
from torch import Tensor

from ..rules.row_rules import SMOOTHING, distances_to, median_of, row_norms
from .base import Arrival, Verdict, need
from .memory_rows import LastUpdates

BASES = ("geometric_median", "median")
WEISZFELD_STEPS = 3  # as in the official code


class Weighted(LastUpdates):
    """A robust aggregate in which each row has the weight s_i, the number of the client's uploads. Then the centered
    trimmed meta-aggregator: the mean of the rows nearest to that aggregate, up to the share 1 - trim of all weight.

    Source: Dahan and Levy, NeurIPS 2024 (arXiv 2501.09621); code dahan198/asynchronous-fault-tolerant-ml
    base: "geometric_median", three weighted Weiszfeld steps from zero, or "median", the weighted coordinate-wise median
    trim: lambda, the largest share of all uploads that malicious clients make; 0: the base alone. It must exceed the
    share of malicious clients, because the share of their uploads fluctuates around that
    momentum: of each client's row. The source's optimizer mu2-SGD asks a client for two gradients, at the new and at
    the old model. An upload here is one gradient, so only the source's variant with plain momentum can be run
    Clients that upload more often weigh more: the rule counts malicious uploads, not malicious clients.
    """

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        base: str = "geometric_median",
        trim: float = 0.3,
        momentum: float = 0.9,
    ):
        need(base in BASES, "Weighted", "base", f"one of {', '.join(BASES)}", base)
        need(0 <= trim < 0.5, "Weighted", "trim", "0 or more, below 0.5", trim)
        super().__init__(model, clients, momentum)
        self.base, self.trim = base, trim
        self.weighs = base == "geometric_median" or trim > 0
        self.uploads = torch.zeros(clients, dtype=torch.int64, device=model.device)  # s

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        self.uploads.index_add_(0, arrival.client, stored.long()[None])
        counts = self.uploads.double()
        if self.base == "geometric_median":
            weights = weighted_geometric_median(self.products, counts)
            distance = distances_to(self.products, weights)
        else:
            middle = weighted_median(self.rows, counts)
            if not self.trim:
                return self.stepped(stored, middle, self.seen.any())
            distance = row_norms(self.rows - middle)
        if self.trim:
            weights = nearest_weight(distance, counts, 1 - self.trim)
        return self.weighted(arrival, stored, weights)

    def forget(self, client: int) -> None:
        super().forget(client)
        self.uploads[client] = 0


def weighted_geometric_median(gram: Tensor, counts: Tensor) -> Tensor:
    """(n) weights of the rows in their weighted geometric median. gram: (n, n)    counts: (n) float64, 0: no row"""
    weights, mask = torch.zeros_like(counts), counts > 0
    floor = (SMOOTHING * median_of(gram.diagonal().sqrt(), mask)).clamp(1e-100, 1e300)  # inf while there is no row
    for _ in range(WEISZFELD_STEPS):
        pull = counts / distances_to(gram, weights).clamp(min=floor)
        weights = pull / torch.where(mask.any(), pull.sum(), 1)
    return weights


def weighted_median(rows: Tensor, counts: Tensor) -> Tensor:
    """(d): per coordinate the first value, in ascending order, with more than half of the weight up to it."""
    ordered, index = rows.sort(0)
    below = counts[index].cumsum(0) <= counts.sum() / 2  # (n, d)
    return ordered.gather(0, below.sum(0, keepdim=True).clamp(max=len(rows) - 1))[0]


def nearest_weight(distance: Tensor, counts: Tensor, share: float) -> Tensor:
    """(n) weights of the mean of the nearest rows that hold this share of all counts. The last of them counts in part.

    distance: (n)    counts: (n) float64, 0: no row
    """
    order = torch.where(counts > 0, distance, torch.inf).argsort(stable=True)
    sorted_counts = counts[order]
    target = share * counts.sum()
    taken = torch.minimum((target - (sorted_counts.cumsum(0) - sorted_counts)).clamp(min=0), sorted_counts)
    return torch.zeros_like(counts).scatter(0, order, taken / target.clamp(min=1e-300))
