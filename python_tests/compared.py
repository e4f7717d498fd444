"""The compared defenses in a small world: who uploads what there, and their slow twins beside them."""

import math

import numpy as np
import slow_defenses as slow
import slow_memory as memory
import torch

from secureafl_ext.defenses import DEFENSES, Trusted, make

SIZE, CLIENTS, LR, STALENESS = 8, 6, 0.1, 4
F64 = torch.float64
SLOW = {
    "async-sgd": slow.AsyncSGD,
    "kardam": slow.Kardam,
    "basgd": slow.BASGD,
    "sageflow": slow.Sageflow,
    "zeno++": slow.Zeno,
    "aflguard": slow.AFLGuard,
    "async-defender": slow.AsyncDefender,
    "foolsgold": memory.FoolsGold,
    "fltrust": memory.FLTrust,
    "flame": memory.FLAME,
    "dnc": memory.DnC,
    "nnm-trimmed-mean": memory.NNMTrimmedMean,
    "nnm-geometric-median": memory.NNMGeometricMedian,
    "krum": memory.Krum,
    "centered-clip": memory.CenteredClip,
    "demoa": memory.DeMoA,
    "weighted": memory.Weighted,
    "fedbuff-trimmed-mean": slow.FedBuff,
}
CASES = {  # name, settings, how the reasons that must occur begin
    "async-sgd": ("async-sgd", {}, ["accepted"]),
    "kardam": ("kardam", {}, ["accepted", "rejected: coefficient", "accepted: as many"]),
    "kardam quantile": ("kardam", {"quantile": 0.5, "patience": 3}, ["accepted: as many"]),
    "kardam short list": ("kardam", {"kept": 1, "malicious": 2}, ["accepted", "rejected: coefficient"]),
    "kardam strict": ("kardam", {"frequency": "strict"}, ["accepted", "rejected: client"]),
    "kardam lenient": ("kardam", {"frequency": "lenient", "malicious": 2}, ["accepted", "rejected: client"]),
    "kardam inverse": ("kardam", {"dampening": "inverse"}, ["accepted"]),
    "kardam undamped": ("kardam", {"dampening": "off"}, ["accepted"]),
    "basgd": ("basgd", {}, ["accepted: buffered", "accepted: no buffer"]),
    "basgd even": ("basgd", {"buffers": 4}, ["accepted: buffered", "accepted: no buffer"]),
    "basgd spread": ("basgd", {"buffers": 3, "interval": 4}, ["accepted: buffered", "accepted: no buffer"]),
    "basgd trimmed": ("basgd", {"buffers": 4, "trim": 1}, ["accepted: buffered", "accepted: no buffer"]),
    "sageflow": ("sageflow", {"warmup": 10}, ["accepted", "accepted: warm-up", "rejected: entropy"]),
    "sageflow classes": ("sageflow", {"warmup": 10, "classes": 20, "decay": 1.0}, ["accepted", "rejected: entropy"]),
    "sageflow anchored": ("sageflow", {"warmup": 5, "mode": "anchored", "delta": 2.0}, ["accepted"]),
    "sageflow trained": ("sageflow", {"warmup": 5, "candidate": "trained"}, ["accepted", "rejected: entropy"]),
    "zeno++": ("zeno++", {}, ["accepted: rescaled", "rejected: score"]),
    "zeno++ rho": ("zeno++", {"rho": 0.03, "every": 1}, ["accepted: rescaled", "rejected: score"]),
    "zeno++ eps": ("zeno++", {"rho": 0.05, "eps": 0.4, "every": 3}, ["accepted: rescaled", "rejected: score"]),
    "aflguard": ("aflguard", {}, ["accepted", "rejected: too far"]),
    "aflguard lazy": ("aflguard", {"every": 5, "radius": 1.2}, ["accepted", "rejected: too far"]),
    "aflguard cosine": ("aflguard", {"test": "cosine"}, ["accepted", "rejected: too far"]),
    "async-defender": ("async-defender", {"max_norm": 2.0}, ["accepted: warm-up", "accepted: weighted", "rejected"]),
    "async-defender shifted": ("async-defender", {"weight": "shifted", "momentum": 0.5}, ["accepted: weighted"]),
    "async-defender last": ("async-defender", {"reference": "last", "warmup": 3}, ["rejected: cosine"]),
    "async-defender model": ("async-defender", {"reference": "model"}, ["rejected: cosine"]),
    "async-defender credible": ("async-defender", {"credibility": True}, ["rejected: cosine"]),
    "foolsgold": ("foolsgold", {}, ["accepted", "accepted: its weight"]),
    "foolsgold strict": ("foolsgold", {"pardon": False, "confidence": 0.5}, ["accepted", "accepted: its weight"]),
    "foolsgold normalized": ("foolsgold", {"normalize": True, "momentum": 0.5}, ["accepted", "accepted: its weight"]),
    "fltrust": ("fltrust", {}, ["accepted", "accepted: its weight"]),
    "fltrust lazy": ("fltrust", {"every": 7, "momentum": 0.9}, ["accepted", "accepted: its weight"]),
    "flame": ("flame", {}, ["accepted", "accepted: its weight"]),
    "flame loud": ("flame", {"noise": 0.3, "clip": False, "momentum": 0.9}, ["accepted", "accepted: its weight"]),
    "dnc": ("dnc", {}, ["accepted", "accepted: its weight"]),
    "dnc sampled": (
        "dnc",
        {"coordinates": 3, "malicious": 2, "iterations": 3, "momentum": 0.5},
        ["accepted: its weight"],
    ),
    "nnm-trimmed-mean": ("nnm-trimmed-mean", {}, ["accepted", "accepted: too few"]),
    "nnm-trimmed-mean two": ("nnm-trimmed-mean", {"malicious": 2, "momentum": 0.5}, ["accepted", "accepted: too few"]),
    "nnm-geometric-median": ("nnm-geometric-median", {}, ["accepted"]),
    "nnm-geometric-median two": ("nnm-geometric-median", {"malicious": 2, "momentum": 0.5}, ["accepted"]),
    "krum": ("krum", {}, ["accepted", "accepted: its weight"]),
    "krum multi": ("krum", {"selected": 3, "malicious": 2, "momentum": 0.5}, ["accepted", "accepted: its weight"]),
    "centered-clip": ("centered-clip", {}, ["accepted"]),
    "centered-clip median": ("centered-clip", {"radius": 0, "iterations": 1, "momentum": 0.5}, ["accepted"]),
    "centered-clip tight": ("centered-clip", {"radius": 0.3}, ["accepted"]),
    "demoa": ("demoa", {}, ["accepted"]),
    "demoa krum": ("demoa", {"aggregator": "krum", "malicious": 2}, ["accepted", "accepted: its weight"]),
    "demoa median": ("demoa", {"aggregator": "median", "momentum": 0.5}, ["accepted"]),
    "demoa trimmed": ("demoa", {"aggregator": "trimmed_mean"}, ["accepted", "accepted: too few"]),
    "weighted": ("weighted", {}, ["accepted", "accepted: its weight"]),
    "weighted median": ("weighted", {"base": "median", "trim": 0.2}, ["accepted", "accepted: its weight"]),
    "weighted base": ("weighted", {"trim": 0.0, "momentum": 0.0}, ["accepted"]),
    "weighted median base": ("weighted", {"trim": 0.0, "base": "median"}, ["accepted"]),
    "fedbuff-trimmed-mean": ("fedbuff-trimmed-mean", {}, ["accepted: buffered", "accepted: buffer full"]),
    "fedbuff-trimmed-mean small": (
        "fedbuff-trimmed-mean",
        {"buffer": 3, "trim": 0, "server_lr": 2.0, "staleness": "off"},
        ["accepted: buffered", "accepted: buffer full"],
    ),
}


