"""RowWise: the aggregate of a rule that weighs whole rows: inner products, weights, one weighted sum."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..config import Config
from ..rules.kinship import Kinship
from ..rules.registry import check_weights
from ..rules.row_rules import MAX_SQUARE, WEIGHTS, bucketed, clip_to, median_of, row_norms
from ..rules.sums import inner
from ..rules.support import Support
from .history import History

AT_THE_CAP = 1 - 1e-5  # a correction with this share of the largest allowed norm was capped, up to rounding
AVERAGED: dict[str, type[Kinship] | type[Support]] = {"kinship": Kinship, "support": Support}


def refresh_rounds(clients: int) -> int:
    """Rounds between two refreshes of rule="support". A client uploads about twice meanwhile, and each time its
    averages change by a fiftieth. A refresh takes n^3 operations, so a round takes n^2."""
    return 2 * clients


class Arrival(NamedTuple):
    """An update that has been judged."""

    client: Tensor  # (1) int64
    update: Tensor  # (d), clipped at first contact
    along: Tensor  # (n) float64, inner products with the clients' last updates; 0 without one
    square: Tensor  # () float64, squared norm of the update
    taken: Tensor  # () bool, whether it takes part in this round
    stored: Tensor  # () bool, whether it takes part in later ones
    steps: Tensor  # () bool, whether the model will step


class RowWise:
    """The rows are the estimates of all other seen clients, and the update if it takes part.

    products: (n, n) float64 inner products of the clients' last updates
    centre: (d) the last aggregate, for centered_clip    rounds: () int64, number of rounds, for buckets

    Without corrections (memory=0 or trust=0) the estimates are the last updates. A round replaces one of them: the
    history is the stack of rows, and one matrix-vector product updates `products`. With corrections all rows change in
    every round, so that rows and products are computed from scratch: the slow case.
    """

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        check_weights(config, device)
        self.config = config
        self.products = torch.zeros(clients, clients, dtype=torch.float64, device=device)
        self.centre = torch.zeros(size, dtype=config.dtype, device=device)
        self.rounds = torch.zeros((), dtype=torch.int64, device=device)
        averaged = AVERAGED.get(config.rule)
        self.similarity = averaged(clients, device) if averaged else None
        self.every = refresh_rounds(clients)

    def tensors(self) -> dict[str, Tensor]:
        own = {"products": self.products, "centre": self.centre, "rounds": self.rounds}
        return {**own, **(self.similarity.tensors() if self.similarity else {})}

    def forget(self, client: int) -> None:
        self.products[client] = self.products[:, client] = 0
        if self.similarity:
            self.similarity.forget(client)

    def aggregate(
        self, arrival: Arrival, model: Tensor, history: History, present: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(the direction to step along (d), the status of each client's correction (n), the weight of the update before
        clipping to the median norm () float64). Call before history.remember.

        present: (n) bool, clients that count
        """
        client, update, along, square, taken, stored, steps = arrival
        used = taken | stored  # otherwise zeros: NaN * 0 is NaN, so a row that is not finite would spoil the sums
        update, along, square = (torch.where(used, value, 0) for value in (update, along, square))
        corrected = self.config.memory > 0 and self.config.trust > 0
        rows = self._estimates(model, history) if corrected else history.last_updates  # (n, d)
        products = inner(rows, rows) if corrected else self.products
        products = _replaced(products, client, inner(rows, update) if corrected else along, square)
        mask = present.index_copy(0, client, taken[None]) & (products.diagonal() <= MAX_SQUARE)
        clip, similarity = None, self.similarity
        if similarity:
            norms = products.diagonal().sqrt()
            # Of all clients that count, also those that past_probation and kept leave out below: attackers who upload
            # often are the first past it, and may be most of the kept.
            median_norm = median_of(norms, mask)
            clip = clip_to(norms, median_norm)
            # Similarity compares the updates that were sent, not their estimates.
            last_norms = row_norms(history.last_updates) if corrected else self.products.diagonal().sqrt()
            known = history.seen.index_select(0, client) & stored
            if isinstance(similarity, Kinship):
                mask = similarity.past_probation(mask)
            similarity.update_similarity(client, along, square.sqrt(), last_norms, median_norm, known)
            if isinstance(similarity, Kinship):
                mask = similarity.kept(mask)
                similarity.update_center(steps)
        weights, of_centre = self._weights(products, mask, rows, client, update)
        if not corrected:  # only now: a registered rule may have raised an error
            self.products.copy_(torch.where(stored, products, self.products))
        weight = weights.index_select(0, client)[0]
        weights = weights.to(rows.dtype)
        if clip is not None:
            weights *= clip
        own, others = weights.index_select(0, client), weights.index_fill(0, client, 0)
        received_only = self.config.step == "received"
        direction = own * mask.sum() * update if received_only else others @ rows + own * update
        if of_centre is not None:
            direction += of_centre.to(rows.dtype) * self.centre
            self.centre.copy_(torch.where(steps & mask.any() & direction.isfinite(), direction, self.centre))
        self.rounds += 1
        if support := self.refreshed:
            has_row = history.seen.index_select(0, client) | stored  # a first update that is not stored leaves no row
            support.refresh(present.index_copy(0, client, present.index_select(0, client) & has_row))
        status = self._status(client, rows, history, present) if corrected else torch.zeros_like(history.pairs)
        return direction, status, weight

    @property
    def refreshed(self) -> Support | None:
        """rule="support" if the last round refreshes it. Waits for the device."""
        if not isinstance(self.similarity, Support):
            return None
        rounds = int(self.rounds)
        return self.similarity if rounds > 0 and rounds % self.every == 0 else None

    @property
    def refresh_is_due(self) -> bool:
        """Whether the next round refreshes rule="support". Waits for the device."""
        return isinstance(self.similarity, Support) and (int(self.rounds) + 1) % self.every == 0

    def weights(self, model: Tensor, history: History, present: Tensor) -> Tensor:
        """(n) float64: the weights of the clients' rows in a step from this model (d), before clipping to the median
        norm. present: (n) bool, clients that count"""
        corrected = self.config.memory > 0 and self.config.trust > 0
        rows = self._estimates(model, history) if corrected else history.last_updates  # (n, d)
        products = inner(rows, rows) if corrected else self.products
        mask = present & (products.diagonal() <= MAX_SQUARE)
        if isinstance(self.similarity, Kinship):
            mask = self.similarity.kept(self.similarity.past_probation(mask))
        first = torch.zeros(1, dtype=torch.int64, device=rows.device)  # no update arrives: row 0 replaces itself
        return self._weights(products, mask, rows, first, rows[0])[0]

    def _weights(
        self, products: Tensor, mask: Tensor, rows: Tensor, client: Tensor, update: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """float64 weights of the rows (n), and of the centre () or None without one; zeros if no row takes part."""
        c, kept = self.config, mask
        centred = c.rule == "centered_clip"
        if centred:
            centre = self.centre.double()
            along = inner(rows, self.centre).index_copy(0, client, (update.double() @ centre)[None])
            products = torch.nn.functional.pad(products, (0, 1, 0, 1))
            last = torch.full_like(client, len(mask))
            products = _replaced(products, last, torch.nn.functional.pad(along, (0, 1)), centre @ centre)
            kept = torch.nn.functional.pad(mask, (0, 1), value=True)
        gram = torch.where(kept[:, None] & kept, products, 0)  # products of a row above MAX_SQUARE may be NaN
        if c.buckets > 1:
            buckets = bucketed(mask, self.rounds, c.buckets)  # (b, n)
            filled = buckets.any(1)
            if centred:  # the centre is a bucket of its own
                buckets = torch.nn.functional.pad(buckets, (0, 1, 0, 1))
                buckets[-1, -1].fill_(1)  # not `= 1`: that copies from the host, which a CUDA graph cannot capture
            weights = WEIGHTS[c.rule](buckets @ gram @ buckets.T, filled, c) @ buckets
        else:
            support = self.similarity if isinstance(self.similarity, Support) else None
            weights = support.weights(mask) if support else WEIGHTS[c.rule](gram, mask, c)
        weights = torch.where(mask.any(), weights, 0)
        return (weights[:-1], weights[-1]) if centred else (weights, None)

    def _estimates(self, model: Tensor, history: History) -> Tensor:
        estimates = history.estimates(model, self.config.trust)
        return torch.where(estimates.isfinite().all(1, keepdim=True), estimates, history.last_updates)

    def _status(self, client: Tensor, rows: Tensor, history: History, present: Tensor) -> Tensor:
        """(n) indices into ops.STATUS, derived from the estimates: no op returns both."""
        length = row_norms(rows - history.last_updates)
        most = self.config.trust * row_norms(history.last_updates)
        absent, no_pairs, plain, capped, fallback = range(len(ops.STATUS))
        status = torch.where(length == 0, fallback, torch.where(length >= AT_THE_CAP * most, capped, plain))
        status = torch.where(history.pairs > 0, status, no_pairs)
        return torch.where(present, status, absent).index_fill(0, client, absent)


def _replaced(products: Tensor, here: Tensor, others: Tensor, own: Tensor) -> Tensor:
    """(n, n): the inner products after row `here` (1) is replaced. others: (n) products of the new row with the rest
    own: () its square"""
    row = others.index_copy(0, here, own[None])
    return products.index_copy(0, here, row[None]).index_copy(1, here, row[:, None])
