"""What an attack is set up with, what it sees when one of its clients is picked, and what it has to answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..defenses import Server
from ..tasks.datasets import Dataset
from ..tasks.models import Net

if TYPE_CHECKING:
    from .backdoors import Trigger


@dataclass(frozen=True, eq=False)
class Scene:
    """One run, as the adversary knows it from the start."""

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
        """Memory of an attack: allocated once, overwritten in place, so that a CUDA graph finds it again."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def rank(self, client: Tensor) -> Tensor:
        """(1): which of the malicious clients this one (1) is, from 0 on."""
        return torch.searchsorted(self.malicious, client)


@dataclass(frozen=True, eq=False)
class View:
    """One malicious client's round."""

    client: Tensor  # (1) int64
    model: Tensor  # (d) w^v, what the client was handed
    current: Tensor  # (d) w^t, the server's present one
    own: Tensor  # (attack.own, B) int64 samples of its own; row 0 is the minibatch of an honest client in its place
    honest: Tensor  # (attack.honest, B) int64: a minibatch each of that many honest clients
    server: Server  # full knowledge of the defense; Adaptive alone looks at it


class Attack(Protocol):
    """update and after may be captured in a CUDA graph: they never wait for the device and draw nothing."""

    own: int  # minibatches of its own data that it wants each round, 1 or more
    honest: int  # honest clients whose minibatches it wants to see each round
    trigger: "Trigger | None"  # what turns an image into one of the target class; None for untargeted attacks

    def before(self) -> None: ...  # ahead of every malicious round, outside any graph: draws, occasional work
    def update(self, view: View) -> Tensor: ...  # (d) what the client sends
    def after(self, view: View, model: Tensor) -> None: ...  # after the server's round; model (d) is its new one


def nothing(*_: object) -> None: ...


@dataclass(frozen=True)
class Simple:
    """An attack that is a function or two."""

    update: Callable[[View], Tensor]
    own: int = 1
    honest: int = 0
    trigger: "Trigger | None" = None
    before: Callable[[], None] = nothing
    after: Callable[[View, Tensor], None] = nothing
