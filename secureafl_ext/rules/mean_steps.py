"""averages="steps": rule="support" from the mean of each client's updates, weighted by how far they moved the model.

Similarity compares an upload with the others' last ones, and an attacker chooses what its last upload is: if each sends
a harmless one right after a harmful one, no two harmful ones are ever compared. Here nothing depends on what came last.
An upload counts by the share of a full step that the model made along it. So a decoy that moves nothing hides nothing,
and one that moves the model takes the place of a harmful upload.
"""

import torch
from torch import Tensor

from . import support
from .similarity import SPAN
from .sketched_support import BLOCK, SketchedSupport, may_be_averaged

LEAST = 0.1  # share of an upload that does not move the model: who lost all weight wins it back, ten times as slowly
ALONE = 0.75  # a mean with more noise than this is hardly more than one upload: its length is not known yet


class MeanSteps(SketchedSupport):
    """means: (n, k) mean of each client's updates, as in SketchedSupport, but weighted by their shares
    squares: (n) float64, of these means without the noise of single updates    total: (n) float64, sum of the shares,
    at most SPAN    noise: (n) float64, sum of the squared weights of the updates in the mean
    """

    def __init__(self, clients: int, width: int, dtype: torch.dtype, device: torch.device):
        super().__init__(clients, width, dtype, device)
        self.total, self.noise = torch.zeros(2, clients, dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"total": self.total, "noise": self.noise}

    def add_step(
        self, client: Tensor, update: Tensor, norm: Tensor, median_norm: Tensor, stored: Tensor, moved: Tensor
    ) -> None:
        """Average an upload of client (1) if it is stored. update: (k)    norm, median_norm: () float64, of this upload
        and of all clients' last ones    moved: () float64, how far the model moved along it, in full steps"""
        mean, noise, total, before, met = (
            kept.index_select(0, client)[0] for kept in (self.means, self.noise, self.total, self.norms, self.met)
        )
        now = update.double() / torch.maximum(norm, median_norm)
        counts = stored & may_be_averaged(norm, now)
        share = LEAST + (1 - LEAST) * moved.clamp(0, 1)
        total_now = (total + share).clamp(max=SPAN)
        weight = torch.where(counts, share / total_now, 0)
        after = torch.where(counts, torch.lerp(mean.double(), now, weight), mean.double()).to(mean.dtype)
        noise = torch.where(counts, (1 - weight).square() * noise + weight.square(), noise)
        # The square of a mean of updates of length 1 or less has up to `noise` (1 - square) of their noise in it.
        square = torch.linalg.vector_norm(after, dtype=torch.float64).square()
        square = (square - noise) / (1 - noise.clamp(max=ALONE))
        square = torch.where(noise <= ALONE, square.clamp(min=0), 0)
        self.means.index_copy_(0, client, after[None])
        self.squares.index_copy_(0, client, square[None])
        self.noise.index_copy_(0, client, noise[None])
        self.total.index_copy_(0, client, torch.where(counts, total_now, total)[None])
        self.met.index_copy_(0, client, (met + (counts & (before > 0)))[None])
        self.norms.index_copy_(0, client, torch.where(stored, norm, before)[None])

    def products(self) -> Tensor:
        """(n, n) float64: inner products of the clients' means, without noise on the diagonal."""
        own = torch.zeros(len(self.means), len(self.means), dtype=torch.float64, device=self.means.device)
        for part in self.means.split(max(1, BLOCK // (8 * len(self.means))), 1):  # no float64 copy of all
            own += part.double() @ part.double().T
        shortened = (self.squares / own.diagonal().clamp(min=1e-300)).clamp(max=1).sqrt()
        return own * shortened[:, None] * shortened

    def _shifts(self, chosen: Tensor) -> Tensor:
        few = len(self.means) <= self.means.shape[1]
        return support.shifts(self.products()[chosen][:, chosen]) if few else super()._shifts(chosen)
