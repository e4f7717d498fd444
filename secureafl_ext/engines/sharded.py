"""Sharded: a fused round whose coordinates are split over the ranks of a process group."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..config import Config
from .base import Outcome, undo_of
from .fused import Fused
from .ranks import NotifyPeers, Ranks

UPDATE_SUMS = 5  # sums over an update that the verdict depends on (csrc/round/verdict.h)


class Sharded(Fused):
    """A fused round over this rank's coordinates. It decides by sums over all of them.

    The sums of a pass over the history are first needed for the estimates of the next round. So they travel with the
    next message: that of the next round, or of any call that reads the estimates or the state.
    """

    capturable = False

    def __init__(self, config: Config, clients: int, size: int, device: torch.device, ranks: Ranks):
        super().__init__(config, clients, size, device)
        self.ranks = ranks
        count = _C.pass_sums(self.slots.shape[2], config.memory)
        self._changes = ranks.zeros(count)  # of the last round, on this rank
        self._pending = False  # whether the last round has yet to be finished with these two
        self._update_sums = ranks.zeros(UPDATE_SUMS)
        self.notify_peers = NotifyPeers(ranks, UPDATE_SUMS + count)

    def update_sums(self, client: Tensor, update: Tensor, trained_on: Tensor) -> Tensor:
        return torch.ops.secureafl.update_sums(update, client, trained_on, self.last)

    def synchronize(self, call: str, facts: Mapping[str, int], sums: Tensor | None = None) -> Tensor:
        """See ShardedEngine. It finishes the last round too."""
        message = self.ranks.padded(sums, UPDATE_SUMS), self._changes
        self._update_sums, changes = self.ranks.agree(call, facts, torch.cat(message)).tensor_split([UPDATE_SUMS])
        if self._pending:
            undo = undo_of(self._per_client)  # none of them has coordinates
            try:
                torch.ops.secureafl.renew_(self._verdict, changes, *self._per_client, self.config.trust)
                self._pending = False
            except BaseException:  # that of a signal's handler comes after the op
                undo()
                self._pending = True
                raise
        return self._update_sums

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        """After synchronize with the sums of this update."""
        number = client if isinstance(client, Tensor) else self._clients[client]
        judged = self.factors, self.recorded, self.factor_counts, self.counts, self._arrived
        arguments = update, number, trained_on, now, new, models, *self._past, *judged, self.lr, *self._settings
        before, has_end = self.counts.clone(), self.config.memory > 0  # without pairs there is nothing to finish
        try:
            outcome = torch.ops.secureafl.apply_(self._update_sums, self._verdict, self._changes, *arguments)
            self._pending = has_end
        except BaseException:  # that of a signal's handler comes after the op
            self._pending = has_end and not torch.equal(before, self.counts)
            raise
        return Outcome(*outcome)

    def _settle(self) -> None:
        """Does nothing: synchronize has finished the last round."""

    def forget(self, client: int) -> None:
        """After synchronize: the sums of the last round are used up, and the client's are among them."""
        super().forget(client)
        self._update_sums.zero_()

    def _take_products(self, model: Tensor) -> None:
        super()._take_products(model)
        for products in (self.gram, self.along):
            dist.all_reduce(products, group=self.ranks.group)
