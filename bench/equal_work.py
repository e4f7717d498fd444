"""Images per second of the simulator and of an asynchronous loop in plain torch: same net, batch, clients and rule.

python bench/equal_work.py [--device cpu|cuda] [--quick] [--out DIR]

The plain loop does what that of github.com/dahan198/asynchronous-fault-tolerant-ml does ("Weight for Robustness"): a
DataLoader, autograd, a row of momentum per worker, and a weighted coordinate-wise median by a sort. It is our own text,
and kinder: its images are floats in memory, and nothing is logged.
"""

import random
import time
from dataclasses import dataclass, replace

import numpy as np
import simulator
import torch
from report import SEED, Row, head, options, ratio, table, write
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from secureafl_ext.tasks import models
from secureafl_ext.tasks.readers import Arrays
from secureafl_ext.tasks.sources import register_dataset

IMAGES, CLASSES = 4_000, 10
MOMENTUM, LR = 0.9, 0.01
# Ours: the plain loop's two rules, then what we recommend.
OURS = {
    "async-sgd": {},
    "weighted": {"defense_options": {"base": "median", "momentum": MOMENTUM}},
    "secureafl-support": {},
}
TWIN = {"every update is a step": "async-sgd", "weighted median": "weighted"}


@dataclass(frozen=True)
class Task:
    model: str
    shape: tuple[int, int, int]
    batch: int

    @property
    def dataset(self) -> str:
        return f"noise-{self.model}"

    def images(self) -> np.ndarray:
        return np.random.default_rng(SEED).integers(0, 256, (IMAGES, *self.shape), dtype=np.uint8)

    def labels(self) -> np.ndarray:
        return np.arange(IMAGES) % CLASSES

    def arrays(self, data_dir: object) -> Arrays:
        x, y = self.images(), self.labels()
        return Arrays(x, y, x[:CLASSES], y[:CLASSES], CLASSES)


TASKS = (Task("cnn", (1, 28, 28), 32), Task("resnet20", (3, 32, 32), 64))
SIZES = {
    "full": simulator.Sizes(2_000, 50, tuple(OURS), (), (1, 8), 1),
    "quick": simulator.Sizes(20, 50, tuple(OURS), (), (1, 2), 1),
    "tiny": simulator.Sizes(3, 5, tuple(OURS), (), (1, 2), 1),
}
ON_CPU = {"cnn": 200, "resnet20": 3}  # rounds at most: ResNet-20 takes about a second for each


class PlainLoop:
    """rows: (clients, d) the momentum of each worker    weights: (clients, 1) its uploads"""

    def __init__(self, task: Task, clients: int, device: str, robust: bool):
        torch.manual_seed(SEED)
        self.module = models.build(task.model, task.shape, CLASSES).make().to(device)
        self.parameters, self.device, self.robust = list(self.module.parameters()), device, robust
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        pixels = torch.from_numpy(task.images()).float() / 255
        data = TensorDataset(pixels, torch.from_numpy(task.labels()))
        self.loader = DataLoader(data, batch_size=task.batch, shuffle=True, drop_last=True)
        self.rows = torch.zeros(clients, sum(p.numel() for p in self.parameters), device=device)
        self.weights = torch.zeros(clients, 1, device=device)
        self.batches = iter(self.loader)

    def rounds(self, count: int) -> float:
        """Seconds for so many rounds, done when this returns."""
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            self.round()
        self._wait()
        return time.perf_counter() - start

    def round(self) -> None:
        worker = random.randrange(len(self.rows))
        self.optimizer.zero_grad()
        x, y = self._batch()
        F.cross_entropy(self.module(x.to(self.device)), y.to(self.device)).backward()
        if self.robust:
            gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
            self.weights[worker] += 1
            self.rows[worker] = MOMENTUM * self.rows[worker] + (1 - MOMENTUM) * gradient
            direction = weighted_median(self.rows, self.weights)
            for parameter, part in zip(
                self.parameters, direction.split([p.numel() for p in self.parameters]), strict=True
            ):
                parameter.grad = part.view(parameter.shape)
        self.optimizer.step()

    def _batch(self) -> tuple[Tensor, Tensor]:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def weighted_median(rows: Tensor, weights: Tensor) -> Tensor:
    """(d): in each column of rows (n, d) the first value at which half of the weights (n, 1) are reached."""
    values, order = rows.sort(0)
    reached = (weights / weights.sum())[order].squeeze(2).cumsum(0) >= 0.5
    return values.gather(0, reached.int().argmax(0)[None])[0]


Rates = dict[str, tuple[float, float | None]]  # rounds per second: of one run, of several at a time


def plain_rates(task: Task, clients: int, device: str, count: int) -> Rates:
    rates: Rates = {}
    for name in TWIN:
        plain = PlainLoop(task, clients, device, robust=name == "weighted median")
        plain.rounds(max(1, count // 10))  # libraries load and choose their kernels
        rates[name] = count / plain.rounds(count), None
    return rates


def our_rates(task: Task, sizes: simulator.Sizes, device: str, count: int) -> Rates:
    rates: Rates = {}
    for name, changed in OURS.items():
        same = {"dataset": task.dataset, "model": task.model, "batch": task.batch, "lr": LR}
        one = simulator.settings(device, sizes, count, defense=name, **same, **changed)
        rates[name] = 1e3 / simulator.round_ms(one)[0], simulator.rounds_per_second(one, sizes.together[-1])
    return rates


def comparison(task: Task, rates: Rates, together: int) -> str:
    lines = []
    for name, (alone, packed) in rates.items():
        base = next((rates[peer][0] for peer, ours in TWIN.items() if ours == name), None)
        images = [None if rate is None else f"{task.batch * rate:,.0f}" for rate in (alone, packed)]
        label = f"plain torch: {name}" if name in TWIN else name
        lines.append((label, *images, ratio(alone, base), ratio(packed, base)))
    return table(("", "images/s", f"{together} at a time", "x plain torch", f"x, {together} at a time"), lines)


def main() -> None:
    chosen = options(__doc__.splitlines()[0], SIZES)
    sizes, device = SIZES[chosen.sizes], chosen.device
    rows, parts = [], [head("Equal work", device)]
    for task in tqdm(TASKS, unit="task", leave=False):
        task = replace(task, batch=2) if chosen.sizes == "tiny" else task
        register_dataset(task.dataset, task.arrays, about="random images, for a benchmark")
        count = min(sizes.rounds, ON_CPU[task.model]) if device == "cpu" else sizes.rounds
        rates = plain_rates(task, sizes.clients, device, count) | our_rates(task, sizes, device, count)
        d = models.build(task.model, task.shape, CLASSES).size
        rows += [Row(task.model, name, sizes.clients, d, 0, 1e3 / alone) for name, (alone, _) in rates.items()]
        about = f"{d:,} parameters, batches of {task.batch}, {sizes.clients} clients, {count:,} rounds after a warm-up."
        parts += [f"## {task.model}", about, comparison(task, rates, sizes.together[-1])]
    write(chosen.out, "equal_work", "\n\n".join(parts), rows, picture=False)


if __name__ == "__main__":
    main()
