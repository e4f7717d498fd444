"""The protocols of an attack: a Scene sets it up, a View shows it one round, and it returns the malicious update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..defenses import Server
from ..tasks.datasets import Dataset
from ..tasks.models import Net

SIDE = 4  # of a trigger, in pixels


@dataclass(frozen=True, eq=False)
class Trigger:
    """A backdoor's mark: a square of fixed random pixels in the bottom right corner, and its target class."""

    values: Tensor  # (C, 4, 4) uint8
    target: int
    quarters: Tensor  # (4, 4) int64: the part, 0 to 3, that DBA assigns to a pixel

    def apply(self, pixels: Tensor, part: Tensor | int | None = None) -> Tensor:
        """A copy of raw pixels (.., C, H, W) with the trigger. part: only this part of it, 0 to 3, a number or (1)"""
        result = pixels.clone()
        corner = result[..., -SIDE:, -SIDE:]
        corner.copy_(self.values if part is None else torch.where(self.quarters == part, self.values, corner))
        return result


@dataclass(frozen=True, eq=False)
class Scene:
    """One run, as the adversary knows it before the first round."""

    net: Net
    data: Dataset
    lr: float
    clients: int
    malicious: Tensor  # (f) int64 client numbers, ascending
    seed: int

    @property
    def device(self) -> torch.device:
        return self.data.train_x.device

    @property
    def honest(self) -> int:
        return self.clients - len(self.malicious)

    def random(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory of an attack. Allocate it once and overwrite it in place: a CUDA graph keeps its address."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def rank(self, client: Tensor) -> Tensor:
        """(1): the index of this client (1) among the malicious clients."""
        return torch.searchsorted(self.malicious, client)


@dataclass(frozen=True, eq=False)
class View:
    """One round of one malicious client."""

    client: Tensor  # (1) int64
    model: Tensor  # (d) the model that the client received, w^v
    current: Tensor  # (d) the server's current model, w^t
    own: Tensor  # (attack.own, B) int64: samples of the client; row 0 is the minibatch of an honest client in its place
    honest: Tensor  # (attack.honest, B) int64: one minibatch each of this many honest clients
    server: Server  # full knowledge of the defense; only `adaptive` reads it
    staleness: Tensor  # () float64: versions between `model` and `current`
    progress: Tensor  # () float64: the share of the run that is done, 0 or more, below 1
    lr: float | Tensor  # the server's step size in this round; a tensor () if it follows a schedule on the device


class Attack(Protocol):
    """update() and after() may be captured in a CUDA graph: they must not wait for the device or draw numbers.

    Optional: `uploads(client, malicious) -> Tensor`, for an attack whose clients fall silent. The loop calls it once,
    on the host, before the first round. client: (rounds) int64, the planned uploader    malicious: (rounds) bool
    It returns (rounds) bool, False where a malicious client stays silent: an honest client uploads in its place.

    Optional: `order(clients) -> Tensor`, for an attack that chooses which of its clients uploads when; called before
    `uploads`. clients: (malicious rounds) int64, the planned uploader. It returns the uploaders in their place.
    """

    @property
    def own(self) -> int: ...  # minibatches of the client's own data that it needs each round, 1 or more
    @property
    def honest(self) -> int: ...  # honest clients whose minibatches it needs each round
    @property
    def trigger(self) -> Trigger | None: ...  # of a backdoor; None for an untargeted attack

    def before(self) -> object: ...  # runs before each malicious round, outside any graph: draw numbers here
    def update(self, view: View) -> Tensor: ...  # (d) the update that the client sends
    def after(self, view: View, model: Tensor) -> object: ...  # runs after the server's round; model (d) is the new one


def nothing(*_: object) -> None: ...


@dataclass(frozen=True)
class Simple:
    """An attack made of one or a few functions."""

    update: Callable[[View], Tensor]
    own: int = 1
    honest: int = 0
    trigger: Trigger | None = None
    before: Callable[[], object] = nothing
    after: Callable[[View, Tensor], object] = nothing
