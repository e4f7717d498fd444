"""A server with a rule that weighs whole rows, and its clients."""

import numpy as np
import torch

from secureafl_ext import SecureAFL

SIZE, CLIENTS = 12, 7
F64 = torch.float64
ROBUST = ("centered_clip", "spectral", "krum", "geometric_median")


class World:
    """Quadratic clients, one of which sends noise, one from time to time no numbers, one late."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.centres = self.random.normal(size=(CLIENTS, SIZE))
        self.rounds = 0

    def next(self, model_at, newest, max_staleness):
        self.rounds += 1
        client = int(self.random.integers(CLIENTS if self.rounds > 25 else CLIENTS - 1))
        version = max(0, newest - int(self.random.integers(max_staleness + 1)))
        update = model_at(version) - self.centres[client] + 0.05 * self.random.normal(size=SIZE)
        if client == 0:
            update = 3 * self.random.normal(size=SIZE)
        if client == 1 and self.rounds % 3 == 0:
            update[self.rounds % SIZE] = np.nan
        return client, update, version


def make(device="cpu", **settings):
    start = torch.zeros(SIZE, dtype=F64, device=device)
    return SecureAFL(start, CLIENTS, **{"lr": 0.1, "memory": 0, "history_dtype": F64, "max_staleness": 4, **settings})


def arrivals(server, rounds, world):
    """(client, update, version) of so many rounds, each made after the one before was taken."""
    for _ in range(rounds):
        client, update, version = world.next(
            lambda version: server.model_at(version).cpu().numpy(), server.version, server.config.max_staleness
        )
        yield client, torch.from_numpy(update).to(server.model), version
