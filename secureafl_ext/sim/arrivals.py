"""Who uploads when, on which version: known before the first round, for no verdict changes it."""

import heapq
import math
import random
from typing import NamedTuple

import torch
from torch import Tensor


class Arrivals(NamedTuple):
    client: Tensor  # (rounds) int64
    staleness: Tensor  # (rounds) int64: at most the delay, and at most the number of rounds before
    late: int  # uploads of versions no longer kept, between those rounds: refused, no rounds


def uniform(rounds: int, clients: int, delay: int, seed: int) -> Arrivals:
    """The paper's: each round any client, on any of the versions kept, all alike."""
    generator = torch.Generator().manual_seed(seed)
    client = torch.randint(clients, (rounds,), generator=generator)
    kept = torch.arange(1, rounds + 1).clamp(max=delay + 1)
    staleness = (torch.rand(rounds, generator=generator, dtype=torch.float64) * kept).long()
    return Arrivals(client, staleness, 0)


def clock(rounds: int, clients: int, delay: int, spread: float, seed: int) -> Arrivals:
    """Clients that train without a pause, each at a pace of its own, and take the newest model as they upload.

    A pace is log-normal with deviation `spread` of its logarithm; one training takes half to one and a half of it.
    """
    chance = random.Random(seed)
    pace = [math.exp(chance.gauss(0, spread)) for _ in range(clients)]

    def finish(client: int, now: float) -> float:
        return now + pace[client] * chance.uniform(0.5, 1.5)

    training = [(finish(client, 0.0), client, 0) for client in range(clients)]  # until when, who, on which version
    heapq.heapify(training)
    came, staleness, late = [], [], 0
    while len(came) < rounds:
        now, client, version = training[0]
        if len(came) - version <= delay:
            staleness.append(len(came) - version)
            came.append(client)
        else:
            late += 1
        heapq.heapreplace(training, (finish(client, now), client, len(came)))
    return Arrivals(torch.tensor(came), torch.tensor(staleness), late)
