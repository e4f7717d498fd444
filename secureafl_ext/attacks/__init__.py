"""Attacks: the updates of malicious clients, one file each. `ATTACKS` has them by name."""

from .base import Attack, Scene, Simple, Trigger, View
from .registry import ATTACKS, Kind, make, register_attack

__all__ = ["ATTACKS", "Attack", "Kind", "Scene", "Simple", "Trigger", "View", "make", "register_attack"]
