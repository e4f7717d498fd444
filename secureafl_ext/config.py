"""Config: the settings of a server, described here and nowhere else. REASONS: the verdicts of a receipt."""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from .entry_points import load_entry_points
from .validation import converted, dtype_name, flag, number, or_none, text, whole

# Every rule by name. A coordinate-wise rule is fused with the estimates. A row-wise rule weighs whole updates;
# rules.register_rule adds more of these.
RULES = {
    "median": "coordinate-wise",
    "trimmed_mean": "coordinate-wise",
    "mean": "coordinate-wise",
    "centered_clip": "row-wise",
    "spectral": "row-wise",
    "krum": "row-wise",
    "geometric_median": "row-wise",
    "kinship": "row-wise",
    "support": "row-wise",
}
STORES = ("all", "accepted")
FACTORS = ("per_client", "pooled")
ON_REJECT = ("hold", "step")
STEPS = ("all", "received")
AVERAGES = ("uploads", "steps")
MOST_ITERATIONS = 1000  # of centered_clip
MOST_EPOCHS = 2**20  # of a trial
WINDOW = 32  # factors kept per client by default
EXACT = 2048  # factors that a pooled Q without a window keeps as they are; later ones are counted by their leading bits
PAIRS = ("received", "rounds")
HISTORY_DEVICES = ("model", "cpu")
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

REASONS = (
    "accepted",
    "accepted: first contact",
    "rejected: factor above the quantile of all factors",
    "rejected: same model version as last time, another update",
    "rejected: not finite",
)
ACCEPTED, FIRST, STEEP, SAME_VERSION, NOT_FINITE = range(len(REASONS))
# The rule that holds best against attackers who know it, with its settings: SecureAFL(model, clients, **RECOMMENDED).
RECOMMENDED: dict[str, Any] = {
    "rule": "support",
    "step": "received",
    # With averages of uploads an attacker hides each harmful upload behind a harmless one.
    "averages": "steps",
    "memory": 0,
    # The filter rejects honest updates too, and in our runs it held nothing that the rule does not hold.
    "filter": False,
    # A client that waits until its uploads have expired is not compared with others meanwhile.
    "expiry": 8,
    # The very first uploads must not be those of a few clients alone.
    "quorum": 0.65,
    # A client that has lost its weight could come back under a fresh number.
    "trial": 35,
}
GONE = -1  # epoch of the last upload of a client that left
COUNTS = ("accepted", "rejected", "non_finite", "capped", "fallbacks")


def reads_last(averages: object, filter: object) -> bool:
    """Whether a round with these settings reads the clients' last updates and models."""
    return averages != "steps" or bool(filter)


class Check(NamedTuple):
    convert: Callable[[Any], Any]  # to a plain Python value
    expected: str  # for the error message
    holds: Callable[[Any], bool] = lambda value: True


def one_of(names: Iterable[str], convert: Callable[[Any], str] = text) -> Check:
    return Check(convert, f"one of {', '.join(names)}", lambda value: value in names)


COUNT = Check(whole, "a whole number, 0 or more", lambda value: value >= 0)
POSITIVE_COUNT = Check(whole, "a whole number, 1 or more", lambda value: value >= 1)
FLAG = Check(flag, "True or False")

