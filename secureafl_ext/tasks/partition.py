"""Who holds which training samples: for every client the indices of its own, in ascending order.

No client is left without data, since it could not answer when it is called: in the order of their numbers, a client
that drew nothing is given the last sample of the one that then has most.
"""

import numpy as np
import torch
from torch import Tensor


def skewed(labels: Tensor, classes: int, clients: int, degree: float, seed: int) -> list[Tensor]:
    """The paper's label skew. degree 1 / classes: no skew; 1: every group holds labels of its own alone.

    Clients are dealt at random into as many groups as there are classes. A sample with label q goes to group q with
    probability `degree`, else to any other group, all alike; within the group to any client, all alike. With fewer
    clients than classes, which the paper does not speak of, there are as many groups as clients and group q is that
    of the labels q, q + groups, ..
    """
    if not 0 <= degree <= 1:
        raise ValueError(f"skewed: degree must be between 0 and 1, got {degree}")
    check(len(labels), clients)
    labels = labels.cpu()
    random = torch.Generator().manual_seed(seed)
    groups = min(classes, clients)
    client = torch.randperm(clients, generator=random)  # at i, i + groups, ..: the clients of group i
    group = labels % groups
    if groups > 1:
        moved = torch.rand(len(labels), generator=random, dtype=torch.float64) >= degree
        group = (group + moved * torch.randint(1, groups, labels.shape, generator=random)) % groups
    size = (clients - 1 - group) // groups + 1
    within = (torch.rand(len(labels), generator=random, dtype=torch.float64) * size).long()
    return shares(client[group + groups * within], clients)


def dirichlet(labels: Tensor, clients: int, alpha: float, seed: int) -> list[Tensor]:
    """Every label is dealt by shares of its own, drawn from a Dirichlet distribution: the smaller alpha, the fewer
    clients have most of it."""
    if not alpha > 0:
        raise ValueError(f"dirichlet: alpha must be positive, got {alpha}")
    check(len(labels), clients)
    labels = labels.cpu()
    random = np.random.default_rng(seed)  # torch has no gamma variates that take a generator
    owner = torch.empty(len(labels), dtype=torch.int64)
    for label in labels.unique():
        mine = (labels == label).nonzero()[:, 0]
        owner[mine] = torch.from_numpy(random.choice(clients, len(mine), p=random.dirichlet([alpha] * clients)))
    return shares(owner, clients)


def stretches(samples: int, clients: int) -> list[Tensor]:
    """A recording in order of time, every client with one stretch of it: how Udacity is non-IID by itself."""
    check(samples, clients)
    return list(torch.arange(samples).tensor_split(clients))


def check(samples: int, clients: int) -> None:
    if not 1 <= clients <= samples:
        raise ValueError(f"{samples} samples cannot be shared by {clients} clients: one each at least")


def shares(owner: Tensor, clients: int) -> list[Tensor]:
    """owner (N): the client of every sample."""
    counts = owner.bincount(minlength=clients)
    result = list(owner.argsort(stable=True).split(counts.tolist()))
    for empty in (counts == 0).nonzero()[:, 0].tolist():
        most = max(range(clients), key=lambda k: len(result[k]))
        result[most], result[empty] = result[most][:-1], result[most][-1:]
    return result
