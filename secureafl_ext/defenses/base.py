"""The protocols of a defense: a Rule judges one Arrival and returns a Verdict. RuleServer runs it as a server.

A rule keeps all its memory in tensor attributes and overwrites them in place. It decides with tensors and never waits
for the device, so that a round can be captured in a CUDA graph. It must not store a value that is not finite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..server import protocol
from ..server.receipt import Receipt


@dataclass(frozen=True)
class Arrival:
    """One update as a rule receives it."""

    client: Tensor  # (1) int64
    update: Tensor  # (d); all zeros if the client's update was not finite
    finite: Tensor  # () bool: whether the client's update was finite
    model: Tensor  # (d) the current model
    trained_on: Tensor  # (d) the model that the client trained on
    staleness: Tensor  # () float64: versions between these two models
    refresh: bool  # whether a rule with a trusted gradient must renew it in this round
    lr: float | Tensor  # the model moves by this times the step; a tensor () if it follows a schedule on the device


class Verdict(NamedTuple):
    step: Tensor  # (d) the model moves by -lr * step if the update is accepted; ignored otherwise
    accepted: Tensor  # () bool
    factor: Tensor  # () float64: the number that was compared with a threshold; NaN if there is none
    reason: Tensor  # () int64: index into the rule's REASONS


class Rule(Protocol):
    """Optional: `forget(client: int)` erases the memory of one client, so that another client can take its number.
    Optional: `every: int`, the rounds between two trusted gradients (see Arrival.refresh).
    Optional: `weighs: bool`. If true, `weights` (n) float64 are those of the clients' remembered updates in the last
    step, and `seen` (n) bool the clients that have one. Then the summary of a run has the precision and recall of
    leaving clients out.
    Optional: the methods of AcceptanceTest or NearestAccepted, for the adaptive attack.
    """

    @property
    def REASONS(self) -> tuple[str, ...]: ...  # noqa: N802 - texts of the receipts, "accepted: .." or "rejected: .."

    def judge(self, arrival: Arrival) -> Verdict: ...


@runtime_checkable
class AcceptanceTest(Protocol):
    """A rule that can tell whether it would accept an update, without a change of its memory.

    The adaptive attack asks it. Without this method the attack calls judge() and restores the rule's memory, which
    gives the same answer but copies the memory each time.
    """

    def would_accept(self, arrival: Arrival) -> Tensor: ...  # () bool


@runtime_checkable
class NearestAccepted(Protocol):
    """A rule that can compute the accepted update nearest to a given one. The adaptive attack sends that update."""

    def nearest_accepted(self, arrival: Arrival) -> Tensor: ...  # (d)


@dataclass(frozen=True)
class Trusted:
    """The clean samples of a server, as functions of a flat model (d)."""

    gradient: Callable[[Tensor], Tensor]  # (d)
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]]  # mean loss (), mean entropy of the predictions in nats ()


class Server(protocol.Server, Protocol):
    """A defense as the simulator's loop uses it.

    Optional: `present` (n) bool, clients that count, and `left_out() -> Tensor | None`, (n) bool, those of them that
    have almost no weight; None if the defense has no weights.
    """

    @property
    def capturable(self) -> bool: ...  # whether enqueue() exists
    def model_at(self, version: int) -> Tensor: ...

    def enqueue(self, client: Tensor, update: Tensor, trained_on: Tensor, staleness: Tensor) -> Receipt:
        """submit() for a CUDA graph. client: (1) int64    update, trained_on: (d)    staleness: () float64"""

    def phase(self) -> int: ...  # ring-buffer slot; a captured graph is valid only for this slot


def norm(x: Tensor) -> Tensor:
    """() float64: the norm of all values of x."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).sum()


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return dot(x, y) / (norm(x) * norm(y))


def need(ok: bool, who: str, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{who}: {name} must be {expected}, got {got!r}")
