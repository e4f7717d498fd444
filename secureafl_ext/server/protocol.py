"""Server: the interface that a training loop needs. SecureAFL and every defense of the simulator implement it."""

from typing import Protocol

from torch import Tensor

from .receipt import Receipt


class Server(Protocol):
    """Optional: `leave(client: int)`: the client's remembered update has no weight until it uploads again."""

    version: int
    clients: int

    lr: float  # can be set between two rounds

    @property
    def model(self) -> Tensor: ...
    def submit(self, client: int, update: Tensor, version: int) -> Receipt: ...
    def forget(self, client: int) -> None: ...
    def state_dict(self) -> dict[str, Tensor | int]: ...
    def load_state_dict(self, state: dict[str, Tensor | int]) -> None: ...
