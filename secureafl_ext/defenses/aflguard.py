"""AFLGuard: the distance to a trusted gradient."""

import torch
from torch import Tensor

from .base import Arrival, Trusted, Verdict, cosine, need, norm

TESTS = ("norm", "cosine")


class AFLGuard:
    """Accepts an update if its distance to a trusted gradient is at most `radius` times the gradient's norm.

    radius: lambda. Above 1, a short update against the gradient passes too. The default is from memory of the paper
    test: "norm" as above, or "cosine", the paper's wording: any positive cosine to the gradient passes
    every: rounds between two trusted gradients
    """

    REASONS = ("accepted", "rejected: too far from the trusted gradient")

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
