"""FusedRowRules: a round of krum, spectral, geometric_median or centered_clip without corrections as one op
(csrc/row_wise/row_rules)."""

import torch
from torch import Tensor

from ..config import Config
from .fused_rows import FusedRows, fits_any

step = torch.ops.secureafl.row_step_.default

RULES = ("krum", "spectral", "geometric_median", "centered_clip")


def fits(config: Config, clients: int, device: torch.device) -> bool:
    """Whether the op supports these settings; Composed supports the rest."""
    return config.rule in RULES and config.buckets == 1 and fits_any(config, clients, device)


class FusedRowRules(FusedRows):
    def _bounds(self, every: int) -> tuple[float | str, ...]:
        c = self.config
        return c.rule, c.remove, -1.0 if c.radius is None else c.radius, c.iterations

    def _step(self, *arguments: object) -> tuple[Tensor, ...]:
        return step(*arguments)
