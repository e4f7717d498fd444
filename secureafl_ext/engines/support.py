"""FusedSupport: a round of rule="support" without corrections as one op (csrc/row_wise/support)."""

import torch
from torch import Tensor

from ..config import Config
from ..rules import support
from ..rules.similarity import SPAN
from .fused_rows import FusedRows, fits_any

step = torch.ops.secureafl.support_step_.default


def fits(config: Config, clients: int, device: torch.device) -> bool:
    """Whether the op supports these settings; Composed supports the rest."""
    return config.rule == "support" and fits_any(config, clients, device)


def bounds() -> tuple[float, ...]:
    """The constants of rules/support.py in the order of the ops' arguments."""
    return (
        *(support.CUT, support.CROWD, support.CROWD_LEAST, support.ODD, support.ODD_LEAST, support.KIN),
        *(support.SHORT_SQUARE, support.FEW_KIN, support.SHORT_LEVEL, support.FADE, support.AGAIN, support.MOST),
        *(support.GROUP, support.GROUP_SPREADS, support.GROUP_LEAST, support.GROUP_END, support.GROUP_LEFT),
        *(support.OPPOSED, support.OPPOSED_END, support.FILL, support.APART, support.APART_END),
    )


class FusedSupport(FusedRows):
    def _bounds(self, every: int) -> tuple[float, ...]:
        return SPAN, every, *bounds()

    def _step(self, *arguments: object) -> tuple[Tensor, ...]:
        return step(*arguments)
