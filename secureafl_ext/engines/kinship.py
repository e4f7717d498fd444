"""A round of rule="kinship" without corrections as one op (csrc/kinship/kinship.h), on the composed one's tensors."""

import torch
from torch import Tensor

from .. import _C
from ..config import Config
from ..rules import kinship
from .composed import Composed

step = torch.ops.secureafl.kin_step_.default  # as in fused.py

BOUNDS = (
    *(kinship.SPAN, kinship.KNOWN, kinship.KIN, kinship.CROWD, kinship.TURNED),
    *(kinship.SHORT, kinship.SHORT_SUM, kinship.SHORT_APART, kinship.NEAR),
)


def fits(config: Config, clients: int, device: torch.device) -> bool:
    """Whether this round exists fused; the composed one takes what is left."""
    plain = config.memory == 0 and config.estimate and config.history_dtype == "float32"
    return config.rule == "kinship" and plain and clients <= _C.MOST_CLIENTS and device.type in ("cpu", "cuda")


class KinRound(Composed):
    """Composed in everything but how a round is done."""

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        super().__init__(config, clients, size, device)
        h, rows, kin, c = self.history, self.rows, self.rows.kinship, config
        self._past = h.last_updates, h.last_models, h.seen, rows.products, kin.means, kin.met, kin.centre, rows.rounds
        self._settings = c.lr, c.quantile, c.max_norm, c.filter, c.receive, c.store == "all"
        self._settings += c.on_reject == "hold", *BOUNDS

    def round(self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int):
        who = client if isinstance(client, Tensor) else self._clients[client]
        judged = self.factors, self.recorded, self.counts
        return step(update, who, trained_on, now, new, models, *self._past, *judged, *self._settings)
