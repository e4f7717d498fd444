"""The clients of one run: their data, which of them are malicious, when they upload, and their minibatches."""

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..attacks import Scene
from ..defenses import Trusted
from ..tasks import datasets, models, partition
from ..tasks.datasets import Dataset
from . import arrivals
from .settings import Resolved


class Federation:
    """All random choices of a run. Each purpose has a random stream of its own, so two runs differ only where their
    settings differ: with any defense the same clients upload at the same time.

    malicious, honest: client numbers, ascending    start: (d) the first model    scene: the knowledge of the adversary
    """

    def __init__(self, settings: Resolved):
        self.settings = settings
        data = loaded(settings.dataset, settings.data_dir, settings.holdout, settings.device)
        self.data = changed(data, settings.side, settings.augment)
        self.net = models.build(settings.model, self.data.shape, self.data.classes)
        check_memory(settings, self.net.size)
        self.start = self.net.start(stream(settings, "start")).to(settings.device)
        shares = split(settings, self.data)
        self._order = torch.cat(shares)  # samples, client after client
        self._sizes = torch.tensor([len(share) for share in shares])
        self._first = self._sizes.cumsum(0) - self._sizes
        purposes = ("samples", "extra", "look", "crops")
        self._draws = {name: torch.Generator().manual_seed(stream(settings, name)) for name in purposes}
        chosen = torch.randperm(settings.clients, generator=torch.Generator().manual_seed(stream(settings, "malice")))
        self.malicious = chosen[: settings.attackers].sort().values
        self.honest = chosen[settings.attackers :].sort().values
        self.arrivals = draw_arrivals(settings, self.malicious)
        self.scene = Scene(
            self.net,
            self.data,
            settings.lr,
            settings.clients,
            self.malicious.to(settings.device),
            stream(settings, "attack"),
        )

    def reorder(self, order: Callable[[Tensor], Tensor]) -> None:
        """Let the attack choose which malicious client uploads in each malicious round."""
        client = self.arrivals.client.clone()
        malicious = torch.isin(client, self.malicious)
        chosen = order(client[malicious])
        fits = chosen.shape == client[malicious].shape and chosen.dtype == client.dtype
        if not fits or not torch.isin(chosen, self.malicious).all():
            got = f"{tuple(chosen.shape)} {chosen.dtype}" if not fits else "other clients"
            expected = f"({int(malicious.sum())},) int64, malicious clients"
            raise ValueError(f"attack {self.settings.attack!r}: order() must return {expected}, got {got}")
        client[malicious] = chosen
        self.arrivals = self.arrivals._replace(client=client)

    def silence(self, uploads: Tensor) -> None:
        """Give the rounds (rounds) in which a malicious client does not upload to random honest clients."""
        planned = self.arrivals
        if uploads.shape != planned.client.shape or uploads.dtype != torch.bool:
            got = f"{tuple(uploads.shape)} {uploads.dtype}"
            raise ValueError(
                f"attack {self.settings.attack!r}: uploads() must return ({len(planned.client)},) bool, got {got}"
            )
        silent = torch.isin(planned.client, self.malicious) & ~uploads.cpu()
        if silent.any() and not len(self.honest):
            raise ValueError(
                f"malicious must leave an honest client for attack {self.settings.attack!r}, whose clients fall silent,"
                f" got {self.settings.malicious}"
            )
        self.arrivals = arrivals.with_silence(planned, silent, self.honest, stream(self.settings, "silence"))

    def draw(self, clients: Tensor, purpose: str) -> Tensor:
        """(.., B): a minibatch of each of these clients (..), drawn with replacement from the client's own samples.

        purpose: "samples" for training, "extra" for an attack, or "look" for an evaluation
        """
        u = torch.rand(*clients.shape, self.settings.batch, generator=self._draws[purpose], dtype=torch.float64)
        within = (u * self._sizes[clients][..., None]).long()
        samples = self._order[self._first[clients][..., None] + within]
        if self.data.crops is None:
            return samples
        variant = torch.randint(self.data.crops.variants, samples.shape, generator=self._draws["crops"])
        return samples + len(self.data.train_y) * variant

    def log_frequencies(self) -> Tensor:
        """(n, classes) float32: log of each label's share of a client's data, with one more sample of each label."""
        labels = self.data.train_y.cpu()[self._order].split(self._sizes.tolist())
        counts = torch.stack([label.bincount(minlength=self.data.classes) for label in labels]) + 1
        return (counts / counts.sum(1, keepdim=True)).log()

    def some_honest(self, rounds: int, count: int) -> Tensor:
        """(rounds, count): `count` honest clients, drawn anew for each round."""
        if count >= len(self.honest):
            return self.honest.expand(rounds, -1)
        mixed = torch.rand(rounds, len(self.honest), generator=self._draws["extra"]).argsort(1)[:, :count]
        return self.honest[mixed]

    def trusted(self) -> Trusted:
        """Gradient, loss and entropy on the server's own clean samples, drawn from all training data."""
        generator = torch.Generator().manual_seed(stream(self.settings, "trusted"))
        chosen = torch.randperm(len(self.data.train_y), generator=generator)[: self.settings.trusted]
        x, y = self.data.train(chosen.to(self.settings.device))

        def evaluate(model: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.net.predict(model, x)
            log_p = logits.log_softmax(1)
            return F.cross_entropy(logits, y), -(log_p.exp() * log_p).sum(1).mean()

        return Trusted(lambda model: self.net.gradient(model, x, y), evaluate)


@lru_cache(maxsize=4)
def loaded(name: str, data_dir: str | None, holdout: float, device: str) -> Dataset:
    """A data set on a device, loaded once for all runs."""
    whole = datasets.load(name, data_dir)
    return (whole.held_out(holdout) if holdout else whole).to(device)


@lru_cache(maxsize=4)
def changed(data: Dataset, side: int | None, augment: bool) -> Dataset:
    """The data with smaller images, and with random crops, made once for all runs."""
    data = data.reduced(side) if side else data
    return data.augmented() if augment else data


def stream(settings: Resolved, purpose: str) -> int:
    """The seed of the random stream for one purpose."""
    return int.from_bytes(hashlib.sha256(f"{purpose} {settings.seed}".encode()).digest()[:6])


def split(settings: Resolved, data: Dataset) -> list[Tensor]:
    """For each client the indices of its training samples."""
    labels, seed = data.train_y, stream(settings, "partition")
    if not data.classes:
        return partition.stretches(len(labels), settings.clients)
    if settings.partition == "dirichlet":
        return partition.dirichlet(labels, settings.clients, settings.concentration, seed)
    return partition.skewed(labels, data.classes, settings.clients, settings.degree, seed)


def draw_arrivals(settings: Resolved, malicious: Tensor) -> arrivals.Arrivals:
    sizes, seed = (settings.rounds, settings.clients, settings.delay), stream(settings, "arrivals")
    flood = None if settings.flood is None else arrivals.Flood(malicious, settings.flood)
    if settings.arrivals == "clock":
        return arrivals.clock(*sizes, settings.spread, seed, flood)
    return arrivals.uniform(*sizes, seed, flood)


MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def check_memory(settings: Resolved, parameters: int) -> None:
    """Refuse a run that cannot fit: Linux overcommits memory and kills the process that then uses it."""
    stretch = -(-settings.rounds // settings.evaluations)  # rounds from evaluation to evaluation
    minibatches = 1 + settings.attackers  # per round at most: some attacks need one of every attacker
    batches = stretch * settings.batch * 16 * minibatches
    rows = settings.delay + 1  # kept models
    if settings.defense.startswith("secureafl"):
        rows += settings.clients * (2 + 2 * settings.memory)
    need = settings.rounds * 100 + (batches + rows * parameters * 4 if settings.device == "cpu" else 0)
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = MEMORY_LIMIT.read_text().strip() if MEMORY_LIMIT.exists() else ""
    have = min(have, int(limit)) if limit.isdigit() else have
    if need > have:
        raise ValueError(
            f"rounds, batch, delay, clients and memory must fit into {have / 1e9:.1f} GB, got {settings.rounds},"
            f" {settings.batch}, {settings.delay}, {settings.clients} and {settings.memory}: {need / 1e9:.1f} GB"
        )
