"""Kardam: a Lipschitz filter, a frequency filter, and steps that shrink with staleness."""

import torch
from torch import Tensor

from .. import ops
from .base import Arrival, Verdict, need

# Factor of the step by staleness () and decay.
DAMPENING = {
    "off": lambda staleness, decay: torch.ones_like(staleness),
    "exp": lambda staleness, decay: torch.exp(-decay * staleness),
    "inverse": lambda staleness, decay: 1 / (1 + staleness),
}
FREQUENCIES = ("off", "lenient", "strict")


class Kardam:
    """Rejects an update if its Lipschitz coefficient against the last applied gradient is above a quantile of the
    clients' own coefficients.

    malicious: f. Default: a fifth of the clients. The original requires clients > 3 f; here any f runs
    quantile: of the clients' largest coefficients. Default: (n - f) / n. Between two neighbours it takes the lower: a
    mean would let in one huge coefficient of a malicious client
    frequency: "strict" rejects the clients of the last 2 f accepted updates, "lenient" those with f of them
    patience: after this many rejections in a row one update passes. Default: the number of clients
    """

    REASONS = (
        "accepted",
        "accepted: as many rejections in a row as patience allows",
        "rejected: coefficient above the quantile of the clients' own",
        "rejected: client among the last accepted too often",
    )

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        malicious: int | None = None,
        quantile: float | None = None,
        kept: int = 25,  # coefficients per client, first in first out; the official code never evicts the maximum
        patience: int | None = None,
        frequency: str = "off",  # the paper's numbers match the Lipschitz filter alone
        dampening: str = "exp",
        decay: float = 0.2,
    ):
        self.malicious = round(0.2 * clients) if malicious is None else malicious
        self.quantile = (clients - self.malicious) / clients if quantile is None else quantile
        self.patience = clients if patience is None else patience
        need(0 <= self.malicious <= clients, "Kardam", "malicious", f"0 to {clients}", malicious)
        need(0 <= self.quantile <= 1, "Kardam", "quantile", "between 0 and 1", quantile)
        need(kept >= 1, "Kardam", "kept", "1 or more", kept)
        need(self.patience >= 1, "Kardam", "patience", "1 or more", patience)
        need(frequency in FREQUENCIES, "Kardam", "frequency", f"one of {', '.join(FREQUENCIES)}", frequency)
        need(dampening in DAMPENING, "Kardam", "dampening", f"one of {', '.join(DAMPENING)}", dampening)
        self.frequency, self.dampening, self.decay = frequency, dampening, decay

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        # With zeros, the first coefficient is |g| / |w|.
        self.applied, self.applied_at = torch.zeros_like(model), torch.zeros_like(model)
        self.last_updates, self.last_models = (zeros(clients, len(model), dtype=model.dtype) for _ in range(2))
        self.seen, self.pushed = zeros(clients, dtype=torch.bool), zeros(clients)
        self.coefficients = zeros(clients, kept, dtype=torch.float64).fill_(-torch.inf)
        self.rejections, self.accepted = zeros(), zeros()
        self.recent = zeros(2 * self.malicious) - 1  # clients of the last accepted updates; -1: none

    def judge(self, arrival: Arrival) -> Verdict:
        self._learn(arrival)
        factor = ops.lipschitz(arrival.update, self.applied, arrival.model, self.applied_at)
        smooth = self._smooth(factor)
        rare = ~self._frequent(arrival.client)
        accepted = arrival.finite & rare & (smooth | (self.rejections >= self.patience))
        self._remember(arrival, accepted)
        # Only the Lipschitz filter can reject for ever, so only its rejections count.
        self.rejections.copy_(torch.where(accepted, 0, self.rejections + (arrival.finite & ~smooth)))
        reason = torch.where(accepted, (~smooth).long(), torch.where(rare, 2, 3))
        damped = arrival.update * DAMPENING[self.dampening](arrival.staleness, self.decay)
        return Verdict(damped, accepted, factor, reason)

    def forget(self, client: int) -> None:
        self.seen[client], self.pushed[client] = False, 0
        self.coefficients[client] = -torch.inf
        self.recent[self.recent == client] = -1

    def _learn(self, arrival: Arrival) -> None:
        """Record the client's own coefficient. An upload on the same model as its last one is ignored, as in the
        original."""
        i, update, trained_on = arrival.client, arrival.update, arrival.trained_on
        last_update, last_model, seen, pushed, row = (
            rows.index_select(0, i)
            for rows in (self.last_updates, self.last_models, self.seen, self.pushed, self.coefficients)
        )  # (1, d), (1, d), (1), (1), (1, kept)
        moved = (trained_on != last_model).any()
        own = ops.lipschitz(update, last_update[0], trained_on, last_model[0])
        push = arrival.finite & seen & moved & own.isfinite()
        slot = (pushed % row.shape[1])[:, None]
        replace = arrival.finite & (moved | ~seen)
        for rows, new in (
            (self.coefficients, row.scatter(1, slot, torch.where(push, own, row.gather(1, slot)))),
            (self.pushed, pushed + push),
            (self.last_updates, torch.where(replace, update, last_update)),
            (self.last_models, torch.where(replace, trained_on, last_model)),
            (self.seen, seen | arrival.finite),
        ):
            rows.index_copy_(0, i, new)

    def _smooth(self, factor: Tensor) -> Tensor:
        """Whether the factor is at most the quantile of the clients' largest coefficients; true while there is none."""
        bound = lower_quantile(self.coefficients.amax(1), self.quantile)
        return (factor <= bound) | (bound == torch.inf)

    def _frequent(self, client: Tensor) -> Tensor:
        """() bool: whether the client (1) had too many of the last accepted updates."""
        times = (self.recent == client).sum()
        if self.frequency == "off" or self.malicious == 0:  # without f, "lenient" would reject every update
            return torch.zeros_like(times, dtype=torch.bool)
        return times > 0 if self.frequency == "strict" else times + 1 > self.malicious

    def _remember(self, arrival: Arrival, accepted: Tensor) -> None:
        """Store the applied gradient before dampening; the official code mixes both scales, as its comment says."""
        self.applied.copy_(torch.where(accepted, arrival.update, self.applied))
        self.applied_at.copy_(torch.where(accepted, arrival.model, self.applied_at))
        if len(self.recent):
            slot = (self.accepted % len(self.recent)).reshape(1)
            self.recent.scatter_(0, slot, torch.where(accepted, arrival.client, self.recent.gather(0, slot)))
        self.accepted += accepted


def lower_quantile(worst: Tensor, quantile: float) -> Tensor:
    """(): the quantile of the values (n) that are not -inf, between two neighbours the lower; inf if there are none."""
    known = worst > -torch.inf
    ranked = torch.where(known, worst, torch.inf).sort().values
    place = ((known.sum() - 1).double() * quantile).clamp(min=0).long()
    return ranked.gather(0, place.reshape(1))[0]
