"""Similarity: the inner products of the clients' mean updates, averaged over time until the sampling noise is gone.

A single update is mostly minibatch noise, and any attack can hide in that. The noise of different uploads is
independent, so the mean of their inner products tends to the inner product of the clients' mean updates.
"""

import torch
from torch import Tensor

SPAN = 50  # averaging window, in uploads
KNOWN = 3  # uploads of a client that are compared before it is judged


class Similarity:
    """means: (n, n) float64, mean inner products of the clients' updates, clipped to the median norm of all and
    divided by its square. The diagonal holds products of consecutive uploads of one client: their noise is independent.
    met: (n) int64, uploads of each client that were compared: all but its first
    """

    def __init__(self, clients: int, device: torch.device):
        self.means = torch.zeros(clients, clients, dtype=torch.float64, device=device)
        self.met = torch.zeros(clients, dtype=torch.int64, device=device)

    def forget(self, client: int) -> None:
        self.means[client] = self.means[:, client] = 0
        self.met[client] = 0

    def update_similarity(
        self, client: Tensor, products: Tensor, norm: Tensor, norms: Tensor, median_norm: Tensor, when: Tensor
    ) -> None:
        """Average the inner products of one upload of client (1) with the last upload of every client.

        products, norms: (n) with and of the last uploads, its own included; 0 for clients without one
        norm, median_norm: () of this upload, and the median of all    when: (1) bool, whether the upload counts
        """
        clip = median_norm / torch.maximum(norms, median_norm) * median_norm / torch.maximum(norm, median_norm)
        now = products * clip / median_norm.square()  # (n)
        before, met = self.means.index_select(0, client)[0], self.met.index_select(0, client)
        share = 1 / (met + 1).clamp(max=SPAN).double()  # (1): a plain mean at first
        counts = when & (norms > 0) & now.isfinite()
        after = torch.where(counts, torch.lerp(before, now, share), before)
        self.means.index_copy_(0, client, after[None]).index_copy_(1, client, after[:, None])
        self.met.index_copy_(0, client, met + counts.any())

    def past_probation(self, mask: Tensor) -> Tensor:
        """(n) bool: the known clients of mask; all of mask until half of them are known.

        Otherwise a client that is new, or was forgotten and came back, would count fully before it is judged.
        """
        known = mask & (self.met >= KNOWN)
        return torch.where(2 * known.sum() >= mask.sum(), known, mask)
