"""The clients of one run: what data each holds, who is malicious, who comes when, and with which samples."""

import hashlib
import os
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
from .settings import Settings


class Federation:
    """All that is drawn once, from settings that are resolved. Every draw has a stream of its own, so that a run
    differs from another only in what their settings differ in: the same clients come at the same time, whatever the
    defense.

    malicious, honest: client numbers, ascending    start: (d) the first model    scene: what the adversary gets
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.data = loaded(settings.dataset, settings.data_dir, settings.holdout, settings.device)
        self.net = models.build(settings.model, self.data.shape, self.data.classes)
        check_memory(settings, self.net.size)
        self.start = self.net.start(stream(settings, "start")).to(settings.device)
        shares = shared_out(settings, self.data)
        self._order = torch.cat(shares)  # samples, client after client
        self._sizes = torch.tensor([len(share) for share in shares])
        self._first = self._sizes.cumsum(0) - self._sizes
        purposes = ("samples", "extra", "look")
        self._draws = {name: torch.Generator().manual_seed(stream(settings, name)) for name in purposes}
        chosen = torch.randperm(settings.clients, generator=torch.Generator().manual_seed(stream(settings, "malice")))
        self.malicious = chosen[: settings.attackers].sort().values
        self.honest = chosen[settings.attackers :].sort().values
        self.arrivals = arriving(settings)
        self.scene = Scene(
            self.net,
            self.data,
            settings.lr,
            settings.clients,
            self.malicious.to(settings.device),
            stream(settings, "attack"),
        )

    def draw(self, clients: Tensor, purpose: str) -> Tensor:
        """(.., B): a minibatch of each of these clients (..), drawn with replacement from its own samples.

        purpose: "samples" to train on, "extra" ones that an attack asks for, or to "look" at
        """
        u = torch.rand(*clients.shape, self.settings.batch, generator=self._draws[purpose], dtype=torch.float64)
        within = (u * self._sizes[clients][..., None]).long()
        return self._order[self._first[clients][..., None] + within]

    def some_honest(self, rounds: int, count: int) -> Tensor:
        """(rounds, count): honest clients, each round other ones unless all are asked for."""
        if count >= len(self.honest):
            return self.honest.expand(rounds, -1)
        mixed = torch.rand(rounds, len(self.honest), generator=self._draws["extra"]).argsort(1)[:, :count]
        return self.honest[mixed]

    def trusted(self) -> Trusted:
        """What the server asks of its own clean samples, drawn from the clients' all together."""
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
    """Once in a device's memory, whatever number of runs there is."""
    whole = datasets.load(name, data_dir)
    return (whole.held_out(holdout) if holdout else whole).to(device)


def stream(settings: Settings, purpose: str) -> int:
    """A seed for one purpose."""
    return int.from_bytes(hashlib.sha256(f"{purpose} {settings.seed}".encode()).digest()[:6])


def shared_out(settings: Settings, data: Dataset) -> list[Tensor]:
    labels, seed = data.train_y, stream(settings, "partition")
    if not data.classes:
        return partition.stretches(len(labels), settings.clients)
    if settings.partition == "dirichlet":
        return partition.dirichlet(labels, settings.clients, settings.concentration, seed)
    return partition.skewed(labels, data.classes, settings.clients, settings.degree, seed)


def arriving(settings: Settings) -> arrivals.Arrivals:
    sizes = settings.rounds, settings.clients, settings.delay
    if settings.arrivals == "clock":
        return arrivals.clock(*sizes, settings.spread, stream(settings, "arrivals"))
    return arrivals.uniform(*sizes, stream(settings, "arrivals"))


LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def check_memory(settings: Settings, parameters: int) -> None:
    """Refuses what cannot fit. Linux hands out memory that it does not have and ends a process that then uses it."""
    stretch = -(-settings.rounds // settings.evaluations)  # rounds from evaluation to evaluation
    seen = 1 + settings.attackers  # minibatches per round at most: some attacks look at every client's
    batches = stretch * settings.batch * 16 * seen
    rows = settings.delay + 1  # models that are kept
    if settings.defense.startswith("secureafl"):
        rows += settings.clients * (2 + 2 * settings.memory)
    need = settings.rounds * 100 + (batches + rows * parameters * 4 if settings.device == "cpu" else 0)
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = LIMIT.read_text().strip() if LIMIT.exists() else ""
    have = min(have, int(limit)) if limit.isdigit() else have
    if need > have:
        raise ValueError(
            f"rounds, batch, delay, clients and memory must fit into {have / 1e9:.1f} GB, got {settings.rounds},"
            f" {settings.batch}, {settings.delay}, {settings.clients} and {settings.memory}: {need / 1e9:.1f} GB"
        )
