"""LastUpdates: the memory that lets a rule for synchronous rounds run on asynchronous arrivals.

A synchronous rule gets one update of each client at once. Here one update arrives at a time, so the rule gets one row
per client: its last update. Each arrival replaces one row, then the rule aggregates all rows, and the model steps.
"""

import torch
from torch import Tensor

from .. import ops
from ..rules.row_rules import MAX_SQUARE, hash32
from ..rules.sums import inner
from .base import Arrival, Verdict, dot, need

ACCEPTED, NO_WEIGHT, TOO_FEW, TOO_LARGE = range(4)


class LastUpdates:
    """rows: (n, d) last update of each client; zeros if it has none    seen: (n) bool, clients that have one
    products: (n, n) float64, inner products of the rows. One arrival changes one row and one column
    weights: (n) float64, of the rows in the last step; zeros if the rule has none (weighs is False)
    momentum: beta. Above 0, a row is the client's momentum: beta * row + (1 - beta) * update; first update: itself

    No step before more than half of the clients are known: a synchronous rule withstands a minority of its rows, and
    the first arrivals may be malicious. Every stored update counts as accepted, because the model steps along all rows.
    The receipt's factor is the weight of the client's row in the step, and its reason says if that weight is 0.
    """

    weighs = True  # whether judge() returns `weighted`, not `stepped`
    REASONS: tuple[str, ...] = (
        "accepted",
        "accepted: its weight in the step is 0",
        "accepted: too few clients are known for a step",
        "rejected: its norm is too large to compute with",
    )

    def __init__(self, model: Tensor, clients: int, momentum: float = 0.0):
        need(0 <= momentum < 1, type(self).__name__, "momentum", "0 or more, below 1", momentum)
        self.momentum = momentum
        self.rows = torch.zeros(clients, len(model), dtype=model.dtype, device=model.device)
        self.seen = torch.zeros(clients, dtype=torch.bool, device=model.device)
        self.products = torch.zeros(clients, clients, dtype=torch.float64, device=model.device)
        self.weights = torch.zeros(clients, dtype=torch.float64, device=model.device)
        self.nothing = torch.full((), torch.nan, dtype=torch.float64, device=model.device)

    def remember(self, arrival: Arrival) -> Tensor:
        """Store the update as the client's row. Returns () bool: whether it was stored."""
        i, update = arrival.client, arrival.update
        before, seen = self.rows.index_select(0, i)[0], self.seen.index_select(0, i)  # (d), (1)
        stored = arrival.finite & (dot(update, update) <= MAX_SQUARE)  # otherwise products would overflow
        if self.momentum:
            update = torch.where(seen, self.momentum * before + (1 - self.momentum) * update, update)
        self.rows.index_copy_(0, i, torch.where(stored, update, before)[None])
        self.seen.index_copy_(0, i, seen | stored)
        along = inner(self.rows, self.rows.index_select(0, i)[0])  # (n)
        along = torch.where(stored, along, self.products.index_select(0, i)[0])
        self.products.index_copy_(0, i, along[None]).index_copy_(1, i, along[:, None])
        return stored

    def forget(self, client: int) -> None:
        self.rows[client], self.seen[client], self.weights[client] = 0, False, 0
        self.products[client] = self.products[:, client] = 0

    def ready(self) -> Tensor:
        """() bool: whether more than half of the clients are known"""
        return 2 * self.seen.sum() > len(self.seen)

    def weighted(self, arrival: Arrival, stored: Tensor, weights: Tensor) -> Verdict:
        """The verdict of a rule that weighs whole rows. weights: (n) float64"""
        ready = self.ready()
        weights = torch.where(ready, weights, 0)
        self.weights.copy_(torch.where(stored, weights, self.weights))  # no step with a rejected update
        own = weights.index_select(0, arrival.client)[0]
        reason = torch.where(ready, torch.where(own == 0, NO_WEIGHT, ACCEPTED), TOO_FEW)
        return Verdict(weights.to(self.rows.dtype) @ self.rows, stored, own, torch.where(stored, reason, TOO_LARGE))

    def stepped(self, stored: Tensor, step: Tensor, enough: Tensor) -> Verdict:
        """The verdict of a rule without weights. step: (d)    enough: () bool, whether there are rows for a step"""
        enough = enough & self.ready()
        reason = torch.where(enough, ACCEPTED, TOO_FEW)
        return Verdict(torch.where(enough, step, 0), stored, self.nothing, torch.where(stored, reason, TOO_LARGE))


def trimmed_mean(rows: Tensor, trim: int, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinate-wise trimmed mean (d) of the rows (n, d) in mask, and () bool, whether they are more than 2 trim."""
    enough = mask.sum() > 2 * trim
    # With too few rows the op would raise an error on a CPU. It gets all rows, and the result is not used.
    return ops.trimmed_mean(rows, trim, mask | ~enough), enough


def malicious_count(who: str, clients: int, malicious: int | None) -> int:
    """f, checked. None: a fifth of the clients, fewer than half."""
    most = (clients - 1) // 2
    count = min(round(0.2 * clients), most) if malicious is None else malicious
    need(0 <= count <= most, who, "malicious", f"0 to {most}, fewer than half of the clients", malicious)
    return count


def counter_hash(counter: Tensor, size: int, stream: int = 0) -> Tensor:
    """(size) int64 in 0 .. 2^32 - 1, pseudo-random for each counter () int64 and stream.

    A generator would repeat itself at every replay of a CUDA graph. A hash of a counter on the device does not.
    """
    numbers = torch.arange(size, device=counter.device)
    return hash32(hash32(numbers) ^ hash32((counter * 2 + stream) & 0xFFFFFFFF))
