"""A pooled Q by NumPy alone: every factor that was ever recorded, and what may follow from it."""

import math

import numpy as np
import torch

from secureafl_ext import SecureAFL
from secureafl_ext.config import EXACT

PAPER = {"factors": "pooled", "on_reject": "step", "store": "all", "expiry": None, "probation": 0}
LEAST, MOST, STEP = 2.0**-64, 2.0**64, 2.0**-12


def upper_edge(factor: float) -> float:
    """The next of 4096 steps per power of two above a factor; inf above the largest step."""
    bounded = min(max(factor, LEAST), MOST * (1 - STEP / 2))
    step = math.ldexp(STEP, math.frexp(bounded)[1] - 1)
    edge = (math.floor(bounded / step) + 1) * step
    return edge if edge < MOST else math.inf


class Sorted:
    """Numbers that grow in number, and how many of them lie below another."""

    def __init__(self):
        self.old, self.new = np.empty(0), []

    def add(self, numbers: list[float]) -> None:
        self.new += numbers
        if len(self.new) > 300:
            self.old, self.new = self.all(), []

    def all(self) -> np.ndarray:
        return np.sort(np.concatenate([self.old, self.new]))

    def below(self, number: float) -> int:
        return int(self.old.searchsorted(number)) + sum(one < number for one in self.new)


class Everything:
    """All factors. exact: the number of the first ones that a server keeps as they are"""

    def __init__(self, quantile: float, exact: int = EXACT, factors: np.ndarray | None = None):
        self.quantile, self.exact, self.count = quantile, exact, 0
        self.factors, self.first, self.edges = Sorted(), Sorted(), Sorted()
        if factors is not None:
            self.add(factors.tolist())

    def add(self, factors: list[float]) -> None:
        more = max(0, self.exact - self.count)
        self.factors.add(factors)
        self.first.add(factors[:more])
        self.edges.add([upper_edge(factor) for factor in factors[more:]])
        self.count += len(factors)

    def steep(self, factor: float) -> bool:
        """By all factors as they were."""
        return self.factors.below(factor) > self.most()

    def rounded_steep(self, factor: float) -> bool:
        """By the first ones, and the upper edges of the others."""
        return self.first.below(factor) + self.edges.below(math.nextafter(factor, math.inf)) > self.most()

    def most(self) -> int:
        return math.floor(self.count * self.quantile)

    def threshold(self) -> float:
        return float(self.factors.all()[self.most()]) if self.most() < self.count else math.inf

    def check(self, factor: float, steep: bool) -> bool:
        """Whether the verdict is that of all factors. Otherwise a slightly smaller factor would have been accepted."""
        assert steep == self.rounded_steep(factor), (factor, self.count)
        if steep == self.steep(factor):
            return True
        assert not steep and self.count > self.exact
        assert not LEAST <= factor < MOST or not self.steep(factor * (1 - STEP)), (factor, self.count)
        return False


class Toggle:
    """Uploads whose factors a test chooses: a client's update and model are far apart, near, far apart.."""

    def __init__(self, server: SecureAFL):
        self.server, self.device = server, server.models.device
        for client in (~server.seen).nonzero()[:, 0].tolist():
            self.send(client, 0.0, 0.0)
        self.far = [bool(server.last(self.number(client))[1].any()) for client in range(server.clients)]

    def number(self, client: int) -> torch.Tensor:
        return torch.tensor([client], device=self.device)

    def send(self, client: int, update: float, model: float):
        size = self.server.models.shape[1]
        given = torch.zeros(2, size, dtype=self.server.dtype)
        given[:, 0] = torch.tensor([update, model])
        return self.server.enqueue(self.number(client), *given.to(self.device))

    def next(self, client: int, update: float, model: float):
        """The receipt of a round with factor update / model, or the one of the client's round before."""
        self.far[client] = not self.far[client]
        return self.send(client, *((update, model) if self.far[client] else (0.0, 0.0)))


def play(server: SecureAFL, everything: Everything, sizes: np.ndarray, looks: int = 0) -> tuple[int, int]:
    """(rejected, verdicts that all factors as they were would not give). sizes: (rounds, 2), of update and model

    looks: every so many rounds the threshold is compared
    """
    toggle, rejected, other = Toggle(server), 0, 0
    for i, (update, model) in enumerate(sizes.tolist()):
        receipt = toggle.next(i % server.clients, update, model)
        factor, steep = float(receipt.factor), not receipt.accepted
        rejected += steep
        other += not everything.check(factor, steep)
        everything.add([factor])
        if looks and i % looks == 0:
            exact, ours = everything.threshold(), float(server.threshold())
            assert exact <= ours <= exact * (1 + STEP) or not LEAST <= exact < MOST, (exact, ours)
            assert not everything.rounded_steep(ours)
            assert math.isinf(ours) or everything.rounded_steep(np.nextafter(ours, np.inf))
    return rejected, other


def with_factors(state: dict, factors: np.ndarray) -> dict:
    """The state of an earlier version that has recorded these: one list of all, twice as long as needed."""
    listed = np.concatenate([factors, np.full(len(factors), np.inf)])
    older = {name: value for name, value in state.items() if name != "factor_counts"}
    older |= {"factors": torch.from_numpy(listed)[None], "recorded": torch.tensor([len(factors)])}
    return {**older, "version": max(state["version"], len(factors))}
