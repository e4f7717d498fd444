"""Sageflow: an entropy filter on trusted samples, and steps that shrink with staleness."""

import math

import torch
from torch import Tensor

from .base import Arrival, Trusted, Verdict, need

MODES, CANDIDATES = ("literal", "anchored"), ("current", "trained")


class Sageflow:
    """Rejects an update if its model has a high entropy on the trusted samples. The step shrinks with staleness.

    threshold: largest entropy for ten classes; scaled by ln classes / ln 10 for others
    warmup: rounds without the filter. An untrained model has entropy ln classes, so that nothing would pass
    mode: "literal" has no weight by loss, because it cancels in a group of one update; "anchored" weighs the update's
    model against the current model by loss ** -delta. The spec's third mode, a window of updates, is not implemented
    candidate: the update is applied to the "current" model or to the model it was "trained" on
    """

    REASONS = ("accepted", "accepted: warm-up", "rejected: entropy not below the threshold")

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
        need(threshold > 0, "Sageflow", "threshold", "positive", threshold)
        need(classes >= 2, "Sageflow", "classes", "2 or more", classes)
        need(warmup >= 0, "Sageflow", "warmup", "0 or more", warmup)
        need(mode in MODES, "Sageflow", "mode", f"one of {', '.join(MODES)}", mode)
        need(candidate in CANDIDATES, "Sageflow", "candidate", f"one of {', '.join(CANDIDATES)}", candidate)
        self.trusted, self.mode, self.candidate = trusted, mode, candidate
        self.bound = threshold * math.log(classes) / math.log(10)
        self.delta, self.decay, self.warmup = delta, decay, warmup
        self.rounds = torch.zeros((), dtype=torch.int64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        start = arrival.model if self.candidate == "current" else arrival.trained_on
        loss, entropy = (x.detach().double() for x in self.trusted.evaluate(start - arrival.lr * arrival.update))
        sure = entropy < self.bound  # False for NaN
        warm = self.rounds < self.warmup
        self.rounds += 1
        step = arrival.update * (arrival.staleness + 1) ** -self.decay
        if self.mode == "anchored":
            now, _ = self.trusted.evaluate(arrival.model)
            step = step * 2 / (1 + (loss / now.detach().double()) ** self.delta)
        reason = torch.where(warm, 1, 2 * (~sure).long())
        return Verdict(step, arrival.finite & (sure | warm), entropy, reason)
