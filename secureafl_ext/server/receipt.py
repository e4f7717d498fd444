"""What a submission gets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import REASONS


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
    return _refused(newest - version, newest, f"stale: version {version}, {kept}", device)


def too_soon(client: int, since: int, spacing: int, staleness: int, newest: int, device: torch.device) -> Receipt:
    """What a submission gets before its client's turn."""
    reason = f"too soon: {since} rounds of others since the last one of client {client}, spacing is {spacing}"
    return _refused(staleness, newest, reason, device)


def _refused(staleness: int, newest: int, reason: str, device: torch.device) -> Receipt:
    no = torch.tensor(False, device=device)
    return Receipt(no, torch.full_like(no, torch.nan, dtype=torch.float64), staleness, newest, reason)
