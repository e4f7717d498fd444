"""A server split over ranks: the world that it lives in, what ranks do there, and whether two states agree."""

import hashlib
import math

import torch

from secureafl_ext import SecureAFL, gather, shard
from secureafl_ext.engines.ranks import SLICED

D, N = 20_011, 9
# Steps so short that rounding stays rounding: in a livelier world the whole server, its coordinates merely in another
# order, is soon elsewhere too, since a near-singular correction or a factor at the quantile makes much of a last bit.
SETTINGS = {"lr": 0.005, "max_staleness": 4, "max_norm": 20.0}
KINDS = {
    "median": {},
    "float16": {"history_dtype": torch.float16, "factors": "pooled", "on_reject": "step", "store": "all"},
    "trimmed mean": {"rule": "trimmed_mean", "trim": 2, "window": 40},
    "mean": {"rule": "mean", "memory": 1},
    "no pairs": {"memory": 0, "expiry": 2, "probation": 2},
}
# The same, of engines of plain ops. Updates are stored, expire and are rejected.
ROW_KINDS = {
    "support": {"rule": "support", "memory": 0, "quantile": 0.95, "expiry": 1, "quorum": 0.5},
    "kinship": {"rule": "kinship", "memory": 0, "expiry": 2, "probation": 4, "on_reject": "step", "store": "all"},
    "float64": {"rule": "support", "memory": 0, "expiry": 2, "factors": "pooled", "history_dtype": torch.float64},
    "steps": {
        "rule": "support",
        "step": "received",
        "averages": "steps",
        "memory": 0,
        "quantile": 0.95,
        "expiry": 1,
        "trial": 4,
    },
    "krum in buckets": {"rule": "krum", "memory": 0, "buckets": 2},
    "median with a quorum": {"memory": 0, "quorum": 0.5},
}


class World:
    """Quadratic clients, some of whom come late, send noise, what is not finite, or on a model no longer kept.

    alike: this many of them want the same, a crowd to rule="support"
    """

    def __init__(self, d=D, seed=0, alike=1):
        self.random = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(N, d, generator=self.random)
        self.centres[:alike] = self.centres[0].clone()
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
        return client, update.to(models[0].dtype), version


def nothing(server, k):
    pass


def blank(settings, d):
    """A model of the dtype of the history."""
    return torch.zeros(d, dtype=torch.promote_types(settings.get("history_dtype", torch.float32), torch.float32))


def history_of_arrivals(settings, rounds, d=D, after=nothing):
    """(arrivals, reasons and factors, the whole server behind them). after(server, k): called after arrival k"""
    crowd = 3 if settings.get("rule") == "support" else 1  # otherwise its shifts are 0
    world, server = World(d, alike=crowd), SecureAFL(blank(settings, d), N, **settings)
    models, arrivals, verdicts = [server.model.clone()], [], []
    while len(arrivals) < rounds:
        arrivals.append(world.next(models))
        receipt = server.submit(*arrivals[-1])
        verdicts.append((receipt.reason, float(receipt.factor), receipt.version))
        after(server, len(arrivals) - 1)
        models += [server.model.clone()] if server.version == len(models) else []
    return arrivals, verdicts, server


def replay(server, arrivals, group, after=nothing, first=0):
    """Reasons and factors. first: the number of the first of these arrivals"""
    verdicts = []
    for k, (client, update, version) in enumerate(arrivals, first):
        receipt = server.submit(client, shard(update, group), version)
        verdicts.append((receipt.reason, float(receipt.factor), receipt.version))
        after(server, k)
    return verdicts


def digest(tensors):
    """Of what is the same on all ranks, and of the slices, bit for bit."""
    parts = {True: hashlib.sha256(), False: hashlib.sha256()}
    for name, value in sorted(tensors.items()):
        parts[name in SLICED].update(torch.as_tensor(value).contiguous().view(-1).view(torch.uint8).numpy())
    return parts[False].hexdigest(), parts[True].hexdigest()


def whole_state(server, group):
    """As the server that is not split would have it."""
    state = server.state_dict()
    return {name: gather(value, group) if name in SLICED else value for name, value in state.items()}


def start(settings, group, d=D, **more):
    return SecureAFL(shard(blank(settings, d), group), N, **settings, process_group=group, **more)


def near(ours, theirs, bound=1e-4):
    for name in set(SLICED) & set(theirs):
        difference = (ours[name].double() - theirs[name].double()).norm()
        half = theirs[name].dtype == torch.float16  # two values that are rounded apart differ by 2^-11
        assert difference <= (2**-11 if half else bound) * theirs[name].double().norm(), name


def agree(ours, theirs, bound=1e-4):
    """Two whole states but for rounding; where pairs lie in their ring, whom they are of, and all that is counted."""
    assert ours.keys() == theirs.keys()
    near(ours, theirs, bound)
    for name, value in theirs.items():
        if name == "scales" or not torch.as_tensor(value).is_floating_point():
            assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name
    assert torch.allclose(ours["factors"], theirs["factors"], rtol=bound)
    for name in {"products", "similarity", "kinship", "kin_centre", "shift", "total", "noise"} & set(theirs):
        assert (ours[name] - theirs[name]).abs().max() <= bound * theirs[name].abs().max(), name


def digests(group, settings, arrivals, d=D, after=nothing):
    server = start(settings, group, d)
    replay(server, arrivals, group, after)
    return digest(server.state_dict())
