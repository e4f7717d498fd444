"""FoolsGold: clients whose summed updates are too similar lose their weight."""

import torch
from torch import Tensor

from ..rules.row_rules import MAX_SQUARE
from ..rules.sums import inner
from .base import Arrival, Verdict, dot, need
from .memory_rows import LastUpdates


class FoolsGold(LastUpdates):
    """Weighs each client by how different the sum of its updates is from the most similar sum of another client.

    Source: Fung et al., RAID 2020; code DistributedML/FoolsGold, deep-fg/fg/foolsgold.py
    cs_ij: cosine of the sums of i and j, 0 for i = j; m_i = max_j cs_ij. Pardoning: cs_ij *= m_i / m_j if m_i < m_j.
    a_i = 1 - max_j cs_ij within 0 .. 1, divided by the largest a; 0.99 for the largest itself.
    weight_i = confidence * (logit(a_i) + 0.5) within 0 .. 1. The step is the sum of weight * last update over the
    number of known clients: the original adds up the updates of all n clients once per round, and here a round has one
    arrival.
    pardon: False leaves the pardoning out
    normalize: divide by the sum of the weights instead, so that the step keeps its length when few have weight
    momentum: of each client's row, beta * row + (1 - beta) * update; not in the source
    """

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        confidence: float = 1.0,
        pardon: bool = True,
        normalize: bool = False,
        momentum: float = 0.0,
    ):
        need(confidence > 0, "FoolsGold", "confidence", "positive", confidence)
        super().__init__(model, clients, momentum)
        self.confidence, self.pardon, self.normalize = confidence, pardon, normalize
        self.sums = torch.zeros_like(self.rows)  # (n, d) of all updates of each client
        self.sum_products = torch.zeros_like(self.products)  # (n, n)

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        self._add(arrival, stored)
        weights = self._trust()
        over = weights.sum() if self.normalize else self.seen.sum(dtype=torch.float64)
        return self.weighted(arrival, stored, weights / torch.where(over > 0, over, 1))

    def forget(self, client: int) -> None:
        super().forget(client)
        self.sums[client] = 0
        self.sum_products[client] = self.sum_products[:, client] = 0

    def _add(self, arrival: Arrival, stored: Tensor) -> None:
        """Add the update to the client's sum, unless the sum would overflow."""
        i = arrival.client
        before = self.sums.index_select(0, i)[0]
        total = before + arrival.update
        adds = stored & total.isfinite().all() & (dot(total, total) <= MAX_SQUARE)
        self.sums.index_copy_(0, i, torch.where(adds, total, before)[None])
        along = inner(self.sums, self.sums.index_select(0, i)[0])
        along = torch.where(adds, along, self.sum_products.index_select(0, i)[0])
        self.sum_products.index_copy_(0, i, along[None]).index_copy_(1, i, along[:, None])

    def _trust(self) -> Tensor:
        """(n) float64: the weights of the clients before they are divided, 0 to 1."""
        norms = self.sum_products.diagonal().sqrt()
        lengths = norms[:, None] * norms
        alike = torch.where(lengths > 0, self.sum_products / lengths, 0).fill_diagonal_(0)
        if self.pardon:
            most = alike.amax(1)  # (n), 0 or more: the diagonal is 0
            alike = torch.where(most[:, None] < most, alike * most[:, None] / most, alike)
        trust = torch.where(self.seen, (1 - alike.amax(1)).clamp(0, 1), 0)
        best = trust.max()
        trust = torch.where(trust == best, 0.99 * (best > 0), trust / best)
        return (self.confidence * (trust.logit() + 0.5)).clamp(0, 1)
