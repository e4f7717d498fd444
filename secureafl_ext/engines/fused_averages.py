"""FusedAverages: a round of averages="steps" on whole updates as one op (csrc/row_wise/mean_steps), the refresh too."""

import torch
from torch import Tensor

from .. import _C
from ..config import Config
from ..rules import mean_steps
from .averaged import Averaged
from .base import Outcome
from .presence import settings_of
from .support import bounds

step = torch.ops.secureafl.mean_step_.default


def unsupported(config: Config, clients: int, device: torch.device) -> str | None:
    """The setting that the op does not support, for an error message; None if it supports all. Averaged supports it."""
    most = _C.MOST_ROW_CLIENTS
    conflicts = {
        f"sketch={config.sketch}": config.sketch > 0,
        f"clients={clients} (at most {most})": clients > most,
        f"history_dtype={config.history_dtype}": config.dtype != torch.float32,
        f"a model on {device.type}": device.type not in ("cpu", "cuda"),
    }
    return next((setting for setting, conflict in conflicts.items() if conflict), None)


class FusedAverages(Averaged):
    capturable = True
    support: mean_steps.MeanSteps

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        super().__init__(config, clients, size, device)
        self._rounds = torch.zeros((), dtype=torch.int64, device=device)
        h, s, c = self.history, self.support, config
        averages = s.means, s.total, s.noise, s.norms, s.basis, s.shift
        self._past = h.last_updates, h.last_models, h.seen, *averages, self._rounds, *self.presence.tensors().values()
        flags = c.filter, c.receive, c.store == "all", c.on_reject == "hold"
        means = mean_steps.SPAN, mean_steps.LEAST, mean_steps.ALONE, self.every
        self._settings = c.quantile, c.max_norm, *flags, *settings_of(c), self.quorum, *means, *bounds()

    def _remembered(self) -> dict[str, Tensor]:
        return super()._remembered() | {"rounds": self._rounds}

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        number = client if isinstance(client, Tensor) else self._clients[client]
        state = *self._past, self.factors, self.recorded, self.factor_counts, self.counts
        return Outcome(*step(update, number, trained_on, now, new, models, *state, self.lr, *self._settings))