CHECKS = {
    "lr": Check(number, "a finite number", math.isfinite),
    "memory": Check(whole, "a whole number 0 to 16", lambda value: 0 <= value <= 16),
    "quantile": Check(number, "a number between 0 and 1", lambda value: 0 <= value <= 1),
    "max_norm": Check(number, "a positive number", lambda value: value > 0),
    "trust": Check(number, "a number, 0 or more (inf: no cap)", lambda value: value >= 0),
    "rule": one_of(RULES),
    "trim": COUNT,
    "store": one_of(STORES),
    "pairs": one_of(PAIRS),
    "max_staleness": COUNT,
    "factors": one_of(FACTORS),
    "window": Check(or_none(whole), "None or a positive whole number", lambda value: value is None or value > 0),
    "on_reject": one_of(ON_REJECT),
    "spacing": COUNT,
    "step": one_of(STEPS),
    "keep_last": Check(or_none(flag), "None, True or False"),
    "history_dtype": one_of(DTYPES, dtype_name),
    "history_device": one_of(HISTORY_DEVICES),
    "filter": FLAG,
    "estimate": FLAG,
    "receive": FLAG,
    "buckets": POSITIVE_COUNT,
    "remove": Check(number, "a number, 0 or more, below 1", lambda value: 0 <= value < 1),
    "radius": Check(or_none(number), "None or a positive number", lambda value: value is None or value > 0),
    # A round with many more would hold the server's lock for minutes, and the number may come from a file.
    "iterations": Check(whole, f"a whole number 1 to {MOST_ITERATIONS}", lambda value: 1 <= value <= MOST_ITERATIONS),
    "expiry": Check(or_none(whole), "None or a whole number, 1 or more", lambda value: value is None or value >= 1),
    "probation": COUNT,
    "trial": Check(whole, f"a whole number 0 to {MOST_EPOCHS}", lambda value: 0 <= value <= MOST_EPOCHS),
    "quorum": Check(number, "a number between 0 and 1", lambda value: 0 <= value <= 1),
    "averages": one_of(AVERAGES),
    "sketch": Check(whole, "0, or a whole number 64 to 65536", lambda value: value == 0 or 64 <= value <= 65536),
    "sketch_seed": Check(
        or_none(whole), "None or a whole number, 0 or more", lambda value: value is None or value >= 0
    ),
}


def is_rule(name: object) -> bool:
    """Whether there is such a rule. An unknown name loads the plug-ins, which may add it."""
    if isinstance(name, str) and name not in RULES:
        load_entry_points("secureafl.rules")
    return isinstance(name, str) and name in RULES


def add_rule(name: str) -> None:
    """Make this the name of a row-wise rule. Call rules.register_rule, which also takes its function."""
    RULES[name] = "row-wise"
    CHECKS["rule"] = one_of(RULES)


