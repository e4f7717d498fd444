"""Tiny runs for the tests of the attacks: a few images of noise, a small net, and what an attacker sees of them."""

import torch
from torch import nn

from secureafl_ext.attacks import Scene, View
from secureafl_ext.defenses import Trusted
from secureafl_ext.defenses import make as make_defense
from secureafl_ext.tasks.datasets import Dataset
from secureafl_ext.tasks.models import Net

KINDS = {"grey": ((1, 8, 8), 10), "colour": ((3, 9, 7), 12), "regression": ((3, 8, 8), 0)}
CLIENTS, MALICIOUS, BATCH, SAMPLES, LR = 8, (1, 4, 6), 6, 64, 0.1
HONEST = [client for client in range(CLIENTS) if client not in MALICIOUS]


def dataset(kind="grey", device="cpu"):
    (channels, height, width), classes = KINDS[kind]
    random = torch.Generator().manual_seed(1)

    def part():
        x = torch.randint(256, (SAMPLES, channels, height, width), dtype=torch.uint8, generator=random)
        y = torch.randint(classes, (SAMPLES,), generator=random) if classes else torch.rand(SAMPLES, generator=random)
        return x, y

    scale, shift = torch.full((channels, 1, 1), 2 / 255), torch.full((channels, 1, 1), -1.0)
    return Dataset(kind, *part(), *part(), classes, scale, shift).to(device)


def small_net(data):
    channels, height, width = data.shape

    def make():
        left = 3 * (height - 4) * (width - 4)
        convolutions = nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.ReLU()
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(left, data.classes or 1))

    return Net(make, data.classes)


def scene(kind="grey", device="cpu", seed=0, clients=CLIENTS, malicious=MALICIOUS, net=None, lr=LR):
    data = dataset(kind, device)
    numbers = torch.tensor(malicious, dtype=torch.int64, device=device)
    return Scene(net or small_net(data), data, lr, clients, numbers, seed)


def view(run, attack, client=None, seed=0, server=None, model=None, staleness=0.0, progress=0.0):
    """A round of one malicious client, the first by default, at a model of its own."""
    random = torch.Generator().manual_seed(seed)
    number = int(run.malicious[0]) if client is None else client
    model = run.net.start(seed).to(run.device) if model is None else model

    def samples(rows):
        return torch.randint(len(run.data.train_y), (rows, BATCH), generator=random).to(run.device)

    current = model if server is None else server.model.clone()
    client = torch.tensor([number], device=run.device)
    late, done = (torch.tensor(x, dtype=torch.float64, device=run.device) for x in (staleness, progress))
    return View(client, model, current, samples(attack.own), samples(attack.honest), server, late, done, run.lr)


def trusted(run):
    """Some of the clients' samples, for the defenses that ask for clean ones."""
    x, y = run.data.train(torch.arange(40, device=run.device))

    def evaluate(model):
        logs = run.net.predict(model, x).log_softmax(1)
        return run.net.loss(model, x, y), -(logs.exp() * logs).sum(1).mean()

    return Trusted(lambda model: run.net.gradient(model, x, y), evaluate)


def server(run, name, **settings):
    model = run.net.start(run.seed).to(run.device)
    return make_defense(name, model, run.clients, run.lr, 4, trusted(run), **settings)


def honest_round(run, server, client, seed):
    """An honest client's upload at the newest model."""
    random = torch.Generator().manual_seed(seed)
    index = torch.randint(len(run.data.train_y), (BATCH,), generator=random).to(run.device)
    return server.submit(client, run.net.gradient(server.model, *run.data.train(index)), server.version)
