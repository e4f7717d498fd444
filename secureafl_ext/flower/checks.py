"""The checks of a loop's arguments."""

from collections.abc import Callable, Mapping
from typing import Any

from ..server.protocol import Server
from ..validation import converted, number, shown, whole
from .layout import Layout

Kind = tuple[Callable[[Any], Any], str, Callable[[Any], bool]]  # as `converted` takes them

POSITIVE: Kind = number, "a positive number", lambda value: value > 0
COUNT: Kind = whole, "a whole number, 1 or more", lambda value: value >= 1
SHARE: Kind = number, "a number in 0..1", lambda value: 0 <= value <= 1
KINDS = {"ttl": POSITIVE, "patience": POSITIVE, "turns": SHARE, "in_flight": COUNT, "every": COUNT}


def check(server: Server, layout: Layout, watch: object, settings: Mapping[str, object]) -> dict[str, Any]:
    """settings: those of KINDS, by name. Returns them as plain numbers."""
    if server.model.shape != (layout.size,) or server.model.dtype != layout.dtype:
        got = f"{tuple(server.model.shape)} {server.model.dtype}"
        expected = f"a model of the layout's ({layout.size},) {layout.dtype}"
        raise ValueError(f"Loop: server must have {expected}, got {got}")
    positive_lr("Loop", server)
    if watch is not None and not callable(watch):
        raise ValueError(f"Loop: watch must be a function of an event, or None, got {shown(watch)}")
    places = server.clients if settings["in_flight"] is None else settings["in_flight"]
    settings = {**settings, "in_flight": places}
    return {name: converted("Loop", name, value, *KINDS[name]) for name, value in settings.items()}


def positive_lr(caller: str, server: Server) -> float:
    """The server's lr, which may be set between two rounds. Clients step by it, and replies are divided by it."""
    return converted(caller, "server.lr", server.lr, *POSITIVE)