@dataclass(frozen=True)
class Config:
    """Settings of a server.

    The paper's variants: I rule="mean", II estimate=False, III filter=False, IV receive=False.
    """

    lr: float = 0.01
    """Step size along the aggregate (eta)."""
    memory: int = 3
    """L-BFGS pairs kept per client (epsilon)."""
    quantile: float = 0.8
    """The filter rejects a Lipschitz factor above this quantile of all recorded factors (alpha)."""
    max_norm: float = 50.0
    """A client's first update is clipped to this norm (G)."""
    trust: float = 1.0
    """A correction is clipped to this many times the norm of the update that it corrects. inf: no cap."""
    rule: str = "median"
    """Aggregation rule: one of RULES, or a rule that rules.register_rule added."""
    trim: int = 0
    """trimmed_mean drops this many values on either side."""
    store: str = "accepted"
    """Updates kept in the history: "accepted", or "all" finite ones as in the paper."""
    pairs: str = "received"
    """L-BFGS pairs come from consecutive uploads ("received"), or also from each round's estimates ("rounds"), as
    the paper prints it."""
    max_staleness: int = 10
    """An update may have been computed on a model this many versions back (tau_max)."""
    factors: str = "per_client"
    """Q, the recorded Lipschitz factors. "per_client": one list per client, and all clients weigh the same.
    "pooled", as in the paper: one list. A client that uploads often weighs more in it and can choose the quantile."""
    window: int | None = None
    """Factors kept per list of Q. None: 32 with factors="per_client", all with "pooled". Of these the first 2048 are
    kept as they are, and later ones to a relative precision of 2^-12, so that memory and time stay bounded."""
    on_reject: str = "hold"
    """A rejected update leaves the model unchanged ("hold"). "step", as in the paper, steps along the other clients'
    estimates: a client that sends garbage then chooses how often these are applied."""
    step: str = "all"
    """Direction of the step. "all": the aggregate of all clients' remembered updates. "received", with kinship and
    support: the received update alone, by its client's weight. Over many rounds both lead the same way, but remembered
    updates are old: they slow down or upset the training of deep nets."""
    spacing: int = 0
    """Rounds of other clients required between two rounds of one client. An earlier update is refused."""
    history_dtype: str = "float32"
    """Dtype of the pairs. float16 scales each pair by a power of two; the rest of the history stays float32. bfloat16
    is for the mean updates of averages="steps", if there are no last updates and no sketch: then the history is 2 n d
    bytes. float64 is for a float64 model, and for all of the history."""
    history_device: str = "model"
    """Where last updates, last models and pairs are kept. "model": where the model is. "cpu": with a model on a GPU in
    page-locked memory of the host, for a history that does not fit the GPU; rounds read and write it over the bus.
    Results are the same, bit for bit. Mean updates stay on the GPU: a refresh reads all of them."""
    filter: bool = True
    """Reject updates by their Lipschitz factor."""
    keep_last: bool | None = None
    """Keep each client's last update and the model it was computed on. False needs averages="steps" and filter=False,
    which use neither: the history is n d numbers in place of 3 n d, a receipt has no factor, and `last` and `estimates`
    are refused. None: keep them unless these settings need neither."""
    estimate: bool = True
    """Aggregate the estimated updates of all clients; False: the received update alone."""
    receive: bool = True
    """The received update takes part in the aggregate; False: the estimates alone."""
    buckets: int = 1
    """Average random buckets of this many updates before the rule; 1: no buckets."""
    remove: float = 0.25
    """Share of the updates that spectral drops, and that krum assumes to be malicious."""
    radius: float | None = None
    """Clipping radius of centered_clip. None: the median distance to the center."""
    iterations: int = 2
    """Iterations of centered_clip, 1 to 1000."""
    expiry: int | None = 8
    """A client's remembered update counts until the client has been silent for this many epochs. An epoch ends when
    two thirds of the clients that count have uploaded: after some 1.1 n rounds. None: for ever, as in the paper."""
    probation: int = 3
    """A client counts from this many stored uploads on, once three quarters of the clients have as many. 0: from the
    first on, as in the paper."""
    trial: int = 0
    """Epochs over which the steps of a newcomer grow from nothing to full. Only epochs in which it uploads count. A
    newcomer comes late, or has the number of a forgotten client. Otherwise a client that has lost its weight would
    come back as another one. A client that left and comes back has a shorter trial. Only rounds by `submit` count.
    Needs step="received". 0: no trial."""
    quorum: float = 0.0
    """The model does not move while fewer than this share of the clients has a stored upload. Otherwise the very first
    clients decide the first steps alone: there is no median norm yet to clip their updates to. Needs memory=0."""
    averages: str = "uploads"
    """What rule="support" compares clients by. "uploads": averages over their uploads, all alike. An attacker that
    sends a harmless upload right after each harmful one ("decoy") is not found by these. "steps", recommended: the mean
    of each client's uploads, each weighted by how far the model moved along it. Needs rule="support", step="received"
    and memory=0."""
    sketch: int = 0
    """Numbers that are kept of each client's last update, last model and mean update in place of all d: for many
    clients or large models. 2048 is enough. Needs rule="support", step="received" and memory=0. 0: all d are kept."""
    sketch_seed: int | None = None
    """Random seed of the sketches. None draws one. Attackers must not know it: they could hide from the sketches."""

    def __post_init__(self) -> None:
        is_rule(self.rule)  # loads plug-ins if it is unknown, so that an error lists their rules too
        for name, (convert, expected, holds) in CHECKS.items():
            # Plain Python values from here on: ops and JSON take no others.
            object.__setattr__(self, name, converted("SecureAFL", name, getattr(self, name), convert, expected, holds))

        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"SecureAFL: {name} must be {expected}, got {getattr(self, name)!r}")

        # Otherwise a rejected update is stored while the model stays. The client's next factor is then undefined, so
        # that update is rejected too, and so are all later ones.
        fits = self.store == "accepted" or self.on_reject == "step" or not self.filter
        need(fits, "on_reject", f"'step' with store={self.store!r}")
        need(self.estimate or self.receive, "receive", "true when estimate is false")
        # A step that is undone does not fit the products that the corrections carry from round to round.
        need(not self.quorum or not self.memory, "quorum", f"0 with memory={self.memory}")
        averaged = ("kinship", "support")  # rules that weigh clients by averages over many rounds
        weighs = self.rule in averaged and self.estimate and self.receive
        need(self.step == "all" or weighs, "step", "'all' unless rule is kinship or support, with estimate and receive")
        sketched = self.rule == "support" and self.step == "received" and not self.memory
        means_alone = self.averages == "steps" and not self.keeps_last and not self.sketch
        only = "float32, float16 or float64 unless averages='steps' with keep_last=False and sketch=0"
        need(self.history_dtype != "bfloat16" or means_alone, "history_dtype", only)
        need(self.history_device == "model" or not self.sketch, "history_device", f"'model' with sketch={self.sketch}")
        need(not self.sketch or sketched, "sketch", "0 unless rule='support', step='received' and memory=0")
        plain = self.averages == "uploads"
        need(plain or sketched, "averages", "'uploads' unless rule='support', step='received' and memory=0")
        unused = not reads_last(self.averages, self.filter)
        need(self.keep_last is not False or unused, "keep_last", "true unless averages='steps' and filter=False")
        need(not self.trial or self.step == "received", "trial", "0 unless step='received'")
        if self.sketch and self.sketch_seed is None:
            object.__setattr__(self, "sketch_seed", secrets.randbits(52))
        without_buckets = ("median", "trimmed_mean", *averaged)
        need(self.buckets == 1 or self.rule not in without_buckets, "buckets", f"1 with rule={self.rule!r}")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "Config":
        """The config in a mapping that has every setting by name, such as locals()."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @property
    def row_wise(self) -> bool:
        """Whether the rule weighs whole updates by their inner products. The mean does so only with buckets."""
        return RULES[self.rule] == "row-wise" or self.buckets > 1

    @property
    def room(self) -> int:
        """Capacity of a list of Q."""
        return self.window or (EXACT if self.factors == "pooled" else WINDOW)

    @property
    def averaging(self) -> bool:
        """Whether averages of the clients' own updates, or of their sketches, are kept in place of products."""
        return self.averages == "steps" or self.sketch > 0

    @property
    def keeps_last(self) -> bool:
        """Whether each client's last update and the model it was computed on are kept."""
        return reads_last(self.averages, self.filter) if self.keep_last is None else self.keep_last

    def quorum_of(self, clients: int) -> int:
        """Clients that must have a stored upload before the model moves."""
        return math.ceil(Fraction(str(self.quorum)) * clients)  # 0.07 * 100 is above 7 as a float

    @property
    def keeps_all(self) -> bool:
        """Whether Q keeps all factors: those that its list has no room for are counted."""
        return self.factors == "pooled" and self.window is None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the models and updates that the server keeps."""
        return torch.float64 if self.history_dtype == "float64" else torch.float32

    @property
    def pair_dtype(self) -> torch.dtype:
        """Dtype of the pairs, the bulk of the history."""
        return torch.float16 if self.history_dtype == "float16" else self.dtype

    @property
    def mean_dtype(self) -> torch.dtype:
        """Dtype of the mean updates."""
        return torch.bfloat16 if self.history_dtype == "bfloat16" else self.dtype
