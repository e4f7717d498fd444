"""Test errors of a small net under adversaries that talk to the server directly, and look at what it does.

python bench/adversaries.py [--rounds 4000] [--seeds 3] [--degree 0.5]

The simulator's attacks follow a plan that is drawn before the run. These do not: they upload several times in a row,
or look at their own weight first. The task: Fashion-MNIST's embedded part, a net with 32 hidden units, 50 clients with
mostly one class each, 10 of them malicious, uniform arrivals, staleness up to 10.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import cache
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.tasks import datasets, partition

CLIENTS, MALICIOUS, BATCH, LR, STALENESS, HIDDEN = 50, 10, 32, 0.05, 10, 32
PAIRS = 5  # of attackers
VICTIM = 6  # the class whose clients are framed: shirts
SERVERS = {
    "AsyncSGD": {"rule": "mean", "memory": 0, "estimate": False, "filter": False, "expiry": None, "probation": 0},
    "averages of uploads": RECOMMENDED | {"averages": "uploads"},
    "recommended": RECOMMENDED,
}
images = cache(datasets.load)


class Fleet:
    """The task and its server. honest(client): a new gradient at the current model"""

    def __init__(self, settings: dict, seed: int, degree: float):
        self.data = images(datasets.DEFAULT)
        self.random = torch.Generator().manual_seed(seed)
        classes = self.data.classes
        self.samples = partition.skewed(self.data.train_y, classes, CLIENTS, degree, seed)
        pixels = self.data.train_x[0].numel()
        self.shapes = ((HIDDEN, pixels), (HIDDEN,), (classes, HIDDEN), (classes,))
        scales = [(len(shape) - 1) / shape[-1] ** 0.5 for shape in self.shapes]  # biases begin at 0
        start = [torch.randn(s, generator=self.random) * scale for s, scale in zip(self.shapes, scales, strict=True)]
        self.server = SecureAFL(torch.cat([part.flatten() for part in start]), CLIENTS, lr=LR, **settings)
        self.malicious = set(torch.randperm(CLIENTS, generator=self.random)[:MALICIOUS].tolist())
        mostly = [int(self.data.train_y[own].bincount().argmax()) for own in self.samples]
        self.victims = [c for c in range(CLIENTS) if mostly[c] == VICTIM and c not in self.malicious]
        self.private = torch.randn(CLIENTS, len(self.server.model), generator=self.random)
        self.lengths = torch.ones(CLIENTS)  # of the clients' last honest updates
        self.arrivals = torch.zeros(CLIENTS, dtype=torch.int64)
        self.since = torch.zeros(CLIENTS, dtype=torch.int64)  # uploads of each attacker since it came
        self.quiet = torch.zeros(CLIENTS, dtype=torch.int64)  # arrivals at which it will send nothing
        # The server subtracts. push: every weight grows; dying: those into the hidden units fall, until no unit is left
        self.push = torch.full_like(self.server.model, -(len(self.server.model) ** -0.5))
        into_hidden = torch.arange(len(self.push)) < HIDDEN * (pixels + 1)
        self.dying = F.normalize(into_hidden.float(), dim=0)
        own = torch.Generator().manual_seed(seed)
        self.parts = torch.randint(PAIRS, self.push.shape, generator=own)  # of coordinates

    def logits(self, model: Tensor, x: Tensor) -> Tensor:
        parts = model.split([torch.Size(shape).numel() for shape in self.shapes])
        w1, b1, w2, b2 = (part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
        return F.linear(F.linear(x.flatten(1), w1, b1).relu(), w2, b2)

    def honest(self, client: int, version: int | None = None) -> Tensor:
        model = self.server.model if version is None else self.server.model_at(version)
        model = model.clone().requires_grad_()
        own = self.samples[client]
        x, y = self.data.train(own[torch.randint(len(own), (BATCH,), generator=self.random)])
        return torch.autograd.grad(F.cross_entropy(self.logits(model, x), y), model)[0]

    def length(self) -> float:
        return float(self.lengths.median())

    def noise(self) -> Tensor:
        return F.normalize(torch.randn(self.push.shape, generator=self.random), dim=0)

    def of_victims(self) -> Tensor:
        """Mean of the victims' gradients."""
        return torch.stack([self.honest(victim) for victim in self.victims]).mean(0)

    def errors(self) -> tuple[float, float]:
        """(of all test images, of the victims' class)"""
        wrong = self.logits(self.server.model, self.data.inputs(self.data.test_x)).argmax(1) != self.data.test_y
        return float(wrong.double().mean()), float(wrong[self.data.test_y == VICTIM].double().mean())


Adversary = Callable[[Fleet, int], Iterator[Tensor]]  # the uploads of one arrival, each submitted before the next


def nobody(fleet: Fleet, client: int) -> Iterator[Tensor]:
    yield fleet.honest(client)


def push(fleet: Fleet, client: int) -> Iterator[Tensor]:
    yield fleet.length() * fleet.push


