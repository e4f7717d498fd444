"""Partition of the training samples: for each client the indices of its samples, in ascending order.

Each client has at least one sample, because it must be able to train. In the order of their numbers, each client
without a sample gets the last sample of the client that has most.
"""

import numpy as np
import torch
from torch import Tensor


def skewed(labels: Tensor, classes: int, clients: int, degree: float, seed: int) -> list[Tensor]:
    """The paper's label skew. degree=1 / classes: no skew; degree=1: each group has only its own labels.

    The clients are divided at random into one group per class. A sample with label q goes to group q with probability
    `degree`, otherwise to one of the other groups with equal probability; within the group, to any client with equal
    probability. With fewer clients than classes, which the paper does not cover, there is one group per client, and
    group q has the labels q, q + groups, ..
    """
    if not 0 <= degree <= 1:
        raise ValueError(f"skewed: degree must be between 0 and 1, got {degree}")
    check(len(labels), clients)
    labels = labels.cpu()
    random = torch.Generator().manual_seed(seed)
    groups = min(classes, clients)
    client = torch.randperm(clients, generator=random)  # the clients of group i are at i, i + groups, ..
    group = labels % groups
    if groups > 1:
        moved = torch.rand(len(labels), generator=random, dtype=torch.float64) >= degree
        group = (group + moved * torch.randint(1, groups, labels.shape, generator=random)) % groups
    size = (clients - 1 - group) // groups + 1
    within = (torch.rand(len(labels), generator=random, dtype=torch.float64) * size).long()
    return shares(client[group + groups * within], clients)


def dirichlet(labels: Tensor, clients: int, alpha: float, seed: int) -> list[Tensor]:
    """Each label is divided by shares from a Dirichlet distribution. With a smaller alpha, fewer clients have most of a
    label."""
    if not alpha > 0:
        raise ValueError(f"dirichlet: alpha must be positive, got {alpha}")
    check(len(labels), clients)
    labels = labels.cpu()
    random = np.random.default_rng(seed)  # torch's gamma variates take no generator
    owner = torch.empty(len(labels), dtype=torch.int64)
    for label in labels.unique():
        mine = (labels == label).nonzero()[:, 0]
        owner[mine] = torch.from_numpy(random.choice(clients, len(mine), p=random.dirichlet([alpha] * clients)))
    return shares(owner, clients)


def stretches(samples: int, clients: int) -> list[Tensor]:
    """A recording in order of time: each client has one stretch of it. This makes Udacity non-IID."""
    check(samples, clients)
    return list(torch.arange(samples).tensor_split(clients))


def check(samples: int, clients: int) -> None:
    if not 1 <= clients <= samples:
        raise ValueError(f"partition: clients must be 1 to {samples}, the number of samples, got {clients}")


def shares(owner: Tensor, clients: int) -> list[Tensor]:
    """The samples of each client. owner: (N) the client of each sample"""
    counts = owner.bincount(minlength=clients)
    result = list(owner.argsort(stable=True).split(counts.tolist()))
    for empty in (counts == 0).nonzero()[:, 0].tolist():
        most = max(range(clients), key=lambda k: len(result[k]))
        result[most], result[empty] = result[most][:-1], result[most][-1:]
    return result
