"""Which client uploads in which round, on which version. Drawn before the first round: no verdict changes it."""

import heapq
import math
import random
from typing import NamedTuple

import torch
from torch import Tensor


class Arrivals(NamedTuple):
    client: Tensor  # (rounds) int64
    staleness: Tensor  # (rounds) int64: at most the delay, and at most the number of earlier rounds
    late: int  # uploads on versions that are no longer kept: refused, they do not count as rounds


def uniform(rounds: int, clients: int, delay: int, seed: int) -> Arrivals:
    """As in the paper: each round any client on any kept version, all equally likely."""
    generator = torch.Generator().manual_seed(seed)
    client = torch.randint(clients, (rounds,), generator=generator)
    kept = torch.arange(1, rounds + 1).clamp(max=delay + 1)
    staleness = (torch.rand(rounds, generator=generator, dtype=torch.float64) * kept).long()
    return Arrivals(client, staleness, 0)


def clock(rounds: int, clients: int, delay: int, spread: float, seed: int) -> Arrivals:
    """An event queue. Every client trains without a pause, uploads, and takes the newest model.

    The mean training time of a client is log-normal; `spread` is the standard deviation of its logarithm. One training
    takes 0.5 to 1.5 times the mean.
    """
    chance = random.Random(seed)
    mean_time = [math.exp(chance.gauss(0, spread)) for _ in range(clients)]

    def finish(client: int, now: float) -> float:
        return now + mean_time[client] * chance.uniform(0.5, 1.5)

    training = [(finish(client, 0.0), client, 0) for client in range(clients)]  # end, client, version
    heapq.heapify(training)
    uploads: list[int] = []
    staleness: list[int] = []
    late = 0
    while len(uploads) < rounds:
        now, client, version = training[0]
        if len(uploads) - version <= delay:
            staleness.append(len(uploads) - version)
            uploads.append(client)
        else:
            late += 1
        heapq.heapreplace(training, (finish(client, now), client, len(uploads)))
    return Arrivals(torch.tensor(uploads), torch.tensor(staleness), late)
