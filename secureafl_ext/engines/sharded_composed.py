"""Composed rounds whose coordinates are split over the ranks of a process group."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import Config
from ..rules.mean_steps import MeanSteps
from ..rules.support import Support
from .averaged import Averaged
from .base import Outcome
from .composed import JUDGED, Composed
from .ranks import NotifyPeers, Ranks


def fits(config: Config) -> bool:
    """Corrections need inner products of the pairs, and centered_clip those of its center: further sums, and for some
    of them a second message in every round."""
    return config.memory == 0 and config.rule != "centered_clip"


class OverRanks(Composed):
    """A composed round over this rank's coordinates. It decides by sums over all of them.

    Each rank has its slices of the last updates and models. Everything without coordinates is the same on all ranks,
    bit for bit: inner products, similarities, Q, presence. Every rank computes it from the sums of the same messages.
    """

    capturable = False

    def __init__(self, config: Config, clients: int, size: int, device: torch.device, ranks: Ranks):
        super().__init__(config, clients, size, device)
        self.ranks = ranks
        per_client = self.rows is not None or config.averages == "steps"  # products with the update; shifts
        self._update_sums = ranks.zeros(JUDGED + clients * per_client)  # over all ranks, of the last message
        self.notify_peers = NotifyPeers(ranks, len(self._update_sums))

    def synchronize(self, call: str, facts: Mapping[str, int], sums: Tensor | None = None) -> Tensor:
        message = self.ranks.padded(sums, len(self._update_sums))
        self._update_sums = self.ranks.agree(call, facts, message)
        return self._update_sums

    def _sums(self, client: Tensor, update: Tensor, trained_on: Tensor) -> Tensor:
        return self._update_sums

    def _notify_of(self, refresh: bool) -> NotifyPeers:
        """For the part of a round that a rank does alone. If a refresh follows, the peers wait for its message."""
        return self.notify_peers if refresh else NotifyPeers(None)

    def _take_shifts_of_first_rank(self, support: Support | MeanSteps, rounds: int) -> None:
        """A second message, after a refresh. Eigenvectors of equal eigenvalues are arbitrary: another processor or
        number of threads may find others, and the ranks would weigh the same client differently."""
        own = support.shift if self.ranks.rank == 0 else None
        shift = self.synchronize("refresh", {"rounds": rounds}, own)[: self.clients]
        support.shift.copy_(shift)


class ShardedComposed(OverRanks):
    def _round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        """After synchronize with the sums of this update."""
        with self._notify_of(refresh=self.rows is not None and self.rows.refresh_is_due):
            outcome = super()._round(client, update, trained_on, models, now, new)
        if self.rows and (support := self.rows.refreshed):
            self._take_shifts_of_first_rank(support, int(self.rows.rounds))
        return outcome


class ShardedAverages(OverRanks, Averaged):
    """averages="steps": each rank has its slices of the means too."""

    support: MeanSteps

    def _one_round(
        self, client: Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        with self._notify_of(refresh=self._refresh_is_due()):
            return super()._one_round(client, update, trained_on, models, now, new)

    def _refresh(self, mask: Tensor) -> None:
        """A message with the inner products of all means, over all coordinates; then one with the shifts.

        The first is longer than all others, and gloo ends ranks whose messages differ in length. So all ranks first
        agree on the refresh, in a message of the usual length.
        """
        facts = {"rounds": self.rounds}
        with self.notify_peers:
            own = self.support.own_products()
        self.synchronize("refresh", facts)
        products = self.ranks.agree("refresh", facts, own.flatten()).view_as(own)
        with self.notify_peers:
            self.support.refresh(mask, products)
        self._take_shifts_of_first_rank(self.support, self.rounds)

    def similarity(self, version: int) -> Tensor | None:
        return None  # it would need a message
