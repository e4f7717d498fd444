"""Engines do the rounds of a server: one fused op where the settings allow it, otherwise plain ops in sequence."""

from .base import Engine, Outcome, ShardedEngine
from .choose import check_engine, is_out_of_memory, make_engine, make_sharded, too_large

__all__ = [
    "Engine",
    "Outcome",
    "ShardedEngine",
    "check_engine",
    "is_out_of_memory",
    "make_engine",
    "make_sharded",
    "too_large",
]
