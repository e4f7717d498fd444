"""FLTrust: updates weighted by their cosine to a trusted gradient."""

import torch
from torch import Tensor

from ..rules.sums import inner
from .base import Arrival, Trusted, Verdict, need, norm
from .memory_rows import LastUpdates


class FLTrust(LastUpdates):
    """Rescales each row to the norm of a trusted gradient g_0 and weighs it by its trust score max(0, cos(row, g_0)).

    Source: Cao et al., NDSS 2021. step = sum of score * row * |g_0| / |row| over the sum of the scores; 0 if all are 0
    every: rounds between two trusted gradients
    momentum: of each client's row, beta * row + (1 - beta) * update; not in the source
    Fed with the memory of last updates. For a single arrival the score would cancel, and Zeno++'s test would be left.
    """

    def __init__(self, model: Tensor, clients: int, trusted: Trusted, *, every: int = 1, momentum: float = 0.0):
        need(every >= 1, "FLTrust", "every", "1 or more", every)
        super().__init__(model, clients, momentum)
        self.trusted, self.every = trusted, every
        self.reference = torch.zeros_like(model)  # g_0

    def judge(self, arrival: Arrival) -> Verdict:
        if arrival.refresh:
            self.reference.copy_(self.trusted.gradient(arrival.model).detach())
        stored = self.remember(arrival)
        lengths, length = self.products.diagonal().sqrt(), norm(self.reference)
        along = inner(self.rows, self.reference)  # (n)
        known = lengths * length > 0  # a zero row has no direction, and a zero g_0 trusts nobody
        scores = torch.where(known, along / (lengths * length), 0).clamp(min=0)
        total = scores.sum()
        weights = torch.where(known & (total > 0), scores / total * length / lengths, 0)
        return self.weighted(arrival, stored, weights)
