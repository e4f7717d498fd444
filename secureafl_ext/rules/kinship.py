"""rule="kinship": leaves out groups of clients that are too large, and clients that oppose the others.

It judges mean updates (similarity.py), not single ones. Among mean updates, clients with similar data form groups of
about the same size. Attackers form a larger group, or oppose all others. If all honest clients are similar, they are
themselves one large group; therefore groups are searched a second time after centering, that is, among the mean updates
minus their geometric median.
"""

import torch
from torch import Tensor

from .row_rules import median_of
from .similarity import KNOWN, SPAN, Similarity

__all__ = ["KNOWN", "SPAN", "Kinship"]

KIN = 0.5  # two clients are similar if the cosine of their mean updates is above this
CROWD = 1.5  # a group is too large if it is this many times the median group
TURNED = -0.2  # a client opposes the others if its cosine to their sum is below this
# Floors for the cosine denominators, in (median norm)^2: the cosine of shorter vectors is noise.
SHORT = 0.1  # |a| |b| of two mean updates
SHORT_SUM = 1.0  # |a| |sum| of a mean update and the sum of all
SHORT_CENTERED = 0.2  # as SHORT, after centering, which leaves more noise
NEAR = 0.1  # floor for the distance to the center in a Weiszfeld step, in median norms


class Kinship(Similarity):
    """centre: (n) float64, weights of the mean updates in their geometric median; zeros while no client is known"""

    def __init__(self, clients: int, device: torch.device):
        super().__init__(clients, device)
        self.centre = torch.zeros(clients, dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return {"kinship": self.means, "met": self.met, "kin_centre": self.centre}

    def forget(self, client: int) -> None:
        super().forget(client)
        self.centre[client] = 0

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