class World:
    """Quadratic clients; 0 sends noise, 1 the opposite, and some uploads are broken. Also the trusted samples' side."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.centres = 1 + 0.5 * self.random.normal(size=(CLIENTS, SIZE))
        self.curvature = 0.5 + self.random.random((CLIENTS, SIZE))
        self.start = self.random.normal(size=SIZE)
        self.models = [self.start]

    def next(self):
        client = int(self.random.integers(CLIENTS))
        version = max(0, len(self.models) - 1 - int(self.random.integers(STALENESS + 1)))
        update = self.curvature[client] * (self.models[version] - self.centres[client])
        update = update + 0.1 * self.random.normal(size=SIZE)
        if client == 0:
            update = 5 * self.random.normal(size=SIZE)
        if client == 1:
            update = -2 * update
        if self.random.random() < 0.06:
            update[self.random.integers(SIZE)] = self.random.choice([np.nan, np.inf, -np.inf])
        return client, update, version

    def at(self, version):
        return self.models[version]

    def gradient(self, model):
        return self.curvature[2:].mean(0) * (model - self.centres[2:].mean(0))

    def evaluate(self, model):
        far = np.sum((model - 1) ** 2)
        return 0.1 + 0.5 * far, math.log(10) * (1 - math.exp(-far / 12))

    def trusted(self):
        def tensor(values, like):
            return torch.as_tensor(values, dtype=like.dtype, device=like.device)

        return Trusted(
            lambda model: tensor(self.gradient(model.double().cpu().numpy()), model),
            lambda model: tuple(tensor(x, model) for x in self.evaluate(model.double().cpu().numpy())),
        )


def drive(name, settings, rounds=90, device="cpu", dtype=F64, seed=0):
    """The server, its slow twin, and both sides' verdicts round by round."""
    world = World(seed)
    start = torch.tensor(world.start, dtype=dtype, device=device)
    server = make(name, start, CLIENTS, LR, STALENESS, world.trusted(), **settings)
    needs = [world] if DEFENSES[name].needs_trusted else []
    twin = slow.SlowServer(SLOW[name](CLIENTS, *needs, **settings), start.double().cpu().numpy(), LR)
    world.models = twin.models
    verdicts = []
    for _ in range(rounds):
        client, update, version = world.next()
        update = torch.tensor(update, dtype=dtype, device=device)
        receipt = server.submit(client, update, version)
        verdicts.append((receipt, twin.submit(client, update.double().cpu().numpy(), version)))
        assert receipt.version == server.version == len(twin.models) - 1
    return server, twin, verdicts


def arrivals(name, seed, rounds=40, **settings):
    world = World(seed)
    server = make(name, torch.tensor(world.start), CLIENTS, LR, STALENESS, world.trusted(), **settings)
    for _ in range(rounds):
        client, update, version = world.next()
        server.submit(client, torch.tensor(update), version)
        world.models.append(server.model.numpy().copy())
    return server


def pair(name, model, clients=3, lr=1.0, trusted=None, **settings):
    server = make(name, torch.tensor(model, dtype=F64), clients, lr, 4, trusted, **settings)

    def send(client, update, version):
        return server.submit(client, torch.tensor(update, dtype=F64), version)

    return server, send


def reference(*gradient):
    nothing = torch.zeros((), dtype=F64)
    return Trusted(lambda model: torch.tensor(gradient, dtype=F64), lambda model: (nothing, nothing))
