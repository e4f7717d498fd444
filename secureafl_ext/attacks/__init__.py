"""Attacks: what malicious clients send. One module for each family; `ATTACKS` has them by name."""

from .base import Attack, Scene, Simple, View
from .registry import ATTACKS, Kind, make

__all__ = ["ATTACKS", "Attack", "Kind", "Scene", "Simple", "View", "make"]
