"""Receipt: the result of one submission."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import REASONS


@dataclass(frozen=True, repr=False)
class Receipt:
    """The result of one submission. `accepted`, `factor` and `weight` stay on the device until they are read."""

    accepted: Tensor  # () bool
    factor: Tensor  # () float64; NaN if it is not defined
    staleness: int | None  # rounds between the model that the update was computed on and this one; None if enqueued
    version: int  # of the server, after this submission
    _reason: Tensor | str  # a text, or an index into _reasons on the device
    _reasons: tuple[str, ...] = REASONS
    refused: str = ""  # "stale" or "too_soon": this submission was no round
    weight: Tensor | None = None  # () float64, of this update in the aggregate; None: refused, or the rule has none

    def __repr__(self) -> str:
        """Waits for the device."""
        known = f"staleness={self.staleness}, version={self.version}"
        return f"Receipt(kind={self.kind!r}, reason={self.reason!r}, {known})"

    @property
    def kind(self) -> str:
        """accepted, rejected, stale or too_soon. Waits for the device."""
        return self.refused or ("accepted" if self.accepted else "rejected")

    @property
    def reason(self) -> str:
        return self._reason if isinstance(self._reason, str) else self._reasons[int(self._reason)]


def stale_receipt(version: int, newest: int, max_staleness: int, device: torch.device) -> Receipt:
    """For an update on a model version that is no longer kept."""
    kept = f"the server keeps {newest - max_staleness} to {newest}"
    return _refused("stale", newest - version, newest, f"stale: version {version}, {kept}", device)


def too_soon_receipt(
    client: int, since: int, spacing: int, staleness: int, newest: int, device: torch.device
) -> Receipt:
    """For an update that arrives before the client's turn."""
    reason = f"too soon: {since} rounds of others since the last one of client {client}, spacing is {spacing}"
    return _refused("too_soon", staleness, newest, reason, device)


def _refused(kind: str, staleness: int, newest: int, reason: str, device: torch.device) -> Receipt:
    no = torch.tensor(False, device=device)
    return Receipt(no, torch.full_like(no, torch.nan, dtype=torch.float64), staleness, newest, reason, refused=kind)
