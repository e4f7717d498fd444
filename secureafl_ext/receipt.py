"""What a submission gets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import REASONS


@dataclass(frozen=True)
class Receipt:
    """What became of one submission. `accepted` and `factor` live on the device until somebody reads them."""

    accepted: Tensor  # () bool
    factor: Tensor  # () float64; NaN where none is defined
    staleness: int | None  # rounds between the model the update was computed on and this one; None if enqueued
    version: int  # of the server, after this submission
    _reason: Tensor | str
    _words: tuple[str, ...] = REASONS  # what a _reason on the device counts in

    @property
    def reason(self) -> str:
        return self._reason if isinstance(self._reason, str) else self._words[int(self._reason)]


def stale(version: int, newest: int, max_staleness: int, device: torch.device) -> Receipt:
    """What a submission gets whose model is no longer kept."""
    kept = f"the server keeps {newest - max_staleness} to {newest}"
    no = torch.tensor(False, device=device)
    none = torch.full_like(no, torch.nan, dtype=torch.float64)
    return Receipt(no, none, newest - version, newest, f"stale: version {version}, {kept}")
