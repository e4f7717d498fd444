"""FusedKinship: a round of rule="kinship" without corrections as one op (csrc/kinship), on the tensors of Composed."""

import torch
from torch import Tensor

from .. import _C
from ..config import Config
from ..rules import kinship
from .base import Outcome
from .composed import Composed
from .presence import settings_of

step = torch.ops.secureafl.kin_step_.default  # the overload itself: looking it up costs some 10 us a call

BOUNDS = (
    *(kinship.SPAN, kinship.KNOWN, kinship.KIN, kinship.CROWD, kinship.TURNED),
    *(kinship.SHORT, kinship.SHORT_SUM, kinship.SHORT_CENTERED, kinship.NEAR),
)


def fits(config: Config, clients: int, device: torch.device) -> bool:
    """Whether the op supports these settings; Composed supports the rest."""
    return config.rule == "kinship" and plain(config, clients, device)


def plain(config: Config, clients: int, device: torch.device) -> bool:
    """Whether the rows are the last updates, on a device with kernels."""
    uncorrected = config.memory == 0 and config.estimate and config.history_dtype == "float32"
    return uncorrected and clients <= _C.MOST_CLIENTS and device.type in ("cpu", "cuda")


class FusedKinship(Composed):
    """Composed, except for `round`."""

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        super().__init__(config, clients, size, device)
        h, rows, c = self.history, self.rows, config
        assert rows and self.kinship  # rule="kinship"
        kin = self.kinship
        past = h.last_updates, h.last_models, h.seen, rows.products, kin.means, kin.met, kin.centre, rows.rounds
        self._past = *past, *self.presence.tensors().values()
        flags = c.filter, c.receive, c.store == "all", c.on_reject == "hold"
        self._settings = c.lr, c.quantile, c.max_norm, *flags, *settings_of(c), *BOUNDS

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        number = client if isinstance(client, Tensor) else self._clients[client]
        judged = self.factors, self.recorded, self.counts
        return step(update, number, trained_on, now, new, models, *self._past, *judged, *self._settings)
