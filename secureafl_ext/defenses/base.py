"""What a rule is, one arrival in and one verdict out, and those that ask for no trusted samples (Kardam apart).

A rule remembers what it needs in tensors that it overwrites in place, and decides with tensors: no wait for the device,
and a round can be captured in a graph. Nothing that is not finite enters its memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .. import ops


@dataclass(frozen=True)
class Arrival:
    """One update as a rule sees it."""

    client: Tensor  # (1) int64
    update: Tensor  # (d); zeros where it was not finite
    finite: Tensor  # () bool
    model: Tensor  # (d) the current one
    trained_on: Tensor  # (d) the one the client had
    staleness: Tensor  # () float64
    refresh: bool  # whether a rule that keeps a trusted gradient takes a new one
    lr: float


class Verdict(NamedTuple):
    step: Tensor  # (d) direction to go along if accepted; may be anything if not
    accepted: Tensor  # () bool
    factor: Tensor  # () float64, the number that was judged; NaN where none is defined
    reason: Tensor  # () index into the rule's WORDS


class Rule(Protocol):
    WORDS: tuple[str, ...]

    def judge(self, arrival: Arrival) -> Verdict: ...

    # Those that hold something against a client, or for it, also have forget(client): another gets its number.


class AsyncSGD:
    """Every update is a step. The paper cites the delay-compensated variant but describes this one."""

    WORDS = ("accepted",)

    def __init__(self, model: Tensor, clients: int):
        self.nothing = torch.full((), torch.nan, dtype=torch.float64, device=model.device)
        self.first_word = torch.zeros((), dtype=torch.int64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        return Verdict(arrival.update, arrival.finite, self.nothing, self.first_word)


class BASGD:
    """Averages updates in buffers; once none is empty, steps along the median of the averages.

    buffers: B, by default a fifth of the clients, 5 to 10 (more than twice the malicious would be safe, but slow)
    interval: after so many updates without a step the clients heard from are spread anew, by default 4 B
    trim: None for the median, else the trimmed mean without so many on either side
    `steps` counts the steps, for those who count rounds by them. Every round pays for a median, for only the device
    knows whether a buffer is still empty: an update that is not finite fills none.
    """

    WORDS = ("accepted: buffered", "accepted: no buffer empty, a step")

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        buffers: int | None = None,
        interval: int | None = None,
        trim: int | None = None,
    ):
        size = min(clients, max(5, min(10, clients // 5))) if buffers is None else buffers
        need(1 <= size <= clients, "BASGD", "buffers", f"1 to {clients}", buffers)
        self.interval = 4 * size if interval is None else interval
        need(self.interval >= 1, "BASGD", "interval", "1 or more", interval)
        need(trim is None or 0 <= 2 * trim < size, "BASGD", "trim", f"None or 0 to {(size - 1) // 2}", trim)
        self.trim = trim
        counters = {"dtype": torch.int64, "device": model.device}
        self.means = torch.zeros(size, len(model), dtype=model.dtype, device=model.device)
        self.counts = torch.zeros(size, **counters)
        self.clients = torch.arange(clients, **counters)
        self.mapping = self.clients.clone()
        self.heard = torch.zeros(clients, dtype=torch.bool, device=model.device)  # since the last step
        self.waited, self.steps = torch.zeros((), **counters), torch.zeros((), **counters)
        self.nothing = torch.full((), torch.nan, dtype=torch.float64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        self._fill(arrival)
        full = arrival.finite & (self.counts > 0).all()
        middle = ops.median(self.means) if self.trim is None else ops.trimmed_mean(self.means, self.trim)
        self._spread(arrival, full)
        self.counts *= ~full
        self.steps += full
        return Verdict(torch.where(full, middle, 0), arrival.finite, self.nothing, full.long())

    def _fill(self, arrival: Arrival) -> None:
        buffer = self.mapping.index_select(0, arrival.client) % len(self.means)
        count = self.counts.index_select(0, buffer).reshape(()) + arrival.finite
        mean = self.means.index_select(0, buffer)[0]
        # Weighted so, not by adding a difference: the first update of a buffer replaces whatever an old step left.
        added = mean * ((count - 1).double() / count) + arrival.update / count
        self.means.index_copy_(0, buffer, torch.where(arrival.finite, added, mean)[None])
        self.counts.index_copy_(0, buffer, count.reshape(1))

    def _spread(self, arrival: Arrival, full: Tensor) -> None:
        """Who sends often may sit in few buffers and leave the others to clients that never come (recalled rule)."""
        self.heard |= (self.clients == arrival.client) & arrival.finite
        self.waited += arrival.finite
        due = ~full & (self.waited >= self.interval)
        self.mapping.copy_(torch.where(due & self.heard, self.heard.cumsum(0) - 1, self.mapping))
        self.waited *= ~(full | due)
        self.heard &= ~full


WEIGHTS = {"positive": lambda cosine: cosine.clamp(min=0), "shifted": lambda cosine: (1 + cosine) / 2}
REFERENCES = ("ema", "last", "model")


class AsyncDefender:
    """A cosine-weighted baseline after AsyncDefender, reduced: no reviewers. It does not reproduce the original.

    An update, no longer than the running mean of accepted lengths, is weighed by its cosine to the reference.
    reference: "ema" of the applied steps, the "last" of them, or the "model" itself, the paper's literal wording
    warmup: so many first updates have weight 1 and are clipped to max_norm, by default the number of clients
    credibility: weigh also by the running share of a client's updates with positive cosine, from 1 on
    """

    WORDS = (
        "accepted: weighted by cosine (reduced AsyncDefender)",
        "accepted: warm-up (reduced AsyncDefender)",
        "rejected: cosine not positive (reduced AsyncDefender)",
    )

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        momentum: float = 0.9,
        weight: str = "positive",
        reference: str = "ema",
        max_norm: float = 50.0,
        warmup: int | None = None,
        credibility: bool = False,
    ):
        need(0 <= momentum < 1, "AsyncDefender", "momentum", "0 or more, below 1", momentum)
        need(weight in WEIGHTS, "AsyncDefender", "weight", f"one of {', '.join(WEIGHTS)}", weight)
        need(reference in REFERENCES, "AsyncDefender", "reference", f"one of {', '.join(REFERENCES)}", reference)
        need(max_norm > 0, "AsyncDefender", "max_norm", "positive", max_norm)
        self.momentum, self.weight, self.reference, self.max_norm = momentum, weight, reference, max_norm
        self.warmup = clients if warmup is None else warmup
        need(self.warmup >= 1, "AsyncDefender", "warmup", "1 or more: nothing to compare with before", warmup)
        self.credibility = credibility
        self.direction = torch.zeros_like(model)  # of the applied steps
        self.length = torch.zeros((), dtype=torch.float64, device=model.device)  # mean of accepted ones; 0: none yet
        self.credible = torch.ones(clients, dtype=torch.float64, device=model.device)
        self.taken = torch.zeros((), dtype=torch.int64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        alike = cosine(arrival.update, arrival.model if self.reference == "model" else self.direction)
        warm = self.taken < self.warmup
        weight = WEIGHTS[self.weight](alike)
        if self.credibility:
            before = self.credible.index_select(0, arrival.client)
            share = torch.where(arrival.finite & ~warm, 0.9 * before + 0.1 * (alike > 0).double(), before)
            self.credible.index_copy_(0, arrival.client, share)
            weight = weight * share[0]
        weight = torch.where(warm, 1.0, weight)
        accepted = arrival.finite & (weight > 0)

        length = norm(arrival.update)
        cap = torch.where(warm, self.max_norm, self.length)
        step = arrival.update * (weight * (cap / length).clamp(max=1))
        self.taken += arrival.finite
        self._remember(step, length.clamp(max=self.max_norm), accepted)
        return Verdict(step, accepted, alike, torch.where(accepted, warm.long(), 2))

    def forget(self, client: int) -> None:
        self.credible[client] = 1

    def _remember(self, step: Tensor, length: Tensor, accepted: Tensor) -> None:
        """Lengths before the cap, or their mean could only fall; at most max_norm, or one update could lift it."""
        keep = 0.0 if self.reference == "last" else self.momentum
        direction = keep * self.direction + (1 - keep) * step
        self.direction.copy_(torch.where(accepted, direction, self.direction))
        mean = torch.where(self.length > 0, self.momentum * self.length + (1 - self.momentum) * length, length)
        self.length.copy_(torch.where(accepted, mean, self.length))


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).sum()


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return dot(x, y) / (norm(x) * norm(y))


def keywords(factory: Callable[..., object]) -> dict[str, object]:
    """What may be set of a rule or an attack, with the defaults: its keyword-only parameters."""
    parameters = signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY}


def need(ok: bool, rule: str, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{rule}: {name} must be {expected}, got {got!r}")
