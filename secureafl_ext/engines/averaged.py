"""Averaged: rule="support" from averages of each client's own updates, or of their sketches.

With step="received" a round needs of the other clients only their weights. So no round reads the others' updates: it
costs the same for any number of clients, but for a few passes over n numbers. A refresh compares all averages.

Sketched keeps k numbers in place of whole updates and models, for large fleets and models. In float32 on a CPU or a
CUDA device its round is one op (csrc/sketch); the refresh is torch code.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import Config
from ..rules.mean_steps import MeanSteps
from ..rules.row_rules import MAX_SQUARE, clip_to, median_of
from ..rules.similarity import SPAN
from ..rules.sketched_support import SketchedSupport
from .base import Outcome
from .composed import Composed
from .presence import settings_of
from .row_wise import refresh_rounds
from .sketch import Sketch
from .sums import inner, squared_distance

LONGEST = 2 * MAX_SQUARE**0.5  # a longer norm is kept as this: the client takes no part either way

step = torch.ops.secureafl.sketch_step_.default


def fits(config: Config, device: torch.device) -> bool:
    """Whether the op supports these settings; plain ops support the rest."""
    return config.dtype == torch.float32 and device.type in ("cpu", "cuda")


class Averaged(Composed):
    """Composed without products of updates. last_updates, last_models: (n, k), k = d for whole updates

    rounds: number of rounds, on the host: every refresh_rounds of them the weights are computed anew
    """

    capturable = False  # the refresh waits for the device
    support: SketchedSupport

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        if not size:
            raise ValueError(f"SecureAFL: model must have a parameter with {config.averaging}, got none")
        width = config.sketch or size
        super().__init__(config, clients, width, device)
        self.sketch = Sketch(size, width, config.sketch_seed or 0, config.dtype, device) if config.sketch else None
        averages = MeanSteps if config.averages == "steps" else SketchedSupport
        self.support = averages(clients, width, config.dtype, device)
        self.rounds, self.every = 0, refresh_rounds(clients)

    def load(self, state: Mapping[str, Tensor], model: Tensor) -> None:
        super().load(state, model)
        self.rounds = int(state["rounds"])

    def _remembered(self) -> dict[str, Tensor]:
        past, numbers = self.history, {"rounds": torch.tensor(self.rounds)}
        if self.sketch is None:
            return {**past.tensors(), **self.support.tensors(), **numbers}
        kept = {"update_sketches": past.last_updates, "model_sketches": past.last_models, "seen": past.seen}
        return {**kept, **self.support.tensors(), **numbers, "sketch_seed": torch.tensor(self.config.sketch_seed)}

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        number = client if isinstance(client, Tensor) else self._clients[client]
        outcome = self._one_round(number, update, trained_on, models, now, new)
        self.rounds += 1
        if self.rounds % self.every == 0:
            self.support.refresh(self.presence.mask(self.seen))
        return outcome

    def _one_round(
        self, client: Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        sketch, of_model = (self.sketch.of(x) if self.sketch else x for x in (update, trained_on))
        last, last_model, _ = self.history.of(client)
        square = inner(update[None], update)[0]
        changes = squared_distance(sketch, last), squared_distance(of_model, last_model)
        bad, moved = (~update.isfinite()).sum().double(), (of_model != last_model).sum().double()
        v = self._decide(client, torch.stack([bad, square, *changes, moved]))
        used = (v.taken | v.stored) & (v.clip > 0)  # clip is 0 if the norm overflows
        norm = torch.where(used, square.sqrt() * v.clip, 0).clamp(max=LONGEST)
        norms = self.support.norms.index_copy(0, client, norm[None])
        mask = v.present.index_copy(0, client, v.taken[None]) & (norms.square() <= MAX_SQUARE)
        median_norm = median_of(norms, mask)
        weight = self.support.weights(mask).index_select(0, client)[0]
        scale = weight * mask.sum() * clip_to(norm, median_norm) * v.clip
        direction = torch.where(v.taken, update * scale.to(update.dtype), 0)
        sketch = sketch * v.clip
        if isinstance(self.support, MeanSteps):
            far = torch.where(v.taken & v.steps, weight * mask.sum() * v.pace, 0)
            self.support.add_step(client, sketch, norm, median_norm, v.stored, far)
        else:
            self.support.add(client, sketch, last, norm, median_norm, v.stored)
        self.history.remember(client, sketch, of_model, v.stored)
        models[new] = self._stepped(models[now], direction, v)
        none = torch.zeros_like(v.reason)
        self._count(v, none, none)
        return Outcome(v.accepted, v.factor, v.reason, weight)

    def forget(self, client: int) -> None:
        super().forget(client)
        self.support.forget(client)

    def row_weights(self, model: Tensor) -> Tensor:
        return self.support.weights(self.presence.mask(self.seen) & (self.support.norms.square() <= MAX_SQUARE))

    @property
    def similarity(self) -> Tensor | None:
        return self.support.products() if isinstance(self.support, MeanSteps) and not self.sketch else None

    def estimates(self, model: Tensor) -> Tensor:
        if self.sketch:
            raise self._no_updates("estimates")
        return super().estimates(model)

    def last_of(self, client: Tensor) -> tuple[Tensor, Tensor]:
        if self.sketch:
            raise self._no_updates("last")
        return super().last_of(client)

    def _no_updates(self, call: str) -> ValueError:
        return ValueError(f"SecureAFL.{call}: sketch must be 0, whole updates are not kept, got {self.config.sketch}")


class Sketched(Averaged):
    """averages="uploads" on sketches: the round is one op where it fits. Updates are not kept."""

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        super().__init__(config, clients, size, device)
        assert self.sketch
        past = self.history.last_updates, self.history.last_models, self.seen, *self.support.tensors().values()
        self._past = self.sketch.order, self.sketch.signs, *past, *self.presence.tensors().values()
        c, flags = config, (config.filter, config.receive, config.store == "all", config.on_reject == "hold")
        self._settings = c.quantile, c.max_norm, *flags, *settings_of(c), self.quorum, SPAN
        self._fused = fits(config, device)

    def _one_round(
        self, client: Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        if not self._fused:
            return super()._one_round(client, update, trained_on, models, now, new)
        state = *self._past, self.factors, self.recorded, self.factor_counts, self.counts
        return Outcome(*step(update, client, trained_on, now, new, models, *state, self.lr, *self._settings))
