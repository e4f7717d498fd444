"""Random settings of a server, and what is asked of states as a whole."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fuzz.dice import Dice, need
from torch import Tensor

from secureafl_ext.config import RULES
from secureafl_ext.engines import fused, kinship, support


@contextmanager
def composed_alone(wanted: bool) -> Iterator[None]:
    """Servers made here do their rounds of plain ops, if wanted."""
    kept = fused.unsupported, kinship.fits, support.fits
    if wanted:
        fused.unsupported, kinship.fits, support.fits = (lambda *_: "this test"), *(2 * (lambda *_: False,))
    try:
        yield
    finally:
        fused.unsupported, kinship.fits, support.fits = kept


def settings_of(dice: Dice, n: int) -> tuple[dict[str, object], torch.dtype]:
    """(settings, the model's dtype)"""
    rule = dice.choice((*RULES, "median", "median", "trimmed_mean", "mean", *(2 * ("kinship", "support"))))
    pairs = "rounds" if dice.chance(0.1) else "received"
    row_wise = RULES[rule] == "row-wise"
    memory = dice.choice((0, 0, 0, 1, 2, 3)) if row_wise else dice.choice((0, 1, 1, 2, 3, 3, 16))
    hold, estimate, keep = dice.chance(0.6), dice.chance(0.9), dice.chance(0.8)
    buckets = dice.choice((1, 1, 2, 3)) if rule not in ("median", "trimmed_mean", "kinship", "support") else 1
    history = dice.choice((torch.float32,) * 4 + (torch.float64,))
    if not row_wise and buckets == 1 and pairs == "received" and memory and dice.chance(0.25):
        history = torch.float16
    receive = not estimate or dice.chance(0.85)
    weighs = rule in ("kinship", "support") and estimate and receive
    settings = {
        "rule": rule, "step": dice.choice(("all", "received")) if weighs else "all",
        "pairs": pairs, "memory": memory, "buckets": buckets, "history_dtype": history, "filter": keep,
        "lr": dice.choice((0.05, 0.3, 1.0, -0.1)), "estimate": estimate, "receive": receive,
        "quantile": dice.choice((0.0, 0.25, 0.5, 0.75, 1.0, dice.random())),
        "window": dice.choice((None, None, 1, 2, 5)),
        "max_norm": dice.choice((50.0, 0.5, math.inf)), "trust": dice.choice((1.0, 1.0, 0.2, 0.0, math.inf)),
        "on_reject": "hold" if hold else "step", "factors": dice.choice(("per_client", "per_client", "pooled")),
        "store": dice.choice(("all", "accepted")) if not (hold and keep) else "accepted",
        "max_staleness": dice.choice((0, 1, 2, 4)), "spacing": dice.choice((0, 0, 0, dice.randrange(n))),
        "trim": dice.randrange((n + 1) // 2) if rule == "trimmed_mean" else 0, "remove": dice.choice((0.25, 0.0, 0.4)),
        "radius": dice.choice((None, 0.8)), "iterations": dice.choice((1, 2, 3)),
        "expiry": dice.choice((None, 12, 12, 1, 3)), "probation": dice.choice((3, 3, 0, 1)),
        "quorum": 0.0 if memory else dice.choice((0.0, 0.0, 0.5, 1.0)),
    }  # fmt: skip
    return settings, torch.float64 if history == torch.float64 and dice.chance(0.7) else torch.float32


def at(state: dict[str, Tensor | int]) -> Tensor:
    return state["models"][state["version"] % len(state["models"])]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(ours: dict[str, Tensor | int], theirs: dict[str, Tensor | int]) -> None:
    need(ours.keys() == theirs.keys(), "names", ours.keys() ^ theirs.keys())
    for name, value in theirs.items():
        equal = torch.equal(bits(ours[name]), bits(value)) if isinstance(value, Tensor) else ours[name] == value
        need(equal, name, ours[name], "not", value)
