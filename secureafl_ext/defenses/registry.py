"""Every defense behind one protocol, by name: the compared rules in a server of their own, and SecureAFL itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..server import protocol
from ..server.receipt import Receipt, stale_receipt
from ..server.server import SecureAFL
from ..validation import check, check_kept, check_start, describe
from .base import BASGD, Arrival, AsyncDefender, AsyncSGD, Rule, keywords, need
from .kardam import Kardam
from .trusted import AFLGuard, Sageflow, Trusted, Zeno

__all__ = ["DEFENSES", "Defense", "Guarded", "Server", "Trusted", "make"]


class Server(protocol.Server, Protocol):
    """What the simulator's loop knows of a defense."""

    @property
    def capturable(self) -> bool: ...  # whether `enqueue` exists
    def model_at(self, version: int) -> Tensor: ...

    def enqueue(self, client: Tensor, update: Tensor, trained_on: Tensor, staleness: Tensor) -> Receipt:
        """`submit` for a CUDA graph, by tensors: client (1) int64, update and trained_on (d), staleness () float64."""

    def reserve(self, rounds: int) -> None: ...  # before such a graph
    def phase(self) -> int: ...  # enqueued rounds of one phase are the same kernels on the same memory


class Guarded:
    """A flat model that takes the steps a rule lets through; versions, refusals and receipts are SecureAFL's."""

    def __init__(self, rule: Rule, name: str, model: Tensor, clients: int, lr: float, max_staleness: int):
        self.rule, self.name, self.clients, self.lr, self.max_staleness = rule, name, clients, lr, max_staleness
        self.version = 0
        self._words = (*rule.WORDS, "rejected: not finite")
        # Version v lies in row v % len.
        self.models = torch.zeros(max_staleness + 2, len(model), dtype=model.dtype, device=model.device)
        self.models[0] = model.detach()
        # Numbers that a rule gets as tensors, ready: a round may be one of a CUDA graph.
        self._clients = torch.arange(clients, device=model.device).split(1)
        self._delays = torch.arange(max_staleness + 1, dtype=torch.float64, device=model.device).unbind()

    @property
    def model(self) -> Tensor:
        """The current model (d), not to be written to; it keeps its values for the next max_staleness rounds."""
        return self.models[self.version % len(self.models)]

    def model_at(self, version: int) -> Tensor:
        """The model of one of the last max_staleness + 1 versions (d), not to be written to."""
        check_kept(f"{self.name}.model_at", version, self.version, self.max_staleness)
        return self.models[version % len(self.models)]

    def submit(self, client: int, update: Tensor, version: int) -> Receipt:
        """One round, accepted or not; a caller's mistake is an error, a version no longer kept a receipt."""
        who, models = f"{self.name}.submit", self.models
        client, version = check(who, models, models.dtype, self.clients, self.version, client, update, version)
        staleness = self.version - version
        if staleness > self.max_staleness:
            return stale_receipt(version, self.version, self.max_staleness, update.device)
        trained_on = models[version % len(models)]
        receipt = self.enqueue(self._clients[client], update.detach(), trained_on, self._delays[staleness])
        return replace(receipt, staleness=staleness)

    def enqueue(self, client: Tensor, update: Tensor, trained_on: Tensor, staleness: Tensor) -> Receipt:
        model = self.model
        finite = update.isfinite().all()
        known = torch.where(finite, update, 0)  # trusted samples are never asked about a NaN
        arrival = Arrival(client, known, finite, model, trained_on, staleness, self.refreshes(), self.lr)
        step, accepted, factor, reason = self.rule.judge(arrival)
        stepped = model - self.lr * step
        # As in SecureAFL a coordinate never leaves the floats: what diverges ends in huge numbers.
        new = torch.where(accepted & stepped.isfinite(), stepped, model)
        self.version += 1
        self.model.copy_(new)
        factor = torch.where(finite, factor, torch.nan)
        reason = torch.where(finite, reason, len(self._words) - 1)
        return Receipt(accepted, factor, None, self.version, reason, self._words)

    def forget(self, client: int) -> None:
        """As if the client had never come, so that another may have its number."""
        if hasattr(self.rule, "forget"):
            self.rule.forget(client)

    def state_dict(self) -> dict[str, Tensor | int]:
        """All that a round depends on: copies of the models and of what the rule remembers, which is tensors."""
        return {**{name: tensor.clone() for name, tensor in self._tensors().items()}, "version": self.version}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from a state of a server with the same settings; nothing changes if it does not fit."""
        tensors = self._tensors()
        for name, tensor in tensors.items():
            got = state.get(name)
            if not isinstance(got, Tensor) or got.shape != tensor.shape or got.dtype != tensor.dtype:
                raise ValueError(f"{self.name}: {name} must be {describe(tensor)}, got {describe(got)}")
        self.version = int(state["version"])
        for name, tensor in tensors.items():
            tensor.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        remembered = {f"rule.{key}": value for key, value in vars(self.rule).items() if isinstance(value, Tensor)}
        return {"models": self.models, **remembered}

    capturable = True

    def reserve(self, rounds: int) -> None:
        pass

    def phase(self) -> int:
        return self.version % len(self.models) + len(self.models) * self.refreshes()

    def refreshes(self) -> bool:
        """Whether a rule with trusted samples takes a new gradient of them in this round."""
        return self.version % getattr(self.rule, "every", 1) == 0


@dataclass(frozen=True)
class Defense:
    factory: Callable[..., Server]  # (name, model, clients, lr, max_staleness, trusted, settings)
    about: str
    needs_trusted: bool
    settings: dict[str, object]  # what may be set, with the defaults


def _ruled(rule: type, about: str, needs_trusted: bool = False) -> Defense:
    def build(name, model, clients, lr, max_staleness, trusted, settings):
        _check_start(name, model, clients, lr, max_staleness)
        judge = partial(rule, model, clients, trusted) if needs_trusted else partial(rule, model, clients)
        return Guarded(judge(**settings), name, model, clients, lr, max_staleness)

    return Defense(build, about, needs_trusted, keywords(rule))


def _check_start(name: str, model: Tensor, clients: int, lr: float, max_staleness: int) -> None:
    check_start(name, model, clients)
    need(math.isfinite(lr), name, "lr", "a finite number", lr)
    need(max_staleness >= 0, name, "max_staleness", "0 or more", max_staleness)


def _secureafl(about: str, **variant: object) -> Defense:
    def build(name, model, clients, lr, max_staleness, trusted, settings):
        exact = {"history_dtype": torch.float64} if model.dtype == torch.float64 else {}
        return SecureAFL(model, clients, lr=lr, max_staleness=max_staleness, **{**exact, **settings, **variant})

    taken = {"lr", "max_staleness", *variant}
    return Defense(build, about, False, {k: v for k, v in keywords(SecureAFL).items() if k not in taken})


DEFENSES = {
    "async-sgd": _ruled(AsyncSGD, "no defense: every update is a step"),
    "kardam": _ruled(Kardam, "Lipschitz filter against the last applied gradient, damped by staleness"),
    "basgd": _ruled(BASGD, "median over buffers of averaged updates"),
    "sageflow": _ruled(Sageflow, "entropy filter on trusted samples, damped by staleness", needs_trusted=True),
    "zeno++": _ruled(Zeno, "score against a trusted gradient, rescaled to its length", needs_trusted=True),
    "aflguard": _ruled(AFLGuard, "distance to a trusted gradient", needs_trusted=True),
    "async-defender": _ruled(AsyncDefender, "cosine-weighted baseline after AsyncDefender, reduced"),
    "secureafl": _secureafl("Lipschitz filter, estimates of the absent, median"),
    "secureafl-paper": _secureafl(
        "as the paper prints it: one quantile of all uploads; a rejected one is remembered, and the model steps on",
        factors="pooled",
        on_reject="step",
        store="all",
    ),
    "secureafl-kin": _secureafl(
        "mean of clients that neither crowd nor turn against the rest, by inner products averaged over time",
        rule="kinship",
        memory=0,
    ),
    "secureafl-i": _secureafl("Variant I: mean for the median", rule="mean"),
    "secureafl-ii": _secureafl("Variant II: no estimates", estimate=False),
    "secureafl-iii": _secureafl("Variant III: no filter", filter=False),
    "secureafl-iv": _secureafl("Variant IV: estimates alone", receive=False),
}


def make(
    name: str,
    model: Tensor,
    clients: int,
    lr: float,
    max_staleness: int,
    trusted: Trusted | None = None,
    **settings: object,
) -> Server:
    """The defense of that name, at a flat start model (d); its settings are those of DEFENSES[name]."""
    if name not in DEFENSES:
        raise ValueError(f"unknown defense {name!r}; choose from {', '.join(DEFENSES)}")
    defense = DEFENSES[name]
    for unknown in settings.keys() - defense.settings.keys():
        choices = ", ".join(defense.settings) or "nothing"
        raise ValueError(f"unknown setting {unknown!r} of {name}; choose from {choices}")
    if defense.needs_trusted and trusted is None:
        raise ValueError(f"{name}: trusted must be given, it judges updates by clean samples of the server, got None")
    return defense.factory(name, model, clients, lr, max_staleness, trusted, settings)
