"""The checks of a loop's arguments."""

from collections.abc import Mapping

from ..server.protocol import Server
from .layout import Layout


def check(server: Server, layout: Layout, turns: float, positive: Mapping[str, float]) -> None:
    """positive: the other settings, by name"""
    if server.model.shape != (layout.size,) or server.model.dtype != layout.dtype:
        got = f"{tuple(server.model.shape)} {server.model.dtype}"
        expected = f"a model of the layout's ({layout.size},) {layout.dtype}"
        raise ValueError(f"Loop: server must have {expected}, got {got}")
    for name, value in {"server.lr": server.lr, **positive}.items():
        if not value > 0:
            raise ValueError(f"Loop: {name} must be positive, got {value}")
    if not 0 <= turns <= 1:
        raise ValueError(f"Loop: turns must lie in 0..1, got {turns}")
