"""AsyncDefender, reduced: each update is weighted by its cosine to a reference."""

import torch
from torch import Tensor

from .base import Arrival, Verdict, cosine, need, norm

WEIGHTS = {"positive": lambda cosine: cosine.clamp(min=0), "shifted": lambda cosine: (1 + cosine) / 2}
REFERENCES = ("ema", "last", "model")


class AsyncDefender:
    """A cosine-weighted baseline after AsyncDefender, without its reviewers. It does not reproduce the original.

    An update is clipped to the running mean of the accepted norms and weighted by its cosine to the reference.
    reference: "ema", the moving average of the applied steps; "last", the last step; "model", the current model, as the
    paper words it
    warmup: the first updates, this many, have weight 1 and are clipped to max_norm. Default: the number of clients
    credibility: multiply the weight by the running share of the client's updates with a positive cosine, 1 at first
    """

    REASONS = (
        "accepted: weighted by cosine (reduced AsyncDefender)",
        "accepted: warm-up (reduced AsyncDefender)",
        "rejected: cosine not positive (reduced AsyncDefender)",
    )

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        momentum: float = 0.9,
        weight: str = "positive",
        reference: str = "ema",
        max_norm: float = 50.0,
        warmup: int | None = None,
        credibility: bool = False,
    ):
        need(0 <= momentum < 1, "AsyncDefender", "momentum", "0 or more, below 1", momentum)
        need(weight in WEIGHTS, "AsyncDefender", "weight", f"one of {', '.join(WEIGHTS)}", weight)
        need(reference in REFERENCES, "AsyncDefender", "reference", f"one of {', '.join(REFERENCES)}", reference)
        need(max_norm > 0, "AsyncDefender", "max_norm", "positive", max_norm)
        self.momentum, self.weight, self.reference, self.max_norm = momentum, weight, reference, max_norm
        self.warmup = clients if warmup is None else warmup
        need(self.warmup >= 1, "AsyncDefender", "warmup", "1 or more", warmup)
        self.credibility = credibility
        self.direction = torch.zeros_like(model)  # of the applied steps
        self.length = torch.zeros((), dtype=torch.float64, device=model.device)  # mean of accepted norms; 0: none yet
        self.credible = torch.ones(clients, dtype=torch.float64, device=model.device)
        self.taken = torch.zeros((), dtype=torch.int64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        alike = cosine(arrival.update, arrival.model if self.reference == "model" else self.direction)
        warm = self.taken < self.warmup
        weight = WEIGHTS[self.weight](alike)
        if self.credibility:
            before = self.credible.index_select(0, arrival.client)
            share = torch.where(arrival.finite & ~warm, 0.9 * before + 0.1 * (alike > 0).double(), before)
            self.credible.index_copy_(0, arrival.client, share)
            weight = weight * share[0]
        weight = torch.where(warm, 1.0, weight)
        accepted = arrival.finite & (weight > 0)

        length = norm(arrival.update)
        cap = torch.where(warm, self.max_norm, self.length)
        step = arrival.update * (weight * (cap / length).clamp(max=1))
        self.taken += arrival.finite
        self._remember(step, length.clamp(max=self.max_norm), accepted)
        return Verdict(step, accepted, alike, torch.where(accepted, warm.long(), 2))

    def forget(self, client: int) -> None:
        self.credible[client] = 1

    def _remember(self, step: Tensor, length: Tensor, accepted: Tensor) -> None:
        """Update the mean direction and the mean norm if the update is accepted.

        length: () the norm before the cap, otherwise the mean could only fall; at most max_norm, otherwise one update
        could raise it without bound
        """
        keep = 0.0 if self.reference == "last" else self.momentum
        direction = keep * self.direction + (1 - keep) * step
        self.direction.copy_(torch.where(accepted, direction, self.direction))
        mean = torch.where(self.length > 0, self.momentum * self.length + (1 - self.momentum) * length, length)
        self.length.copy_(torch.where(accepted, mean, self.length))
