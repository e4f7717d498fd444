"""SecureAFL as an asynchronous Flower server: `Loop` runs in a ServerApp; clients are ordinary ClientApps."""

try:
    import flwr as _flwr  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("secureafl_ext.flower needs Flower: pip install 'secureafl_ext[flower]'") from missing

from ..operate.verdict import Queue
from .events import KINDS, Event
from .layout import GarbageError, Layout
from .loop import Loop

__all__ = ["KINDS", "Event", "GarbageError", "Layout", "Loop", "Queue"]
