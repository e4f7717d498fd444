"""The settings of a server, and the words for its verdicts."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .validation import converted, flag, number, or_none, text, whole

# A rule is a name in this table. Coordinate-wise ones are fused with the estimates; row-wise ones weigh whole updates.
RULES = {
    "median": "coordinate-wise",
    "trimmed_mean": "coordinate-wise",
    "mean": "coordinate-wise",
    "centered_clip": "row-wise",
    "spectral": "row-wise",
    "krum": "row-wise",
    "geometric_median": "row-wise",
    "kinship": "row-wise",
}
STORES = ("all", "accepted")
FACTORS = ("per_client", "pooled")
ON_REJECT = ("hold", "step")
WINDOW, FIRST_ROOM = 32, 1024  # factors kept of each client; room of a pooled Q at first
PAIRS = ("received", "rounds")
DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

REASONS = (
    "accepted",
    "accepted: first contact",
    "rejected: factor above the quantile of all factors",
    "rejected: same model version as last time, another update",
    "rejected: not finite",
)
ACCEPTED, FIRST, STEEP, SAME_VERSION, NOT_FINITE = range(len(REASONS))
COUNTS = ("accepted", "rejected", "non_finite", "capped", "fallbacks")


def one_of(names: Iterable[str]) -> tuple:
    return text, f"one of {', '.join(names)}", lambda value: value in names


# Every setting: what makes a plain value of it, what it must be, and whether that holds.
CHECKS = {
    "lr": (number, "a finite number", math.isfinite),
    "memory": (whole, "a whole number 0 to 16", lambda value: 0 <= value <= 16),
    "quantile": (number, "a number between 0 and 1", lambda value: 0 <= value <= 1),
    "max_norm": (number, "a positive number", lambda value: value > 0),
    "trust": (number, "a number, 0 or more (inf: no cap)", lambda value: value >= 0),
    "rule": one_of(RULES),
    "trim": (whole, "a whole number, 0 or more", lambda value: value >= 0),
    "store": one_of(STORES),
    "pairs": one_of(PAIRS),
    "max_staleness": (whole, "a whole number, 0 or more", lambda value: value >= 0),
    "factors": one_of(FACTORS),
    "window": (or_none(whole), "None or a positive whole number", lambda value: value is None or value > 0),
    "on_reject": one_of(ON_REJECT),
    "spacing": (whole, "a whole number, 0 or more", lambda value: value >= 0),
    "history_dtype": one_of(DTYPES),
    "filter": (flag, "True or False", lambda value: True),
    "estimate": (flag, "True or False", lambda value: True),
    "receive": (flag, "True or False", lambda value: True),
    "buckets": (whole, "a whole number, 1 or more", lambda value: value >= 1),
    "remove": (number, "a number, 0 or more, below 1", lambda value: 0 <= value < 1),
    "radius": (or_none(number), "None or a positive number", lambda value: value is None or value > 0),
    "iterations": (whole, "a whole number, 1 or more", lambda value: value >= 1),
}


@dataclass(frozen=True)
class Config:
    """Settings of a server. The paper's Variants: I rule="mean", II not estimate, III not filter, IV not receive."""

    lr: float = 0.01  # eta: step along the aggregate
    memory: int = 3  # epsilon: pairs kept per client
    quantile: float = 0.8  # alpha: a factor above this quantile of all factors is rejected
    max_norm: float = 50.0  # G: a client's first update is clipped to this norm
    trust: float = 1.0  # a correction is at most this many times as long as the update it corrects; inf: no cap
    rule: str = "median"
    trim: int = 0  # values dropped on either side by trimmed_mean
    store: str = "accepted"  # remember only accepted updates; "all", as in the paper: every finite one
    pairs: str = "received"  # pairs of consecutive uploads; "rounds": also of each round's own estimates, as printed
    max_staleness: int = 10  # tau_max: how many versions back an update may have been computed
    # Q: "per_client" keeps the last factors of every client, and all clients weigh the same; "pooled", as in the paper,
    # is one list, in which a client that uploads often weighs more, up to choosing the quantile alone
    factors: str = "per_client"
    window: int | None = None  # factors kept, of each client or in all; None: 32 of each client, or all
    # A rejected update: "hold" leaves the model as it is; "step", as in the paper, steps along the remembered updates,
    # so that a client that sends garbage chooses how often they are applied
    on_reject: str = "hold"
    spacing: int = 0  # rounds of other clients between two of the same one; an update that comes earlier is refused
    history_dtype: str = "float32"  # of the pairs; float16: scaled by a power of two each, all else float32
    filter: bool = True
    estimate: bool = True
    receive: bool = True
    buckets: int = 1  # so many clients at a time are averaged, dealt anew in every round, before a rule; 1: none
    remove: float = 0.25  # share of the rows that spectral drops, and that krum takes for malicious
    radius: float | None = None  # of centered_clip; None: the median distance to its centre
    iterations: int = 2  # of centered_clip

    def __post_init__(self):
        for name, (convert, expected, holds) in CHECKS.items():
            # plain numbers from here on: ops and JSON take no others
            object.__setattr__(self, name, converted("SecureAFL", name, getattr(self, name), convert, expected, holds))

        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"SecureAFL: {name} must be {expected}, got {getattr(self, name)!r}")

        # Else a rejected update could be stored at a model that then stays: the client's next factor would be
        # undefined, so rejected too, and so on for ever.
        fits = self.store == "accepted" or self.on_reject == "step" or not self.filter
        need(fits, "on_reject", f"'step' with store={self.store!r}")
        need(self.estimate or self.receive, "receive", "true when estimate is false")
        alone = ("median", "trimmed_mean", "kinship")
        need(self.buckets == 1 or self.rule not in alone, "buckets", f"1 with rule={self.rule!r}")

    @property
    def row_wise(self) -> bool:
        """Whether the rule weighs whole updates by their inner products; the mean does so in buckets alone."""
        return RULES[self.rule] == "row-wise" or self.buckets > 1

    @property
    def room(self) -> int:
        """Factors that a list of Q has room for at first; without a window a pooled Q grows."""
        return self.window or (FIRST_ROOM if self.factors == "pooled" else WINDOW)

    @property
    def grows(self) -> bool:
        return self.factors == "pooled" and self.window is None

    @property
    def dtype(self) -> torch.dtype:
        """Of models and updates as the server keeps them."""
        return torch.float64 if self.history_dtype == "float64" else torch.float32

    @property
    def pair_dtype(self) -> torch.dtype:
        """Of the pairs, the bulk of the history."""
        return DTYPES[self.history_dtype]
