"""How a server does a round: one fused op where its settings have one, else plain ops one after the other."""

from .choose import Engine, check_engine, make_engine, too_large

__all__ = ["Engine", "check_engine", "make_engine", "too_large"]
