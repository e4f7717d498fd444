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


class Flood(NamedTuple):
    """Malicious clients that upload more often than the others (flooding: THROTTLE, 2026)."""

    malicious: Tensor  # (f) int64 client numbers, at least one, not all
    share: float  # of all uploads that these clients make together, above 0, below 1


def uniform(rounds: int, clients: int, delay: int, seed: int, flood: Flood | None = None) -> Arrivals:
    """As in the paper: each round any client on any kept version, all equally likely. With a flood the malicious
    clients are equally likely among themselves, and so are the honest ones."""
    generator = torch.Generator().manual_seed(seed)
    if flood is None:
        client = torch.randint(clients, (rounds,), generator=generator)
    else:
        chance = torch.full((clients,), (1 - flood.share) / (clients - len(flood.malicious)), dtype=torch.float64)
        chance[flood.malicious] = flood.share / len(flood.malicious)
        client = torch.multinomial(chance, rounds, replacement=True, generator=generator)
    kept = torch.arange(1, rounds + 1).clamp(max=delay + 1)
    staleness = (torch.rand(rounds, generator=generator, dtype=torch.float64) * kept).long()
    return Arrivals(client, staleness, 0)


def clock(rounds: int, clients: int, delay: int, spread: float, seed: int, flood: Flood | None = None) -> Arrivals:
    """An event queue. Every client trains without a pause, uploads, and takes the newest model.

    The mean training time of a client is log-normal; `spread` is the standard deviation of its logarithm. One training
    takes 0.5 to 1.5 times the mean. With a flood all malicious clients are faster by one factor. Then honest uploads
    find more versions between theirs: with a small delay more of them are late, and the malicious share rises further.
    """
    chance = random.Random(seed)
    mean_time = [math.exp(chance.gauss(0, spread)) for _ in range(clients)]
    if flood is not None:
        speed_up(mean_time, flood)

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


def speed_up(mean_time: list[float], flood: Flood) -> None:
    """Scale the training times of the malicious clients so that they make the flood's share of the uploads."""
    malicious = set(flood.malicious.tolist())
    theirs = sum(1 / time for client, time in enumerate(mean_time) if client in malicious)  # uploads per unit of time
    others = sum(1 / time for client, time in enumerate(mean_time) if client not in malicious)
    factor = theirs / others * (1 - flood.share) / flood.share
    for client in malicious:
        mean_time[client] *= factor


def with_silence(planned: Arrivals, silent: Tensor, honest: Tensor, seed: int) -> Arrivals:
    """In each round in which a malicious client is silent, a random honest client uploads on the same version. So a run
    keeps its number of rounds.

    silent: (rounds) bool    honest: client numbers, at least one if any client is silent
    """
    generator = torch.Generator().manual_seed(seed)
    others = honest[torch.randint(max(len(honest), 1), (int(silent.sum()),), generator=generator)]
    client = planned.client.clone()
    client[silent] = others
    return planned._replace(client=client)
