"""For those who run a fleet: watch a server, export metrics, keep logs. Nothing here changes what a server does."""

from .observer import Observer
from .serve import serve
from .verdict import KINDS, Look, Queue, Verdict
from .view import View
from .watched import Watched

__all__ = ["KINDS", "Look", "Observer", "Queue", "Verdict", "View", "Watched", "serve"]
