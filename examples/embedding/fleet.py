"""The clients of the examples: each trains a linear model on its fifth of the embedded images, one is malicious."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from secureafl_ext.tasks import datasets

CLIENTS = 5
MALICIOUS = 4
ATTACK = -10  # what the malicious client multiplies its honest update by
# For updates that are whole trainings, not gradients: honest ones have norms of 0.1 to 0.5.
SETTINGS = {"lr": 0.2, "max_norm": 0.5}
# The same server with nothing that defends it: steps along the mean of what every client sent last.
UNDEFENDED = {"rule": "mean", "filter": False, "estimate": False}


class Net(nn.Module):
    """7,850 parameters, the same start for everyone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(28 * 28, 10)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


images = cache(datasets.load)


def samples(client: int) -> tuple[Tensor, Tensor]:
    return images().train(torch.arange(client, len(images().train_y), CLIENTS))


def train(model: nn.Module, client: int) -> None:
    """Ten steps of SGD in place; from the malicious client's the model comes back far off, in the wrong direction."""
    x, y = samples(client)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for batch in torch.randint(len(y), (10, 32)):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    if client == MALICIOUS:
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), before, strict=True):
                parameter.copy_(start + ATTACK * (parameter - start))


@torch.no_grad()
def error(model: nn.Module) -> float:
    """Share of the 1,000 test images that the model gets wrong."""
    wrong = model(images().inputs(images().test_x)).argmax(1) != images().test_y
    return float(wrong.float().mean())
