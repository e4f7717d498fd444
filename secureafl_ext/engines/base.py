"""Engine: the interface between the server and the object that does its rounds."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..rules.kinship import Kinship
from .presence import Presence
from .ranks import NotifyPeers, Ranks


def undo_of(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Copies these tensors. The function that it returns copies them back."""
    copies = [(tensor, tensor.clone()) for tensor in tensors]

    def undo() -> None:
        for tensor, value in copies:
            tensor.copy_(value)

    return undo


class Outcome(NamedTuple):
    """The result of one round, on the device."""

    accepted: Tensor  # () bool
    factor: Tensor  # () float64, or NaN
    reason: Tensor  # () int64, index into REASONS
    weight: Tensor | None = None  # () float64, of the update in the aggregate; None if the rule has no weights


class Engine(Protocol):
    """The history of all clients, and one round after the other on it. Nothing waits for the device.

    factors, recorded, factor_counts: Q, the Lipschitz factors that the filter compares with (quantile.py)
    counts: (5) int64, in the order of config.COUNTS
    presence: which clients count
    """

    factors: Tensor
    recorded: Tensor
    factor_counts: Tensor
    counts: Tensor
    presence: Presence
    lr: float  # of the next round

    @property
    def is_whole(self) -> bool:
        """Whether a round that runs out of memory has changed nothing."""

    @property
    def seen(self) -> Tensor:
        """(n or more) bool: clients with a history."""

    def similarity(self, version: int) -> Tensor | None:
        """(n, n) float64: averaged inner products of the clients' updates, with rule="kinship" or "support".

        version: the server's. An engine may return the same result for several versions if it is costly to compute
        """

    @property
    def kinship(self) -> Kinship | None:
        """The similarity of clients, with rule="kinship"."""

    @property
    def capturable(self) -> bool:
        """Whether `round` takes the client as a tensor, so that a CUDA graph can capture it."""

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        """Judge the update, estimate, aggregate, store, step: models[new] = models[now] - lr * aggregate.

        client: a number, or (1) int64 if capturable    update, trained_on: (d)    models: (rows, d)
        """

    def estimates(self, model: Tensor) -> Tensor:
        """(n, d): the update that every client would send at this model; zeros for clients without a history."""

    def norms(self, model: Tensor) -> Tensor:
        """(n) float64: the norms of `estimates`, for averages of own updates those of the clients' last updates."""

    def row_weights(self, model: Tensor) -> Tensor | None:
        """(n) float64: the weights of the clients' remembered updates in a step from this model (d); None if the rule
        has none."""

    def last_of(self, client: Tensor) -> tuple[Tensor, Tensor]:
        """The last update of client (1) int64, and the model that it was computed on, (d) each."""

    def number_of(self, client: int) -> Tensor:
        """The client's number as a tensor (1) int64 on the device."""

    def forget(self, client: int) -> None:
        """Erase everything that belongs to this client alone."""

    def state(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Copies of all tensors by name (checkpoint/state.py), on `device`."""

    def load(self, state: Mapping[str, Tensor], model: Tensor) -> None:
        """Continue from a checked state; `model` is the current one."""


class ShardedEngine(Engine, Protocol):
    """An Engine over this rank's coordinates, which decides by sums over all of them.

    A round uses the sums of the last message. Call `synchronize` before every call that reads or changes the state.
    """

    ranks: Ranks
    notify_peers: NotifyPeers

    def update_sums(self, client: Tensor, update: Tensor, trained_on: Tensor) -> Tensor:
        """This rank's part of the sums that a round needs, float64. client: (1) int64    update, trained_on: (d)"""

    def synchronize(self, call: str, facts: Mapping[str, int], sums: Tensor | None = None) -> Tensor:
        """One message: agree on this call, and return the sums over all ranks. sums: at most as many as update_sums
        returns; zeros follow"""
