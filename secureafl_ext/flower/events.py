"""Event: one thing that happened with one client. Kinds are counted, logged and documented."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..operate import verdict

KINDS = {kind: text for kind, text in verdict.KINDS.items() if kind not in ("too_soon", "forgotten")}
# Level of each kind in the log: debug for the events of every round, warning for a client that fails.
LEVELS = {
    **dict.fromkeys(("accepted", "stale", "twice"), logging.DEBUG),
    **dict.fromkeys(("joined", "waiting", "left", "rejected"), logging.INFO),
    **dict.fromkeys(("failed", "garbage", "vanished", "late", "unsent"), logging.WARNING),
}


@dataclass(frozen=True)
class Event:
    """One thing that happened with one client."""

    kind: str  # of KINDS
    node: int
    slot: int | None  # the client's number at the server
    version: int  # of the server, after it
    reason: str = ""  # one printable line of at most 500 characters
    factor: float = math.nan  # Lipschitz factor of the update
    staleness: int | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)  # reported by the client, not verified
