"""Zeno++: a score against a trusted gradient."""

import torch
from torch import Tensor

from .base import Arrival, Trusted, Verdict, dot, need, norm


class Zeno:
    """Rescales an update to the norm of a trusted gradient. Accepts it if it promises descent on the trusted samples.

    rho, eps: the test is cosine >= rho / lr - eps / |v|^2. Both 0: the paper's test, a cosine not below 0
    every: k, rounds between two trusted gradients
    The penalty uses the norm after rescaling, as in the paper; the official code uses the norm before.
    """

    REASONS = ("accepted: rescaled", "rejected: score too low against the trusted gradient")

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
        accepted = arrival.finite & (score >= -arrival.lr * self.eps)  # a zero update has score NaN and is rejected
        return Verdict(arrival.update * scale, accepted, score, (~accepted).long())
