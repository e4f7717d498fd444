"""NNM: nearest neighbor mixing in front of a robust rule."""

import torch
from torch import Tensor

from ..config import Config
from ..rules.row_rules import geometric_median, squared_distances
from .base import Arrival, Verdict
from .memory_rows import LastUpdates, malicious_count, trimmed_mean


class NNMTrimmedMean(LastUpdates):
    """Each row becomes the mean of its n - f nearest rows, itself included. Then the trimmed mean drops the f smallest
    and f largest values of each coordinate.

    Source: Allouah et al., AISTATS 2023 (arXiv 2302.01772); trimmed mean: Yin et al., ICML 2018
    malicious: f. Default: a fifth of the clients
    momentum: of each client's row, beta * row + (1 - beta) * update; not in the source
    Fed with the memory of last updates. No step before more than 2 f clients are known, and more than half of them.
    """

    weighs = False

    def __init__(self, model: Tensor, clients: int, *, malicious: int | None = None, momentum: float = 0.0):
        super().__init__(model, clients, momentum)
        self.malicious = malicious_count("NNMTrimmedMean", clients, malicious)

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        mixed = mixing(self.products, self.seen, self.malicious).to(self.rows.dtype) @ self.rows  # (n, d)
        return self.stepped(stored, *trimmed_mean(mixed, self.malicious, self.seen))


class NNMGeometricMedian(LastUpdates):
    """Each row becomes the mean of its n - f nearest rows, itself included. Then their geometric median.

    Source: Allouah et al., AISTATS 2023 (arXiv 2302.01772); geometric median: Pillutla et al. 2022
    malicious: f. Default: a fifth of the clients
    momentum: of each client's row, beta * row + (1 - beta) * update; not in the source
    Fed with the memory of last updates. The mixed rows are never computed: their inner products are enough.
    """

    def __init__(self, model: Tensor, clients: int, *, malicious: int | None = None, momentum: float = 0.0):
        super().__init__(model, clients, momentum)
        self.malicious = malicious_count("NNMGeometricMedian", clients, malicious)
        self.config = Config(rule="geometric_median")

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        mix = mixing(self.products, self.seen, self.malicious)
        weights = geometric_median(mix @ self.products @ mix.T, self.seen, self.config) @ mix
        return self.weighted(arrival, stored, weights)


def mixing(gram: Tensor, mask: Tensor, malicious: int) -> Tensor:
    """(n, n) float64: the matrix that replaces each row by the mean of its count - f nearest rows; zeros where mask is
    false. gram: (n, n)    mask: (n)"""
    nearness = torch.where(mask, squared_distances(gram), torch.inf).fill_diagonal_(-1)  # each row is its own first
    kept = (mask.sum() - malicious).clamp(min=1)
    order = nearness.sort(dim=1, stable=True).indices
    rank = order.argsort(1)  # the inverse of a permutation
    chosen = (rank < kept) & mask & mask[:, None]
    return chosen / kept.double()
