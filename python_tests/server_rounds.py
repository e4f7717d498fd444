"""A server beside the slow one in NumPy: their settings, their clients, and the same rounds for both."""

import numpy as np
import torch
from slow_server import SETTING_NAMES, SlowServer

from secureafl_ext import SecureAFL

SIZE, CLIENTS = 12, 6
PAPER = {"factors": "pooled", "on_reject": "step", "store": "all", "expiry": None, "probation": 0}
SETTINGS = {
    "default": {},
    "paper": PAPER,
    "paper, window": {**PAPER, "window": 7},
    "steps on": {"on_reject": "step"},
    "pooled": {"factors": "pooled"},
    "no cap": {"trust": float("inf"), "memory": 2},
    "one pair": {"memory": 1, "quantile": 0.5},
    "no pairs": {"memory": 0},
    "trimmed mean": {"rule": "trimmed_mean", "trim": 1},
    "store all": {"store": "all", "on_reject": "step", "quantile": 0.6},
    "window": {"window": 1},
    "memory without an end": {"expiry": None, "probation": 0},
    "short memory": {"expiry": 2, "probation": 2},
    "tight first clip": {"max_norm": 0.5},
    "fresh only": {"max_staleness": 0},
    "as printed": {"pairs": "rounds"},
    "Variant I": {"rule": "mean"},
    "Variant II": {"estimate": False},
    "Variant III": {"filter": False},
    "Variant IV": {"receive": False},
}


class World:
    """Quadratic clients, one of which sends noise: who comes, how stale, with what."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.centres = self.random.normal(size=(CLIENTS, SIZE))
        self.curvature = 0.5 + self.random.random((CLIENTS, SIZE))

    def next(self, models, max_staleness):
        client = int(self.random.integers(CLIENTS))
        version = max(0, len(models) - 1 - int(self.random.integers(max_staleness + 1)))
        gradient = self.curvature[client] * (models[version] - self.centres[client])
        if client == 0:
            gradient = self.random.normal(size=SIZE) * 3
        return client, gradient + 0.05 * self.random.normal(size=SIZE), version


def make(device="cpu", **settings):
    model = torch.zeros(SIZE, dtype=torch.float64, device=device)
    return SecureAFL(model, CLIENTS, **{"lr": 0.2, "history_dtype": torch.float64, **settings})


def drive(server, rounds, seed=0, world=None, slow=None):
    """The same arrivals for both; returns the slow server and the accepted flags of both."""
    world = world or World(seed)
    settings = {name: getattr(server.config, name) for name in SETTING_NAMES}
    slow = slow or SlowServer(np.zeros(SIZE), CLIENTS, **settings)
    flags = []
    for _ in range(rounds):
        client, update, version = world.next(slow.models, server.config.max_staleness)
        expected = slow.submit(client, update, version)
        receipt = server.submit(client, torch.from_numpy(update).to(server.model.device), version)
        flags.append((bool(receipt.accepted), expected))
    return slow, flags
