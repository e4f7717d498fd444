"""Defenses: SecureAFL and the servers it is compared with. `DEFENSES` has them by name."""

from .registry import DEFENSES, Defense, Guarded, Server, Trusted, make

__all__ = ["DEFENSES", "Defense", "Guarded", "Server", "Trusted", "make"]
