"""averages="steps": rule="support" from the mean of each client's updates, weighted by how far they moved the model.

Similarity compares an upload only with the others' last uploads. If each attacker sends a harmless upload right after a
harmful one, no two harmful ones are ever compared. Here the order of uploads hardly matters.
An upload counts by the share of a full step that the model made along it. So a decoy that moves nothing hides nothing,
and one that moves the model takes the place of a harmful upload.
"""

import torch
from torch import Tensor

from . import support
from .row_rules import MAX_SQUARE
from .sketched_support import shifts as shifts_of_rows
from .sketched_support import shortened
from .sums import inner

SPAN = 8  # averaging window, in full steps: a client that turns harmful is found within so many
LEAST = 0.03  # share of an upload that does not move the model: so a client without weight can recover, slowly
NO_DIRECTION = 1e-24  # square of a mean that is all noise: above 0, to differ from that of a client without a mean
ALONE = 0.75  # a mean with more noise than this is almost a single upload: its length cannot be estimated yet


class MeanSteps:
    """means: (n, k) mean of each client's updates or of their sketches, clipped to the median norm of all and divided
    by it, weighted by their shares    total: (n) float64, sum of the shares, at most SPAN
    noise: (n) float64, sum of the squared weights of the updates in the mean    norms: (n) float64, of the last updates
    shift: (n) float64, of the clients' weights from 1 / count
    basis: see Support; only the fused round uses it. None where there is no fused round
    """

    def __init__(self, means: Tensor, basis: bool):
        """means: (n, k) zeros"""
        clients, device = len(means), means.device
        self.means = means
        self.total, self.noise, self.norms, self.shift = torch.zeros(4, clients, dtype=torch.float64, device=device)
        self.basis = support.first_basis(clients, device) if basis else None

    def tensors(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in ("means", "total", "noise", "norms", "shift")}
        return own if self.basis is None else own | {"basis": self.basis}

    def forget(self, client: int) -> None:
        for tensor in (self.means, self.total, self.noise, self.norms, self.shift):
            tensor[client] = 0
        if self.basis is not None:  # eigenvectors tell of every client
            self.basis.copy_(support.first_basis(len(self.means), self.basis.device))

    def add(
        self, client: Tensor, update: Tensor, norm: Tensor, median_norm: Tensor, stored: Tensor, moved: Tensor
    ) -> None:
        """Average an upload of client (1) if it is stored. update: (k) it or its sketch, finite
        norm, median_norm: () float64, of this upload and of all clients' last ones
        moved: () float64, how far the model moved along it, in full steps"""
        mean, noise, total, before = (
            kept.index_select(0, client)[0] for kept in (self.means, self.noise, self.total, self.norms)
        )
        length = torch.maximum(norm, median_norm)
        counts = stored & (norm.square() <= MAX_SQUARE) & (length > 0)
        share = LEAST + (1 - LEAST) * moved.clamp(0, 1)
        total_now = (total + share).clamp(max=SPAN)
        weight = share / total_now
        after = torch.lerp(mean.double(), update.double() / length, weight).to(mean.dtype)
        noise_now = (1 - weight).square() * noise + weight.square()
        self.means.index_copy_(0, client, torch.where(counts, after, mean)[None])
        self.noise.index_copy_(0, client, torch.where(counts, noise_now, noise)[None])
        self.total.index_copy_(0, client, torch.where(counts, total_now, total)[None])
        self.norms.index_copy_(0, client, torch.where(stored, norm, before)[None])

    def weights(self, mask: Tensor) -> Tensor:
        return support.weights(self.shift, mask)

    def squares(self, own: Tensor) -> Tensor:
        """(n) float64: the squared lengths of the means without noise; own: (n) float64, with it.

        The square of a mean of updates of length 1 or less has up to `noise` (1 - square) of their noise in it.
        """
        square = (own - self.noise) / (1 - self.noise.clamp(max=ALONE))
        return torch.where(self.noise <= ALONE, square.clamp(min=NO_DIRECTION), 0)

    def own_products(self) -> Tensor:
        """(n, n) float64: inner products of the clients' means. A slice of the coordinates has its share of each."""
        return inner(self.means, self.means)

    def products(self, own: Tensor | None = None) -> Tensor:
        """(n, n) float64: inner products of the clients' means, shortened by their noise.

        own: own_products over all coordinates, if the means here are a slice
        """
        own = self.own_products() if own is None else own
        lengths = (self.squares(own.diagonal()) / own.diagonal().clamp(min=1e-300)).clamp(max=1).sqrt()
        return own * lengths[:, None] * lengths

    def refresh(self, mask: Tensor, own: Tensor | None = None) -> None:
        """Compute the shifts anew. Waits for the device. mask: (n) bool, clients that count    own: as in products"""
        support.reset_shifts(self.shift, mask)
        chosen = mask.nonzero()[:, 0]
        if not len(chosen):
            return
        clients, width = self.means.shape
        if own is not None or clients <= width or width == 0:  # the products of the clients are the smaller matrix
            self.shift[chosen] = support.shifts(self.products(own)[chosen][:, chosen].clamp(-1, 1))
        else:
            rows = self.means.double()
            self.shift[chosen] = shifts_of_rows(shortened(rows, self.squares(rows.square().sum(1)))[chosen])
