"""What is learned: the paper's CNN, on the 5,000 images of Fashion-MNIST that come with secureafl_ext."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from secureafl_ext.defenses import Trusted
from secureafl_ext.sim import metrics
from secureafl_ext.tasks import datasets, models, partition

SEED = 0


@lru_cache
def images() -> datasets.Dataset:
    return datasets.load(datasets.DEFAULT)


@lru_cache
def net() -> models.Net:
    return models.cnn(images().shape, images().classes)


def module() -> torch.nn.Module:
    return net().make()


def start() -> dict[str, Tensor]:
    """The state dict that training begins with."""
    return net().views(net().start(SEED))


@lru_cache
def shares(clients: int, degree: float) -> list[Tensor]:
    """Which samples each client has."""
    return partition.skewed(images().train_y, images().classes, clients, degree, SEED)


def batch(client: int, clients: int, degree: float, size: int, draw: int) -> tuple[Tensor, Tensor]:
    """A client's minibatch; the same `draw` is the same batch."""
    mine = shares(clients, degree)[client]
    random = torch.Generator().manual_seed(1_000_003 * draw + client)
    return images().train(mine[torch.randint(len(mine), (size,), generator=random)])


def error(model: Tensor) -> float:
    """Share of the test images that a flat model takes for something else."""
    return metrics.error(net(), images(), model)


def trusted(samples: int = 100) -> Trusted:
    """For the defenses that judge by clean samples of the server's own."""
    random = torch.Generator().manual_seed(SEED)
    x, y = images().train(torch.randperm(len(images().train_y), generator=random)[:samples])

    def evaluate(model: Tensor) -> tuple[Tensor, Tensor]:
        logits = net().predict(model, x)
        log_p = logits.log_softmax(1)
        return F.cross_entropy(logits, y), -(log_p.exp() * log_p).sum(1).mean()

    return Trusted(lambda model: net().gradient(model, x, y), evaluate)
