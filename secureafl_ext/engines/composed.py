"""Composed: a round from plain ops, one after the other. Supports every device, dtype, rule and setting of pairs."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..config import COUNTS, FIRST, NOT_FINITE, SAME_VERSION, STEEP, Config
from ..rules.kinship import Kinship
from ..rules.registry import BUILT_IN
from ..rules.row_rules import clip_to, row_norms
from ..rules.sums import inner, squared_distance
from .base import Outcome, undo_of
from .history import History
from .presence import Presence
from .quantile import empty_factors, factor_weights, factors_below, forget_factors, most_below, record_factor
from .row_wise import Arrival, RowWise

JUDGED = 5  # number of sums that the verdict depends on: the first of update_sums
# Tensors of a state, by name: a round changes only the client's row of BY_CLIENT, its row and column of BY_PAIR.
BY_CLIENT = (
    *("last_updates", "last_models", "update_sketches", "model_sketches", "dw", "dg"),
    *("factors", "uploads", "mean_updates", "means"),
)
BY_PAIR = ("products", "similarity", "kinship")


class Verdict(NamedTuple):
    """The decision on an update."""

    clip: Tensor  # () factor that clips the update; 1 except at first contact
    factor: Tensor  # () float64, its Lipschitz factor or NaN
    reason: Tensor  # () int64, index into REASONS
    accepted: Tensor  # () bool
    stored: Tensor  # () bool, whether it takes part in later rounds
    steps: Tensor  # () bool, whether the model will step
    taken: Tensor  # () bool, whether it takes part in this round
    pace: Tensor  # () float64, factor of this round's step
    present: Tensor  # (n) bool, clients that count


class Composed:
    """An Engine on the tensors of History."""

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        self.config, self.clients, self.lr = config, clients, config.lr
        self.history = History(config, clients, size, device)
        self.factors, self.recorded, self.factor_counts = empty_factors(config, clients, device)
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.presence = Presence(config, clients, device)
        self.quorum = config.quorum_of(clients)
        self.rows = RowWise(config, clients, size, device) if config.row_wise and not config.averaging else None
        self._clients = torch.arange(clients, device=device).split(1)

    def state(self, device: torch.device | None = None) -> dict[str, Tensor]:
        return {name: tensor.to(device, copy=True) for name, tensor in self._tensors().items()}

    def load(self, state: Mapping[str, Tensor], model: Tensor) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        own = {"factors": self.factors, "recorded": self.recorded, "counts": self.counts, **self.presence.tensors()}
        own |= {"factor_counts": self.factor_counts} if self.config.keeps_all else {}
        return {**own, **self._remembered()}

    def _remembered(self) -> dict[str, Tensor]:
        """The tensors of the state that remember the clients' updates."""
        return {**self.history.tensors(), **(self.rows.tensors() if self.rows else {})}

    @property
    def seen(self) -> Tensor:
        return self.history.seen

    def similarity(self, version: int) -> Tensor | None:
        return self.rows.similarity.means if self.rows and self.rows.similarity else None

    is_whole = True

    @property
    def kinship(self) -> Kinship | None:
        return self.rows.similarity if self.rows and isinstance(self.rows.similarity, Kinship) else None

    @property
    def capturable(self) -> bool:
        """Only with row-wise rules: the op of the coordinate-wise rules takes the client as a number. Not with
        rule="support": its refresh waits for the device, except in the fused op."""
        return self.config.row_wise and self.config.rule != "support"

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        # An error may come after the update has been judged or stored: from too little memory, a registered rule, or a
        # signal's handler, which Python runs between any two lines. Then the round is undone.
        changing = list(self._changing(client))
        if changing:
            changing.append(models[new])
        undo = undo_of(changing)
        try:
            return self._round(client, update, trained_on, models, now, new)
        except BaseException:
            undo()
            raise

    def _changing(self, client: int | Tensor) -> Iterator[Tensor]:
        """Views of all that a round of this client may change, besides the next model."""
        if isinstance(client, Tensor):  # enqueue: a CUDA graph replays every copy, so only those for a rule that fails
            judged = self.factors, self.recorded, self.factor_counts, *self.presence.tensors().values()
            yield from () if self.config.rule in BUILT_IN else judged
            return
        for name, tensor in self._tensors().items():
            whole = tensor.shape[:1] != (self.clients,) or (name in ("dw", "dg") and self.config.pairs == "rounds")
            if name in BY_PAIR:
                yield from (tensor[client], tensor[:, client])
            elif name != "basis":  # only rounds of one op use it
                yield tensor[client] if name in BY_CLIENT and not whole else tensor

    def _round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        model = models[now]
        number = client if isinstance(client, Tensor) else self._clients[client]
        sums = self._sums(number, update, trained_on)
        v = self._decide(number, sums[:JUDGED])
        update, weight = update * v.clip, None
        if not self.config.estimate:
            direction, status = torch.where(v.taken, update, 0), torch.zeros_like(self.history.pairs)
        elif self.rows:
            products = torch.where(v.clip > 0, sums[JUDGED:] * v.clip, 0)  # clip is 0 if the norm overflows
            square = torch.where(v.clip > 0, sums[1] * v.clip * v.clip, 0)
            arrival = Arrival(number, update, products, square, v.taken, v.stored, v.steps)
            direction, status, weight = self.rows.aggregate(arrival, model, self.history, v.present)
        else:
            direction, status = self._aggregate(int(client), update, model, v.taken, v.present)
        if self.config.pairs == "rounds":
            self._push_estimates(number, model, v.steps)
        self.history.remember(number, update, trained_on, v.stored)
        models[new] = self._stepped(model, direction, v)
        capped, fallbacks = ((status == ops.STATUS.index(name)).sum() for name in ("capped", "fallback"))
        self._count(v, capped, fallbacks)
        return Outcome(v.accepted, v.factor, v.reason, weight)

    def _decide(self, client: Tensor, sums: Tensor) -> Verdict:
        """Judge an update of client (1) by its sums (JUDGED), and count it as an upload."""
        clip, factor, reason = self._judge(client, sums)
        accepted, finite = reason <= FIRST, reason != NOT_FINITE
        stored = finite if self.config.store == "all" else accepted
        steps = accepted if self.config.on_reject == "hold" else torch.ones_like(accepted)
        if self.quorum:
            rows = self.seen.sum() + (stored & ~self.seen.index_select(0, client)[0])
            steps = steps & (rows >= self.quorum)
        pace = self.presence.count_upload(client, stored, self.seen)
        present = self.presence.mask(self.seen.index_fill(0, client, True))
        taken = accepted & self.config.receive & present.index_select(0, client)[0]
        return Verdict(clip, factor, reason, accepted, stored, steps, taken, pace, present)

    def _stepped(self, model: Tensor, direction: Tensor, verdict: Verdict) -> Tensor:
        stepped = model - self.lr * verdict.pace * direction
        return torch.where(verdict.steps & stepped.isfinite(), stepped, model)  # a coordinate stays finite

    def _count(self, verdict: Verdict, capped: Tensor, fallbacks: Tensor) -> None:
        accepted, finite = verdict.accepted, verdict.reason != NOT_FINITE
        self.counts += torch.stack([accepted, ~accepted, ~finite, capped, fallbacks])

    def forget(self, client: int) -> None:
        self.history.forget(client)
        self.presence.forget(client)
        forget_factors(self.factors, self.recorded, client)
        if self.rows:
            self.rows.forget(client)

    def estimates(self, model: Tensor) -> Tensor:
        return self.history.estimates(model, self.config.trust) * self.seen[:, None]

    def norms(self, model: Tensor) -> Tensor:
        return row_norms(self.estimates(model))

    def row_weights(self, model: Tensor) -> Tensor | None:
        return self.rows.weights(model, self.history, self.presence.mask(self.seen)) if self.rows else None

    def number_of(self, client: int) -> Tensor:
        return self._clients[client]

    def last_of(self, client: Tensor) -> tuple[Tensor, Tensor]:
        return self.history.of(client)

    def update_sums(self, client: Tensor, update: Tensor, trained_on: Tensor) -> Tensor:
        """(JUDGED, and n more with a row-wise rule) float64: sums over the coordinates, for an update of client (1).

        The first JUDGED: number of coordinates that are not finite; squared norms of the update, of its change since
        the client's last one, and of the change of the model; number of coordinates where the model changed. Then n
        inner products with all clients' last updates.
        """
        last_update, last_model = self.history.of(client)
        bad, moved = (~update.isfinite()).sum().double(), (trained_on != last_model).sum().double()
        changes = squared_distance(update, last_update), squared_distance(trained_on, last_model)
        judged = torch.stack([bad, inner(update[None], update)[0], *changes, moved])
        return torch.cat([judged, inner(self.history.last_updates, update)]) if self.rows else judged

    def _sums(self, client: Tensor, update: Tensor, trained_on: Tensor) -> Tensor:
        """update_sums over all coordinates: a subclass may have a slice of them."""
        return self.update_sums(client, update, trained_on)

    def _judge(self, client: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(clip, factor, reason) of a Verdict. sums: (JUDGED)"""
        bad, square, update_change, model_change, moved = sums.unbind()
        known, finite, moved = self.seen.index_select(0, client)[0], bad == 0, moved > 0
        clip = torch.where(known, 1.0, clip_to(square.sqrt(), self.config.max_norm)).to(self.config.dtype)
        unchanged = (update_change == 0) & (model_change == 0)
        factor = torch.where(unchanged, 0.0, update_change.sqrt() / model_change.sqrt())
        defined = known & finite & moved & factor.isfinite()
        steep = self._record(client, factor, defined) | ~factor.isfinite()
        reason = torch.where(moved, STEEP * steep, SAME_VERSION * (factor != 0))
        reason = torch.where(known, reason if self.config.filter else torch.zeros_like(reason), FIRST)
        reason = torch.where(finite, reason, NOT_FINITE)
        return clip, torch.where(defined, factor, torch.nan), reason

    def _record(self, client: Tensor, factor: Tensor, when: Tensor) -> Tensor:
        """Put the factor of client (1) into Q. True if more than the share `quantile` of the others lies below it.

        With equal weights this is factor > quantile(Q) with linear interpolation. Counting needs no sort.
        """
        weights, place = factor_weights(self.factors, self.recorded, self.factor_counts, client)
        below = factors_below(self.factors, self.factor_counts, weights, factor)
        steep = below > most_below(self.factor_counts, weights, self.config.quantile)
        record_factor(self.factors, self.recorded, self.factor_counts, place, factor, when)
        return steep

    def _aggregate(
        self, client: int, update: Tensor, model: Tensor, taken: Tensor, present: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(the direction to step along (d), the status of each client's correction (n))"""
        c = self.config
        past = {**self.history.tensors(), "seen": present}.values()
        return torch.ops.secureafl.aggregate_status(model, update, client, taken, *past, c.trust, c.rule, c.trim)

    def _push_estimates(self, client: Tensor, model: Tensor, steps: Tensor) -> None:
        """pairs="rounds": each client but this one also gets a pair from its own estimate, if the model steps."""
        for k, number in enumerate(self._clients):
            estimate = self.history.estimates(model, self.config.trust, slice(k, k + 1))[0]
            when = steps & self.seen[k] & (number != client)[0]
            dw, dg = model - self.history.last_models[k], estimate - self.history.last_updates[k]
            self.history.push(number, dw, dg, when)
