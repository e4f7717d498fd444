"""Who pulls together: inner products of the clients' updates, averaged over time until the sampling noise is gone.

One update of a client is mostly noise of its minibatch, in which any attack can hide. But the noise of different
uploads is independent, so the mean of their inner products tends to that of the clients' mean updates. There clients
of alike data form groups of about the same size, and attackers one that is larger, or turned against all others. Where
all honest clients are alike, that is one group larger than any other: so groups are looked for once more among what
is left of the mean updates without their geometric median.
"""

import torch
from torch import Tensor

from .row_rules import median_of

SPAN = 50  # meetings that the averages reach back, about
KNOWN = 3  # meetings of a client before it is judged
KIN = 0.5  # cosine between mean updates above which two clients are kin
CROWD = 1.5  # times as many kin as the median client has: too many
TURNED = -0.2  # cosine to the sum of all below which a client works against them
# In squares of the median norm: what the lengths of two mean updates, multiplied, and those of one and of the sum are
# at least taken for. A cosine of shorter ones would be one of noise.
SHORT, SHORT_SUM = 0.1, 1.0
SHORT_APART = 0.2  # the first of the two once the centre is taken off, which leaves more noise
NEAR = 0.1  # distance to the centre, in median norms, below which a client counts no more for it


class Kinship:
    """means: (n, n) float64: products of the clients' updates, cut to the median of all lengths, in squares of that
    median. On the diagonal those of consecutive uploads of one client: no noise is multiplied by itself.
    met: (n) int64: how often each client has met the others, that is, uploads but for the first
    centre: (n) float64: weights of the mean updates in their geometric median; zeros while nobody is known
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

    def meet(
        self, client: Tensor, products: Tensor, length: Tensor, lengths: Tensor, usual: Tensor, when: Tensor
    ) -> None:
        """One upload of client (1) meets the last of everybody.

        products, lengths: (n) with and of the last uploads, its own among them; 0 for clients that have none
        length, usual: () of this upload, and the median of all    when: (1) bool, whether it counts
        """
        cut = usual / torch.maximum(lengths, usual) * usual / torch.maximum(length, usual)
        now = products * cut / usual.square()  # (n)
        before, met = self.means.index_select(0, client)[0], self.met.index_select(0, client)
        share = 1 / (met + 1).clamp(max=SPAN).double()  # (1): a plain mean at first
        counts = when & (lengths > 0) & now.isfinite()
        after = torch.where(counts, torch.lerp(before, now, share), before)
        self.means.index_copy_(0, client, after[None]).index_copy_(1, client, after[:, None])
        self.met.index_copy_(0, client, met + counts.any())

    def past_probation(self, mask: Tensor) -> Tensor:
        """(n) bool: those of mask that are known; all of mask until half of them are.

        Without this a client that is new, or was forgotten and came again, would count in full before it is judged.
        """
        known = mask & (self.met >= KNOWN)
        return torch.where(2 * known.sum() >= mask.sum(), known, mask)

    def kept(self, mask: Tensor) -> Tensor:
        """(n) bool: those of mask who neither crowd nor turn against the rest."""
        known = mask & (self.met >= KNOWN)
        kin, kin_apart = self._kin(self.means, known, SHORT), self._kin(self.apart(), known, SHORT_APART)
        kept = mask & ~(kin > CROWD * median_of(kin, mask))  # at least half of them
        both = kept & ~(kin_apart > CROWD * median_of(kin_apart, mask))
        kept = torch.where(2 * both.sum() >= mask.sum(), both, kept)  # attackers are fewer than half
        lengths = self.means.diagonal().clamp(min=0).sqrt()  # (n) of the mean updates
        pull = self.means @ kept.double()  # (n): along the sum of the kept
        length = (pull @ kept.double()).clamp(min=0).sqrt()  # () of that sum
        return kept & ~(known & (pull < TURNED * (lengths * length).clamp(min=SHORT_SUM)))

    def apart(self) -> Tensor:
        """(n, n): as `means`, of the mean updates without the centre."""
        reach = self.means @ self.centre  # (n)
        return self.means - reach[:, None] - reach + self.centre @ reach

    def settle(self, when: Tensor) -> None:
        """The centre a step on towards the geometric median (Weiszfeld's), if `when` () is true; a round moves it no
        further than that."""
        distance = self.apart().diagonal().clamp(min=0).sqrt()
        weights = (self.met >= KNOWN) / distance.clamp(min=NEAR)
        self.centre.copy_(torch.where(when, weights / weights.sum().clamp(min=1e-300), self.centre))

    def _kin(self, products: Tensor, known: Tensor, short: float) -> Tensor:
        """(n) float64: how many each one pulls together with, itself among them."""
        lengths = products.diagonal().clamp(min=0).sqrt()
        alike = products > KIN * (lengths[:, None] * lengths).clamp(min=short)
        return 1.0 + (alike & known[:, None] & known).fill_diagonal_(False).sum(1).double()
