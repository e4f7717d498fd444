"""Defenses: SecureAFL and the servers that it is compared with, one file each. `DEFENSES` has them by name."""

from .base import AcceptanceTest, Arrival, NearestAccepted, Rule, Server, Trusted, Verdict
from .entry import Defense
from .registry import DEFENSES, make, register_defense
from .rule_server import RuleServer

__all__ = [
    "DEFENSES",
    "AcceptanceTest",
    "Arrival",
    "Defense",
    "NearestAccepted",
    "Rule",
    "RuleServer",
    "Server",
    "Trusted",
    "Verdict",
    "make",
    "register_defense",
]
