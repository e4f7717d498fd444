"""The servers that the paper times beside SecureAFL, and the network whose gradients they are sent."""

from collections.abc import Callable

import torch
from torch import Tensor

from secureafl_ext.defenses import Server, Trusted, make
from secureafl_ext.tasks.models import cnn

LR = 0.01
CLIENT_BATCH, TRUSTED_BATCH = 32, 100  # samples, as in the paper
# The paper's names: ours, and settings. A trusted gradient in every round, for both that need one.
PEERS = {"AsyncSGD": ("async-sgd", {}), "Zeno++": ("zeno++", {"every": 1}), "AFLGuard": ("aflguard", {"every": 1})}


class Task:
    """The paper's CNN, its hidden layer as wide as d asks for (100 units: 139,960 parameters), on random images."""

    def __init__(self, d: int, device: str, seed: int):
        self.net = cnn((1, 28, 28), 10, hidden=max(1, round((d - 13_860) / 1_261)))
        self.model = self.net.start(seed).to(device)
        random = torch.Generator(device).manual_seed(seed)
        self._client, self._clean = (batch(count, random) for count in (CLIENT_BATCH, TRUSTED_BATCH))

    def client_gradient(self, model: Tensor) -> Tensor:
        return self.net.gradient(model, *self._client)

    def trusted_gradient(self, model: Tensor) -> Tensor:
        return self.net.gradient(model, *self._clean)


def batch(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.rand(count, 1, 28, 28, generator=random, device=random.device)
    return images, torch.randint(10, (count,), generator=random, device=random.device)


def server(name: str, model: Tensor, clients: int, gradient: Callable[[Tensor], Tensor]) -> Server:
    """One of PEERS at `model`; `gradient(model)` is that on the server's own clean data."""
    defense, settings = PEERS[name]
    trusted = Trusted(gradient, evaluate=None)  # neither of them asks for a loss
    return make(defense, model, clients, LR, max_staleness=10, trusted=trusted, **settings)