def decoy(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """At every second arrival a push, then noise. Both far too long: it needs to know nothing."""
    if float(torch.rand((), generator=fleet.random)) < 0.5:
        yield 1e6 * fleet.push
        yield 1e6 * fleet.noise()


def pace_cancel(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """In some epochs two pushes at full pace, and their opposites at a small one: averaged over uploads they cancel."""
    if float(torch.rand((), generator=fleet.random)) < 0.3:
        for sign in (1, 1, -1, -1):
            yield sign * fleet.length() * fleet.push


def repent(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """A push while the server gives it weight, an honest gradient while it does not."""
    weight = float(fleet.server.weights()[client]) * CLIENTS
    yield fleet.length() * fleet.push if weight > 0.5 else fleet.honest(client)


def behind(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """A push of .8 median norms behind an honest gradient."""
    yield fleet.honest(client) + 0.8 * fleet.length() * fleet.push


def shifts(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """Fifteen pushes after 25 honest uploads, again and again; each attacker at another time."""
    turn = int(fleet.arrivals[client]) + 4 * client
    yield fleet.length() * fleet.push if turn % 40 >= 25 else fleet.honest(client)


def oppose(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """Framing: .7 of the opposite of the victims' gradient, the rest a vector of the attacker's own. The victims have
    more opponents than kin."""
    against, own = -F.normalize(fleet.of_victims(), dim=0), fleet.private[client]
    own = F.normalize(own - (own @ against) * against, dim=0)
    yield fleet.length() * (0.7 * against + 0.51**0.5 * own)


def imitate(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """Framing: the victims' gradient. Their group becomes too large."""
    yield fleet.of_victims()


def _lost(fleet: Fleet, client: int) -> bool:
    """Whether the server has left this attacker out. Then it comes anew."""
    out = fleet.server.left_out()
    gone = out is not None and bool(out[client])
    fleet.since[client] = 1 if gone else fleet.since[client] + 1
    return gone


def fresh(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """A push once three uploads are past. When it has lost its weight it comes back under a fresh number."""
    if _lost(fleet, client):
        fleet.server.forget(client)
    yield fleet.length() * fleet.push if fleet.since[client] > 3 else fleet.honest(client)


def reconnect(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """A push. When it has lost its weight it leaves and comes back."""
    if _lost(fleet, client):
        fleet.server.leave(client)
    yield fleet.length() * fleet.push


def sleeper(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """Honest for twenty uploads, then hidden units die."""
    yield fleet.length() * fleet.dying if fleet.arrivals[client] > 20 else fleet.honest(client)


def scatter(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """Five pairs: each kills hidden units by coordinates of its own, in new noise at each upload."""
    pair = sorted(fleet.malicious).index(client) % PAIRS
    part = F.normalize(torch.where(fleet.parts == pair, fleet.dying, 0), dim=0)
    yield fleet.length() * (0.6 * part + 0.8 * fleet.noise())


def absent(fleet: Fleet, client: int) -> Iterator[Tensor]:
    """Four pushes in a row. When it has lost its weight it is silent until its uploads count no more."""
    if fleet.quiet[client]:
        fleet.quiet[client] -= 1
    elif _lost(fleet, client):
        fleet.quiet[client] = 12
    else:
        yield from [fleet.length() * fleet.dying] * 4


ADVERSARIES: dict[str, Adversary] = {
    each.__name__: each
    for each in (
        *(nobody, push, decoy, pace_cancel, repent, behind, shifts, oppose, imitate, fresh, reconnect),
        *(sleeper, scatter, absent),
    )
}


def run(settings: dict, adversary: Adversary, rounds: int, seed: int, degree: float) -> tuple[float, ...]:
    """(mean error of the second half, error at the end, mean error of the victims' class in the second half)

    A submission is a round, whether it moves the model or not.
    """
    fleet = Fleet(settings, seed, degree)
    errors, done, every = [], 0, max(1, rounds // 40)
    while done < rounds:
        client = int(torch.randint(CLIENTS, (), generator=fleet.random))
        fleet.arrivals[client] += 1
        if client in fleet.malicious and adversary is not nobody:
            uploads = ((update, fleet.server.version) for update in adversary(fleet, client))
        else:
            version = max(0, fleet.server.version - int(torch.randint(STALENESS + 1, (), generator=fleet.random)))
            update = fleet.honest(client, version)
            fleet.lengths[client] = update.norm()
            uploads = iter([(update, version)])
        for update, version in uploads:
            fleet.server.submit(client, update, version)
            done += 1
            if done % every == 0:
                errors.append(fleet.errors())
    late, of_class = (fmean(values) for values in zip(*errors[len(errors) // 2 :], strict=True))
    return late, errors[-1][0], of_class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--degree", type=float, default=0.5)
    given = parser.parse_args()
    print(f"{given.rounds} rounds, seeds 0 to {given.seeds - 1}, degree {given.degree}; torch {torch.__version__}")
    print("test error: mean of the second half / end / mean of the second half in the class of the victims\n")
    print(f"| | {' | '.join(SERVERS)} |\n|---|{'---|' * len(SERVERS)}")
    for name, adversary in ADVERSARIES.items():
        cells = []
        for settings in SERVERS.values():
            found = [run(settings, adversary, given.rounds, seed, given.degree) for seed in range(given.seeds)]
            cells.append(" / ".join(f"{fmean(numbers):.3f}" for numbers in zip(*found, strict=True)))
        print(f"| {name.replace('_', '-')} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
