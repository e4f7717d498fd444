"""The servers that the paper times beside SecureAFL, and the network whose gradients they are sent.

A server's part of a round is a function (model, update, trusted): it steps `model` in place, without waiting for the
device. `trusted(model)` is the gradient on the server's own clean data, for those that need one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

LR = 0.01
CLIENT_BATCH, TRUSTED_BATCH = 32, 100  # samples, as in the paper
RADIUS = 1.5  # AFLGuard's lambda


def async_sgd(model: Tensor, update: Tensor, trusted: Callable[[Tensor], Tensor]) -> None:
    model.sub_(update, alpha=LR)


def zeno(model: Tensor, update: Tensor, trusted: Callable[[Tensor], Tensor]) -> None:
    """Steps if the update points the way of the trusted gradient, by the length of that one."""
    reference = trusted(model)
    scale = torch.where(update @ reference > 0, reference.norm() / update.norm(), 0)
    model.sub_(LR * scale * update)


def aflguard(model: Tensor, update: Tensor, trusted: Callable[[Tensor], Tensor]) -> None:
    """Steps if the update lies within a ball around the trusted gradient."""
    reference = trusted(model)
    inside = (update - reference).norm() <= RADIUS * reference.norm()
    model.sub_(LR * inside * update)


PEERS = {"AsyncSGD": async_sgd, "Zeno++": zeno, "AFLGuard": aflguard}


class Task:
    """The paper's CNN, its hidden layer as wide as d asks for (100 units: 139,960 parameters), on random images."""

    def __init__(self, d: int, device: str, seed: int):
        hidden = max(1, round((d - 13_860) / 1_261))
        torch.manual_seed(seed)  # the initial weights know no other generator
        self.net = nn.Sequential(
            nn.Conv2d(1, 30, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(30, 50, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1250, hidden), nn.ReLU(), nn.Linear(hidden, 10),
        ).to(device)  # fmt: skip
        self.model = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        self._client, self._clean = (self._batch(count, device) for count in (CLIENT_BATCH, TRUSTED_BATCH))

    def client_gradient(self, model: Tensor) -> Tensor:
        return self._gradient(model, *self._client)

    def trusted_gradient(self, model: Tensor) -> Tensor:
        return self._gradient(model, *self._clean)

    def _batch(self, count: int, device: str) -> tuple[Tensor, Tensor]:
        return torch.rand(count, 1, 28, 28, device=device), torch.randint(10, (count,), device=device)

    def _gradient(self, model: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        names, sizes = zip(*((name, weight.shape) for name, weight in self.net.named_parameters()), strict=True)
        pieces = model.detach().split([size.numel() for size in sizes])
        weights = [piece.view(size).requires_grad_() for piece, size in zip(pieces, sizes, strict=True)]
        logits = functional_call(self.net, dict(zip(names, weights, strict=True)), (images,))
        gradients = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), weights)
        return torch.cat([gradient.flatten() for gradient in gradients])
