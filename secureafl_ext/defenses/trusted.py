"""The rules that judge an update by clean samples of the server's own."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Arrival, Verdict, cosine, dot, need, norm


@dataclass(frozen=True)
class Trusted:
    """What a server with clean samples of its own can ask of them, at a flat model (d)."""

    gradient: Callable[[Tensor], Tensor]  # (d)
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]]  # mean loss (), mean entropy of the predictions in nats ()


MODES, CANDIDATES = ("literal", "anchored"), ("current", "trained")
TESTS = ("norm", "cosine")


class Sageflow:
    """Rejects an update whose model is unsure of the trusted samples; shortens the step with staleness.

    threshold: on the entropy for ten classes, scaled by ln classes / ln 10
    warmup: rounds without the filter; a model that knows nothing yet has entropy ln classes and nothing would pass
    mode: "literal" has no weight by loss, which cancels in a group of one; "anchored" weighs the update's model against
    the current one by loss ** -delta. The third of the spec, groups of a window of updates, is left out.
    candidate: the update's model starts at the "current" one or at the one "trained" on
    """

    WORDS = ("accepted", "accepted: warm-up", "rejected: entropy not below the threshold")

    def __init__(
        self,
        model: Tensor,
        clients: int,
        trusted: Trusted,
        *,
        threshold: float = 1.0,
        classes: int = 10,
        delta: float = 1.0,
        decay: float = 0.5,  # lambda
        warmup: int = 200,
        mode: str = "literal",
        candidate: str = "current",
    ):
        need(classes >= 2, "Sageflow", "classes", "2 or more", classes)
        need(mode in MODES, "Sageflow", "mode", f"one of {', '.join(MODES)}", mode)
        need(candidate in CANDIDATES, "Sageflow", "candidate", f"one of {', '.join(CANDIDATES)}", candidate)
        self.trusted, self.mode, self.candidate = trusted, mode, candidate
        self.bound = threshold * math.log(classes) / math.log(10)
        self.delta, self.decay, self.warmup = delta, decay, warmup
        self.rounds = torch.zeros((), dtype=torch.int64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        start = arrival.model if self.candidate == "current" else arrival.trained_on
        loss, entropy = (x.detach().double() for x in self.trusted.evaluate(start - arrival.lr * arrival.update))
        sure = entropy < self.bound  # so a NaN is not
        warm = self.rounds < self.warmup
        self.rounds += 1
        step = arrival.update * (arrival.staleness + 1) ** -self.decay
        if self.mode == "anchored":
            now, _ = self.trusted.evaluate(arrival.model)
            step = step * 2 / (1 + (loss / now.detach().double()) ** self.delta)
        reason = torch.where(warm, 1, 2 * (~sure).long())
        return Verdict(step, arrival.finite & (sure | warm), entropy, reason)


class Zeno:
    """Zeno++: rescales an update to the length of a trusted gradient and takes it if it promises descent there.

    rho, eps: 0 is the paper's reading, a cosine not below 0; in general cosine >= rho / lr - eps / |v|^2
    every: k, rounds between two trusted gradients
    The length in the penalty is that after rescaling, as in the paper; the official code has the one before.
    """

    WORDS = ("accepted: rescaled", "rejected: score too low against the trusted gradient")

    def __init__(
        self, model: Tensor, clients: int, trusted: Trusted, *, rho: float = 0.0, eps: float = 0.0, every: int = 10
    ):
        need(every >= 1, "Zeno++", "every", "1 or more", every)
        self.trusted, self.rho, self.eps, self.every = trusted, rho, eps, every
        self.reference = torch.zeros_like(model)  # v_s

    def judge(self, arrival: Arrival) -> Verdict:
        if arrival.refresh:
            self.reference.copy_(self.trusted.gradient(arrival.model).detach())
        length = norm(self.reference)
        scale = length / norm(arrival.update)
        score = arrival.lr * scale * dot(self.reference, arrival.update) - self.rho * length**2
        accepted = arrival.finite & (score >= -arrival.lr * self.eps)  # a zero update has score NaN: not accepted
        return Verdict(arrival.update * scale, accepted, score, (~accepted).long())


class AFLGuard:
    """Takes an update that lies within `radius` times a trusted gradient's length of that gradient.

    radius: lambda; above 1 a short update against the gradient passes too. 1.5 is recalled, not read
    test: "cosine" is the paper's wording, any positive cosine
    every: rounds between two trusted gradients
    """

    WORDS = ("accepted", "rejected: too far from the trusted gradient")

    def __init__(
        self,
        model: Tensor,
        clients: int,
        trusted: Trusted,
        *,
        radius: float = 1.5,
        test: str = "norm",
        every: int = 1,
    ):
        need(radius >= 0, "AFLGuard", "radius", "0 or more", radius)
        need(test in TESTS, "AFLGuard", "test", f"one of {', '.join(TESTS)}", test)
        need(every >= 1, "AFLGuard", "every", "1 or more", every)
        self.trusted, self.radius, self.test, self.every = trusted, radius, test, every
        self.reference = torch.zeros_like(model)  # g_s

    def judge(self, arrival: Arrival) -> Verdict:
        if arrival.refresh:
            self.reference.copy_(self.trusted.gradient(arrival.model).detach())
        if self.test == "norm":
            away, length = norm(arrival.update - self.reference), norm(self.reference)
            factor, near = away / length, away <= self.radius * length
        else:
            factor = cosine(arrival.update, self.reference)
            near = factor > 0
        accepted = arrival.finite & near
        return Verdict(arrival.update, accepted, factor, (~accepted).long())
