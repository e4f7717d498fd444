"""FusedRows: a round of a rule that weighs the clients' last updates as one op, on the tensors of Composed."""

import torch
from torch import Tensor

from .. import _C
from ..config import Config
from .base import Outcome
from .composed import Composed
from .presence import settings_of


def fits_any(config: Config, clients: int, device: torch.device) -> bool:
    """Whether the ops support these settings, whatever the rule: rows without corrections, in float32."""
    uncorrected = config.memory == 0 and config.estimate and config.history_dtype == "float32"
    return uncorrected and clients <= _C.MOST_ROW_CLIENTS and device.type in ("cpu", "cuda")


class FusedRows(Composed):
    """Composed with its round as one op."""

    capturable = True

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        super().__init__(config, clients, size, device)
        h, rows, c = self.history, self.rows, config
        assert rows
        own = rows.similarity.tensors().values() if rows.similarity else (rows.centre,)
        past = h.last_updates, h.last_models, h.seen, rows.products, *own, rows.rounds
        self._past = *past, *self.presence.tensors().values()
        flags = c.filter, c.receive, c.store == "all", c.on_reject == "hold"
        steps = c.step == "received", self.quorum
        self._settings = c.quantile, c.max_norm, *flags, *settings_of(c), *steps, *self._bounds(rows.every)

    def _bounds(self, every: int) -> tuple[float | str, ...]:
        """The constants and settings of the rule: the op's last arguments. every: rounds between two refreshes"""
        raise NotImplementedError

    def _step(self, *arguments: object) -> tuple[Tensor, ...]:
        """Call the rule's op."""
        raise NotImplementedError

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        number = client if isinstance(client, Tensor) else self._clients[client]
        judged = self.factors, self.recorded, self.factor_counts, self.counts
        state = *self._past, *judged
        return Outcome(*self._step(update, number, trained_on, now, new, models, *state, self.lr, *self._settings))
