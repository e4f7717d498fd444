"""FusedSupport: a round of rule="support" without corrections as one op (csrc/support), on the tensors of Composed."""

import torch
from torch import Tensor

from ..config import Config
from ..rules import support
from ..rules.similarity import SPAN
from ..rules.support import Support
from . import kinship
from .base import Outcome
from .composed import Composed
from .presence import settings_of

step = torch.ops.secureafl.support_step_.default


def fits(config: Config, clients: int, device: torch.device) -> bool:
    """Whether the op supports these settings; Composed supports the rest."""
    return config.rule == "support" and kinship.plain(config, clients, device)


def bounds() -> tuple[float, ...]:
    return (
        *(support.CUT, support.CROWD, support.CROWD_LEAST, support.ODD, support.ODD_LEAST, support.KIN),
        *(support.SHORT_SQUARE, support.FEW_KIN, support.SHORT_LEVEL, support.FADE, support.AGAIN, support.MOST),
    )


class FusedSupport(Composed):
    """Composed, except for `round`."""

    capturable = True

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        super().__init__(config, clients, size, device)
        h, rows, c = self.history, self.rows, config
        assert rows and isinstance(rows.similarity, Support)  # rule="support"
        past = h.last_updates, h.last_models, h.seen, rows.products, *rows.similarity.tensors().values(), rows.rounds
        self._past = *past, *self.presence.tensors().values()
        flags = c.filter, c.receive, c.store == "all", c.on_reject == "hold"
        self._settings = c.lr, c.quantile, c.max_norm, *flags, *settings_of(c), SPAN, rows.every, *bounds()

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        number = client if isinstance(client, Tensor) else self._clients[client]
        judged = self.factors, self.recorded, self.counts
        return step(update, number, trained_on, now, new, models, *self._past, *judged, *self._settings)
