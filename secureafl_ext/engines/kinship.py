"""FusedKinship: a round of rule="kinship" without corrections as one op (csrc/row_wise/kinship)."""

import torch
from torch import Tensor

from ..config import Config
from ..rules import kinship
from .fused_rows import FusedRows, fits_any

step = torch.ops.secureafl.kin_step_.default  # the overload itself: looking it up costs some 10 us a call

BOUNDS = (
    *(kinship.SPAN, kinship.KNOWN, kinship.KIN, kinship.CROWD, kinship.TURNED),
    *(kinship.SHORT, kinship.SHORT_SUM, kinship.SHORT_CENTERED, kinship.NEAR),
)


def fits(config: Config, clients: int, device: torch.device) -> bool:
    """Whether the op supports these settings; Composed supports the rest."""
    return config.rule == "kinship" and fits_any(config, clients, device)


class FusedKinship(FusedRows):
    def _bounds(self, every: int) -> tuple[float, ...]:
        return BOUNDS

    def _step(self, *arguments: object) -> tuple[Tensor, ...]:
        return step(*arguments)
