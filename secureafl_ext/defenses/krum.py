"""Krum and Multi-Krum: the rows with the nearest neighbors."""

import torch
from torch import Tensor

from ..rules.row_rules import krum_scores, ranks
from .base import Arrival, Verdict, need
from .memory_rows import LastUpdates, malicious_count


class Krum(LastUpdates):
    """Mean of the `selected` rows with the least sum of squared distances to their n - f - 2 nearest rows.

    Source: Blanchard et al., NeurIPS 2017. 1 selected row is Krum, more is Multi-Krum.
    malicious: f. Default: a fifth of the clients
    momentum: of each client's row, beta * row + (1 - beta) * update; not in the source
    Fed with the memory of last updates.
    """

    def __init__(
        self, model: Tensor, clients: int, *, malicious: int | None = None, selected: int = 1, momentum: float = 0.0
    ):
        super().__init__(model, clients, momentum)
        self.malicious, self.selected = malicious_count("Krum", clients, malicious), selected
        need(1 <= selected <= clients, "Krum", "selected", f"1 to {clients}", selected)

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        weights = multi_krum(self.products, self.seen, self.malicious, self.selected)
        return self.weighted(arrival, stored, weights)


def multi_krum(gram: Tensor, mask: Tensor, malicious: int, selected: int) -> Tensor:
    """(n) float64 weights of the rows in the mean of the selected ones. gram: (n, n)    mask: (n)"""
    scores = krum_scores(gram, mask, malicious)
    chosen = mask & (ranks(scores.argsort(stable=True)) < selected)
    return chosen / chosen.sum(dtype=torch.float64).clamp(min=1)
