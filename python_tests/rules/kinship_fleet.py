"""Fleets with colluders, and servers with rule="kinship" for them.

In float64 a round is composed of plain ops, in float32 and without corrections it is one op.
"""

import numpy as np
import torch

from secureafl_ext import SecureAFL
from secureafl_ext.engines.kinship import FusedKinship

F64, F32 = torch.float64, torch.float32
SIZE, GROUPS, COLLUDERS = 60, 5, 6
HONEST = 2 * GROUPS
CLIENTS = HONEST + COLLUDERS + 1


def fleet(seed=0, colluders=COLLUDERS, turned=True):
    """(n, d): mean updates of honest clients, two by two alike, of colluders, and of one turned against them all."""
    random = np.random.default_rng(seed)
    axes = np.linalg.qr(random.normal(size=(SIZE, GROUPS + 2)))[0].T  # orthonormal
    honest = [axes[GROUPS] * 0.4 + axes[k % GROUPS] for k in range(HONEST)]
    against = [-np.sum(honest, 0) / np.linalg.norm(np.sum(honest, 0))] if turned else []
    return np.array(honest + [axes[GROUPS + 1]] * colluders + against)


def uploads(means, rounds, seed=1, noise=0.15, scale=1.0, order=None):
    """(client, update) of so many rounds; every update is its client's mean and noise of about the same length."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        client = int(random.integers(len(means)))
        update = scale * (means[client] + noise * random.normal(size=SIZE))
        yield (client if order is None else int(order[client])), update


def make(device="cpu", clients=CLIENTS, dtype=F64, **settings):
    start = torch.zeros(SIZE, dtype=dtype, device=device)
    settings = {"rule": "kinship", "memory": 0, "history_dtype": dtype, "lr": 0.01, **settings}
    server = SecureAFL(start, clients, **settings)
    one_op = dtype == F32 and settings["memory"] == 0 and settings["rule"] == "kinship"
    assert isinstance(server._engine, FusedKinship) == one_op
    return server


def drive(server, stream):
    for client, update in stream:
        server.submit(client, torch.from_numpy(update).to(server.model), server.version)
    return server


def left_out(server):
    """Clients whom the next round would leave out, of those seen."""
    kept = server._engine.kinship.kept(server.seen)
    return torch.nonzero(server.seen & ~kept)[:, 0].tolist()
