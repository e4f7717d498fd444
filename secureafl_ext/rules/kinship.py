"""rule="kinship": which clients send similar updates, averaged over time until the sampling noise is gone.

A single update is mostly minibatch noise, and any attack can hide in that. The noise of different uploads is
independent, so the mean of their inner products tends to the inner product of the clients' mean updates. Among mean
updates, clients with similar data form groups of about the same size. Attackers form a larger group, or oppose all
others. If all honest clients are similar, they are themselves one large group; therefore groups are searched a second
time after centering, that is, among the mean updates minus their geometric median.
"""

import torch
from torch import Tensor

from .row_rules import median_of

SPAN = 50  # averaging window, in uploads
KNOWN = 3  # uploads of a client that are compared before it is judged
KIN = 0.5  # two clients are similar if the cosine of their mean updates is above this
CROWD = 1.5  # a group is too large if it is this many times the median group
TURNED = -0.2  # a client opposes the others if its cosine to their sum is below this
# Floors for the cosine denominators, in (median norm)^2: the cosine of shorter vectors is noise.
SHORT = 0.1  # |a| |b| of two mean updates
SHORT_SUM = 1.0  # |a| |sum| of a mean update and the sum of all
SHORT_CENTERED = 0.2  # as SHORT, after centering, which leaves more noise
NEAR = 0.1  # floor for the distance to the center in a Weiszfeld step, in median norms


class Kinship:
    """means: (n, n) float64, mean inner products of the clients' updates, clipped to the median norm of all and
    divided by its square. The diagonal holds products of consecutive uploads of one client: their noise is independent.
    met: (n) int64, uploads of each client that were compared: all but its first
    centre: (n) float64, weights of the mean updates in their geometric median; zeros while no client is known
    """

    def __init__(self, clients: int, device: torch.device):
        self.means = torch.zeros(clients, clients, dtype=torch.float64, device=device)
        self.met = torch.zeros(clients, dtype=torch.int64, device=device)
        self.centre = torch.zeros(clients, dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return {"kinship": self.means, "met": self.met, "kin_centre": self.centre}

    def forget(self, client: int) -> None:
        self.means[client] = self.means[:, client] = 0
        self.met[client] = self.centre[client] = 0

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

    def kept(self, mask: Tensor) -> Tensor:
        """(n) bool: the clients of mask that are in no group too large and do not oppose the others."""
        known = mask & (self.met >= KNOWN)
        group = self._group_sizes(self.means, known, SHORT)
        centered_group = self._group_sizes(self.centered(), known, SHORT_CENTERED)
        kept = mask & ~(group > CROWD * median_of(group, mask))  # at least half of them
        both = kept & ~(centered_group > CROWD * median_of(centered_group, mask))
        kept = torch.where(2 * both.sum() >= mask.sum(), both, kept)  # attackers are fewer than half
        norms = self.means.diagonal().clamp(min=0).sqrt()  # (n) of the mean updates
        along = self.means @ kept.double()  # (n): products with the sum of the kept
        norm = (along @ kept.double()).clamp(min=0).sqrt()  # () of that sum
        return kept & ~(known & (along < TURNED * (norms * norm).clamp(min=SHORT_SUM)))

    def centered(self) -> Tensor:
        """(n, n): as `means`, of the mean updates minus their geometric median."""
        along = self.means @ self.centre  # (n)
        return self.means - along[:, None] - along + self.centre @ along

    def update_center(self, when: Tensor) -> None:
        """One Weiszfeld step towards the geometric median if `when` () is true. A round never moves it further."""
        distance = self.centered().diagonal().clamp(min=0).sqrt()
        weights = (self.met >= KNOWN) / distance.clamp(min=NEAR)
        self.centre.copy_(torch.where(when, weights / weights.sum().clamp(min=1e-300), self.centre))

    def _group_sizes(self, products: Tensor, known: Tensor, floor: float) -> Tensor:
        """(n) float64: the number of known clients that are similar to each one, itself included."""
        norms = products.diagonal().clamp(min=0).sqrt()
        alike = products > KIN * (norms[:, None] * norms).clamp(min=floor)
        return 1.0 + (alike & known[:, None] & known).fill_diagonal_(False).sum(1).double()
