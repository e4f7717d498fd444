"""An audit trail: every call of a server is a line of a chained log, to verify, to replay and to recover from."""

from .audited import Audited
from .line import Line
from .replays import DifferenceError, find, replay
from .summary import Summary, verify

__all__ = ["Audited", "DifferenceError", "Line", "Summary", "find", "replay", "verify"]
