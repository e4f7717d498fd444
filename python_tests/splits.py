"""A server split over ranks: the world that it lives in, what ranks do there, and whether two states agree."""

import hashlib
import math

import torch

from secureafl_ext import SecureAFL, gather, shard
from secureafl_ext.engines import sharded

D, N = 20_011, 9
# Steps so short that rounding stays rounding: in a livelier world the whole server, its coordinates merely in another
# order, is soon elsewhere too, since a near-singular correction or a factor at the quantile makes much of a last bit.
SETTINGS = {"lr": 0.005, "max_staleness": 4, "max_norm": 20.0}
KINDS = {
    "median": {},
    "float16": {"history_dtype": torch.float16, "factors": "pooled", "on_reject": "step", "store": "all"},
    "trimmed mean": {"rule": "trimmed_mean", "trim": 2, "window": 40},
    "mean": {"rule": "mean", "memory": 1},
}


class World:
    """Quadratic clients, some of whom come late, send noise, what is not finite, or on a model no longer kept."""

    def __init__(self, d=D, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(N, d, generator=self.random)
        self.curvature = 0.5 + torch.rand(N, d, generator=self.random)
        self.rounds = 0

    def draw(self, below):
        return int(torch.randint(below, (), generator=self.random))

    def next(self, models):
        """(client, update, version), of a client that trained on one of the models so far (or as good as)."""
        self.rounds += 1
        client = self.draw(4 if self.rounds < 30 else N)
        newest = len(models) - 1
        version = max(0, newest - self.draw(7))
        update = self.curvature[client] * (models[version] - self.centres[client])
        noise = torch.randn(update.shape, generator=self.random)
        update = 3 * noise if client == N - 1 else update + 0.05 * noise
        if self.rounds % 17 == 9:
            update[self.draw(len(update))] = math.nan if self.rounds % 2 else math.inf
        return client, update, version


def history_of_arrivals(settings, rounds, d=D):
    """(arrivals, reasons and factors, the whole server behind them)"""
    world, server = World(d), SecureAFL(torch.zeros(d), N, **settings)
    models, arrivals, verdicts = [server.model.clone()], [], []
    while len(arrivals) < rounds:
        arrivals.append(world.next(models))
        receipt = server.submit(*arrivals[-1])
        verdicts.append((receipt.reason, float(receipt.factor), receipt.version))
        models += [server.model.clone()] if server.version == len(models) else []
    return arrivals, verdicts, server


def replay(server, arrivals, group):
    receipts = [server.submit(client, shard(update, group), version) for client, update, version in arrivals]
    return [(receipt.reason, float(receipt.factor), receipt.version) for receipt in receipts]


def digest(tensors):
    """Of what is the same on all ranks, and of the slices, bit for bit."""
    parts = {True: hashlib.sha256(), False: hashlib.sha256()}
    for name, value in sorted(tensors.items()):
        parts[name in sharded.SLICED].update(torch.as_tensor(value).contiguous().view(-1).view(torch.uint8).numpy())
    return parts[False].hexdigest(), parts[True].hexdigest()


def whole_state(server, group):
    """As the server that is not split would have it."""
    state = server.state_dict()
    return {name: gather(value, group) if name in sharded.SLICED else value for name, value in state.items()}


def start(settings, group, d=D, **more):
    return SecureAFL(shard(torch.zeros(d), group), N, **settings, process_group=group, **more)


def near(ours, theirs, bound=1e-4):
    for name in sharded.SLICED:
        difference = (ours[name].double() - theirs[name].double()).norm()
        assert difference <= bound * theirs[name].double().norm(), name


def agree(ours, theirs, bound=1e-4):
    """Two whole states but for rounding; where pairs lie in their ring, whom they are of, and all that is counted."""
    assert ours.keys() == theirs.keys()
    near(ours, theirs, bound)
    for name in ("pairs", "oldest", "seen", "recorded", "scales", "status", "version", "stale"):
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])), name
    assert torch.allclose(ours["factors"], theirs["factors"], rtol=bound)


def digests(group, settings, arrivals):
    server = start(settings, group)
    replay(server, arrivals, group)
    return digest(server.state_dict())
