"""How a round aggregates when its rule weighs whole rows: inner products, weights, one sum."""

import torch
from torch import Tensor

from .. import ops
from ..config import Config
from ..engines.history import History
from .kinship import Kinship
from .row_rules import WEIGHTS, bucketed, median_of, shorten

STRETCH = 2**22  # values made float64 at a time for inner products: no copy of the whole history
LONGEST = 1e300  # a row with a square above takes no part: sums of such squares would leave the float64s
AT_THE_CAP = 1 - 1e-5  # a correction as long as allowed, but for rounding


class RowWise:
    """The rows are the estimates of all other seen clients, and the update if it takes part.

    products: (n, n) float64 inner products of the clients' last updates
    centre: (d) the last aggregate, for centered_clip    rounds: () int64, how many there were, for buckets

    Without corrections (memory=0 or trust=0) the estimates are the last updates, of which a round replaces one: the
    history is the stack of rows, and a matrix-vector product with the new one keeps `products` up to date. With
    corrections all rows move in every round, so stack and products are made anew: the slow case.
    """

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        self.config = config
        self.products = torch.zeros(clients, clients, dtype=torch.float64, device=device)
        self.centre = torch.zeros(size, dtype=config.dtype, device=device)
        self.rounds = torch.zeros((), dtype=torch.int64, device=device)
        self.kinship = Kinship(clients, device) if config.rule == "kinship" else None

    def tensors(self) -> dict[str, Tensor]:
        own = {"products": self.products, "centre": self.centre, "rounds": self.rounds}
        return {**own, **(self.kinship.tensors() if self.kinship else {})}

    def forget(self, client: int) -> None:
        self.products[client] = self.products[:, client] = 0
        if self.kinship:
            self.kinship.forget(client)

    def aggregate(
        self,
        client: Tensor,
        update: Tensor,
        model: Tensor,
        taken: Tensor,
        stored: Tensor,
        steps: Tensor,
        history: History,
    ) -> tuple[Tensor, Tensor]:
        """(the direction to step along (d), the status of each client's correction (n)); before history.remember.

        client: (1) int64    taken, stored: () bool, whether the update takes part in this round, and in those to come
        steps: () bool, whether the model will step along the direction
        """
        update = torch.where(taken | stored, update, 0)  # if not finite, not even to be multiplied by zero
        corrected = self.config.memory > 0 and self.config.trust > 0
        rows = self._estimates(model, history) if corrected else history.last_updates  # (n, d)
        products = inner(rows, rows) if corrected else self.products
        along, square = inner(rows, update), update.double() @ update.double()
        products = _replaced(products, client, along, square)
        mask = history.seen.index_copy(0, client, taken[None]) & (products.diagonal() <= LONGEST)
        if self.kinship:
            if corrected:  # only what was sent tells who sends alike
                along, lengths = inner(history.last_updates, update), row_lengths(history.last_updates)
            else:
                lengths = self.products.diagonal().sqrt()
            norms = products.diagonal().sqrt()
            usual = median_of(norms, mask)  # with those on probation: attackers who upload often are known first
            mask = self.kinship.past_probation(mask)
            known = history.seen.index_select(0, client)
            self.kinship.meet(client, along, square.sqrt(), lengths, usual, known & stored)
            mask = self.kinship.kept(mask)
            self.kinship.settle(steps)
        if not corrected:
            self.products.copy_(torch.where(stored, products, self.products))
        weights, of_centre = self._weights(products, mask, rows, client, update)
        if self.kinship:
            weights *= shorten(norms, usual)  # of all, not of the kept: attackers may be most of these
        own, others = weights.index_select(0, client), weights.index_fill(0, client, 0)
        direction = others @ rows + own * update
        if of_centre is not None:
            direction += of_centre * self.centre
            self.centre.copy_(torch.where(steps & mask.any() & direction.isfinite(), direction, self.centre))
        self.rounds += 1
        status = self._account(client, rows, history) if corrected else torch.zeros_like(history.pairs)
        return direction, status

    def _weights(
        self, products: Tensor, mask: Tensor, rows: Tensor, client: Tensor, update: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Of the rows (n) and of the centre () if there is one, in the rows' dtype; zeros if no row takes part."""
        c, kept = self.config, mask
        centred = c.rule == "centered_clip"
        if centred:
            centre = self.centre.double()
            along = inner(rows, self.centre).index_copy(0, client, (update.double() @ centre)[None])
            products = torch.nn.functional.pad(products, (0, 1, 0, 1))
            last = torch.full_like(client, len(mask))
            products = _replaced(products, last, torch.nn.functional.pad(along, (0, 1)), centre @ centre)
            kept = torch.nn.functional.pad(mask, (0, 1), value=True)
        gram = torch.where(kept[:, None] & kept, products, 0)  # those of a row that is too long may be NaN
        if c.buckets > 1:
            deal = bucketed(mask, self.rounds, c.buckets)  # (b, n)
            taking = deal.any(1)
            if centred:  # is a bucket of its own
                deal = torch.nn.functional.pad(deal, (0, 1, 0, 1))
                deal[-1, -1].fill_(1)  # a number assigned would be copied to the device, which no graph can capture
            weights = WEIGHTS[c.rule](deal @ gram @ deal.T, taking, c) @ deal
        else:
            weights = WEIGHTS[c.rule](gram, mask, c)
        weights = torch.where(mask.any(), weights, 0).to(rows.dtype)
        return (weights[:-1], weights[-1]) if centred else (weights, None)

    def _estimates(self, model: Tensor, history: History) -> Tensor:
        *past, _ = history.tensors().values()
        estimates = ops.estimate(model, *past, self.config.trust)
        return torch.where(estimates.isfinite().all(1, keepdim=True), estimates, history.last_updates)

    def _account(self, client: Tensor, rows: Tensor, history: History) -> Tensor:
        """(n) in terms of ops.STATUS, read off the estimates: no op gives both them and an account of them."""
        length = row_lengths(rows - history.last_updates)
        most = self.config.trust * row_lengths(history.last_updates)
        absent, no_pairs, plain, capped, fallback = range(len(ops.STATUS))
        status = torch.where(length == 0, fallback, torch.where(length >= AT_THE_CAP * most, capped, plain))
        status = torch.where(history.pairs > 0, status, no_pairs)
        return torch.where(history.seen, status, absent).index_fill(0, client, absent)


def row_lengths(rows: Tensor) -> Tensor:
    """(n) float64"""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def inner(rows: Tensor, others: Tensor) -> Tensor:
    """Inner products of rows (n, d) with others (d) or (k, d), in float64: (n) or (n, k)."""
    width = max(1, STRETCH // len(rows))
    pieces = zip(rows.split(width, 1), others.split(width, -1), strict=True)
    return sum(a.double() @ b.double().movedim(-1, 0) for a, b in pieces)


def _replaced(products: Tensor, here: Tensor, others: Tensor, own: Tensor) -> Tensor:
    """Inner products (n, n) with another row at `here` (1): `others` (n) with the rest, `own` () its square."""
    row = others.index_copy(0, here, own[None])
    return products.index_copy(0, here, row[None]).index_copy(1, here, row[:, None])
