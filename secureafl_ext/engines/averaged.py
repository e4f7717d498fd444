"""Averaged: rule="support" from averages of each client's own updates, or of their sketches.

With step="received" a round needs only the weights of the other clients, not their updates. So its cost hardly grows
with the number of clients: a few passes over n numbers. A refresh compares all averages.

Sketched keeps k numbers in place of whole updates and models, for large fleets and models. In float32 on a CPU or a
CUDA device its round is one op (csrc/row_wise/sketch); the refresh is torch code. fused_averages.py has whole updates.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _C
from ..config import Config
from ..rules import mean_steps
from ..rules.mean_steps import MeanSteps
from ..rules.row_rules import MAX_SQUARE, clip_to, median_of
from ..rules.similarity import SPAN
from ..rules.sketched_support import SketchedSupport
from ..rules.sums import inner, squared_distance
from .base import Outcome
from .composed import JUDGED, Composed, Verdict
from .presence import settings_of
from .row_wise import refresh_rounds
from .sketch import MOST_PARAMETERS, Sketch

# Tensors of a state that a server with keep_last=False does not have.
LAST_NAMES = ("last_updates", "last_models", "update_sketches", "model_sketches")
LONGEST = 2 * MAX_SQUARE**0.5  # norms are clamped to this; above half of it a client takes no part anyway

step = torch.ops.secureafl.sketch_step_.default


def fits(config: Config, device: torch.device) -> bool:
    """Whether the op supports these settings; plain ops support the rest."""
    return config.dtype == torch.float32 and device.type in ("cpu", "cuda")


def has_basis(config: Config, clients: int) -> bool:
    """Whether averages of steps have the eigenvectors that the fused refresh starts from. That refresh supports whole
    updates and a limited number of clients. Plain ops keep the eigenvectors too: a checkpoint fits every device."""
    return not config.sketch and clients <= _C.MOST_ROW_CLIENTS


class Averaged(Composed):
    """Composed without products of updates. last_updates, last_models: (n, k), k = d for whole updates; (0, k) if they
    are not kept

    rounds: number of rounds, on the host. After every `every` of them the weights are computed anew
    """

    capturable = False  # the refresh waits for the device
    support: SketchedSupport | MeanSteps

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        if config.sketch and not size:
            raise ValueError(f"SecureAFL: model must have a parameter with sketch={config.sketch}, got none")
        if config.sketch and size > MOST_PARAMETERS:
            limit = f"at most {MOST_PARAMETERS} parameters with sketch={config.sketch}"
            raise ValueError(f"SecureAFL: model must have {limit}, got {size}")
        width = config.sketch or size
        super().__init__(config, clients, width, device)
        self.sketch = Sketch(size, width, config.sketch_seed or 0, device) if config.sketch else None
        if config.averages == "steps":
            means = torch.zeros(clients, width, dtype=config.mean_dtype, device=device)
            self.support = MeanSteps(means, has_basis(config, clients))
        else:
            self.support = SketchedSupport(clients, width, config.dtype, device)
        self.rounds, self.every = 0, refresh_rounds(clients)
        self._counted_before = 0  # rounds in `counts` but not in `rounds`: before averages were kept
        self._products: tuple[int, Tensor] | None = None  # (version // every, the products computed then)

    def load(self, state: Mapping[str, Tensor], model: Tensor) -> None:
        super().load(state, model)
        self.rounds, self._products = int(state["rounds"]), None
        self._counted_before = int(state["counts"][:2].sum()) - self.rounds

    def _remembered(self) -> dict[str, Tensor]:
        past, averages = self.history, self.support.tensors()
        averages["rounds"] = torch.tensor(self.rounds)
        if self.sketch is None:
            averages["mean_updates"] = averages.pop("means")
            kept = past.tensors()
        else:
            averages["sketch_seed"] = torch.tensor(self.config.sketch_seed)
            kept = {"update_sketches": past.last_updates, "model_sketches": past.last_models, "seen": past.seen}
        return {name: kept[name] for name in kept if self.config.keeps_last or name not in LAST_NAMES} | averages

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        rounds = self.rounds
        try:
            return super().round(client, update, trained_on, models, now, new)
        except BaseException:
            self.rounds = rounds
            raise

    def _round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        number = client if isinstance(client, Tensor) else self._clients[client]
        outcome = self._one_round(number, update, trained_on, models, now, new)
        if self._refresh_is_due():
            self._refresh(self.presence.mask(self.seen))
        self.rounds += 1
        return outcome

    def _refresh_is_due(self) -> bool:
        return (self.rounds + 1) % self.every == 0

    def _refresh(self, mask: Tensor) -> None:
        self.support.refresh(mask)

    def _sketched(self, vector: Tensor) -> Tensor:
        """(k): the sketch of an update or model (d); without sketches the vector itself."""
        return self.sketch.of(vector) if self.sketch else vector

    def update_sums(self, client: Tensor, update: Tensor, trained_on: Tensor) -> Tensor:
        bad, square = (~update.isfinite()).sum().double(), inner(update[None], update)[0]
        if not self.config.keeps_last:  # nothing to compare with
            return torch.nn.functional.pad(torch.stack([bad, square]), (0, JUDGED - 2))
        last, last_model = self.history.of(client)
        of_update, of_model = self._sketched(update), self._sketched(trained_on)
        changes = squared_distance(of_update, last), squared_distance(of_model, last_model)
        moved = (of_model != last_model).sum().double()
        return torch.stack([bad, square, *changes, moved])

    def _one_round(
        self, client: Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        sums = self._sums(client, update, trained_on)[:JUDGED]
        v = self._decide(client, sums)
        used = (v.taken | v.stored) & (v.clip > 0)  # clip is 0 if the norm overflows
        norm = torch.where(used, sums[1].sqrt() * v.clip, 0).clamp(max=LONGEST)
        norms = self.support.norms.index_copy(0, client, norm[None])
        mask = v.present.index_copy(0, client, v.taken[None]) & (norms.square() <= MAX_SQUARE)
        median_norm = median_of(norms, mask)
        weight = self.support.weights(mask).index_select(0, client)[0]
        relative = weight * mask.sum()  # weight / mean weight
        scale = relative * clip_to(norm, median_norm) * v.clip
        direction = torch.where(v.taken, update * scale.to(update.dtype), 0)
        kept = torch.where(v.stored, self._sketched(update) * v.clip, 0)
        self._average(client, kept, norm, median_norm, v, relative)
        model = self._sketched(trained_on) if self.config.keeps_last else trained_on  # not read then
        self.history.remember(client, kept, model, v.stored)
        models[new] = self._stepped(models[now], direction, v)
        none = torch.zeros_like(v.reason)
        self._count(v, none, none)
        return Outcome(v.accepted, v.factor, v.reason, weight)

    def _average(
        self, client: Tensor, update: Tensor, norm: Tensor, median_norm: Tensor, v: Verdict, relative: Tensor
    ) -> None:
        """Add an upload of client (1) to its average. update: (k)    relative: () weight / mean weight"""
        if isinstance(self.support, MeanSteps):
            pace = v.pace if self.lr else 0.0  # with lr=0 nothing moves
            moved = torch.where(v.taken & v.steps, relative * pace, 0)
            self.support.add(client, update, norm, median_norm, v.stored, moved)
        else:
            self.support.add(client, update, self.history.of(client)[0], norm, median_norm, v.stored)

    def forget(self, client: int) -> None:
        super().forget(client)
        self.support.forget(client)
        self._products = None

    def row_weights(self, model: Tensor) -> Tensor:
        return self.support.weights(self.presence.mask(self.seen) & (self.support.norms.square() <= MAX_SQUARE))

    def similarity(self, version: int) -> Tensor | None:
        """Computed at most once in `every` versions, because it costs as much as a refresh; in a CUDA graph always."""
        if self.sketch or not isinstance(self.support, MeanSteps):
            return None
        if self.seen.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.support.products()
        period = version // self.every
        if self._products is None or self._products[0] != period:
            self._products = period, self.support.products()
        return self._products[1]

    def estimates(self, model: Tensor) -> Tensor:
        self._need_updates("estimates")
        return super().estimates(model)

    def last_of(self, client: Tensor) -> tuple[Tensor, Tensor]:
        self._need_updates("last")
        return super().last_of(client)

    def norms(self, model: Tensor) -> Tensor:
        return torch.where(self.seen, self.support.norms, 0)

    def _need_updates(self, call: str) -> None:
        c = self.config
        if c.sketch:
            raise ValueError(f"SecureAFL.{call}: sketch must be 0, whole updates are not kept, got {c.sketch}")
        if not c.keeps_last:
            why = "these settings do not keep last updates"
            raise ValueError(f"SecureAFL.{call}: keep_last must be true, {why}, got {c.keep_last}")


class Sketched(Averaged):
    """Averages of sketches: the round is one op where it fits. Updates are not kept."""

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        super().__init__(config, clients, size, device)
        assert self.sketch
        s, span, none = self.support, SPAN, torch.zeros(0, dtype=torch.float64, device=device)
        if isinstance(s, MeanSteps):
            kept, span = (none, none.long(), s.total, s.noise), mean_steps.SPAN
        else:
            kept = s.squares, s.met, none, none.clone()  # a clone: the op refuses arguments that share memory
        past = self.history.last_updates, self.history.last_models, self.seen, s.means, *kept, s.norms, s.shift
        self._past = self.sketch.places, *past, *self.presence.tensors().values()
        c, flags = config, (config.filter, config.receive, config.store == "all", config.on_reject == "hold")
        self._settings = c.quantile, c.max_norm, *flags, *settings_of(c), self.quorum, span, mean_steps.LEAST
        self._fused = fits(config, device)

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        if not self._fused or self._refresh_is_due():
            return super().round(client, update, trained_on, models, now, new)
        try:  # one op, which runs to its end or not at all
            return self._round(client, update, trained_on, models, now, new)
        except BaseException:
            self.rounds = int(self.counts[:2].sum()) - self._counted_before
            raise

    def _one_round(
        self, client: Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        if not self._fused:
            return super()._one_round(client, update, trained_on, models, now, new)
        state = *self._past, self.factors, self.recorded, self.factor_counts, self.counts
        return Outcome(*step(update, client, trained_on, now, new, models, *state, self.lr, *self._settings))
