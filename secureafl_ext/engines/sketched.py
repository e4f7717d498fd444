"""Sketched: rule="support" for fleets and models that are too large to keep whole updates.

With step="received" a round needs of the other clients only their weights. So the history holds sketches in place of
updates and models, and a round costs the same for any number of clients, but for a few passes over n numbers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import Config
from ..rules.row_rules import MAX_SQUARE, clip_to, median_of
from ..rules.sketched_support import SketchedSupport
from .base import Outcome
from .composed import Composed
from .row_wise import refresh_rounds
from .sketch import Sketch
from .sums import inner, squared_distance

LONGEST = 2 * MAX_SQUARE**0.5  # a longer norm is kept as this: the client takes no part either way


class Sketched(Composed):
    """Composed on sketches: last_updates and last_models are (n, k).

    rounds: number of rounds, on the host: every refresh_rounds of them the weights are computed anew
    """

    capturable = False  # the refresh waits for the device

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        super().__init__(config, clients, config.sketch, device)
        assert config.sketch_seed is not None  # Config draws one
        self.sketch = Sketch(size, config.sketch, config.sketch_seed, config.dtype, device)
        self.support = SketchedSupport(clients, config.sketch, config.dtype, device)
        self.rounds, self.every = 0, refresh_rounds(clients)

    def load(self, state: Mapping[str, Tensor], model: Tensor) -> None:
        super().load(state, model)
        self.rounds = int(state["rounds"])

    def _remembered(self) -> dict[str, Tensor]:
        past = self.history
        kept = {"update_sketches": past.last_updates, "model_sketches": past.last_models, "seen": past.seen}
        numbers = {"rounds": torch.tensor(self.rounds), "sketch_seed": torch.tensor(self.config.sketch_seed)}
        return {**kept, **self.support.tensors(), **numbers}

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        number = client if isinstance(client, Tensor) else self._clients[client]
        sketch, of_model = self.sketch.of(update), self.sketch.of(trained_on)
        last, last_model, _ = self.history.of(number)
        sums = self._sketched_sums(update, sketch - last, of_model - last_model)
        v = self._decide(number, sums)
        used = (v.taken | v.stored) & (v.clip > 0)  # clip is 0 if the norm overflows
        norm = torch.where(used, sums[1].sqrt() * v.clip, 0).clamp(max=LONGEST)
        norms = self.support.norms.index_copy(0, number, norm[None])
        mask = v.present.index_copy(0, number, v.taken[None]) & (norms.square() <= MAX_SQUARE)
        median_norm = median_of(norms, mask)
        weight = self.support.weights(mask).index_select(0, number)[0]
        scale = weight * mask.sum() * clip_to(norm, median_norm) * v.clip
        direction = torch.where(v.taken, update * scale.to(update.dtype), 0)
        sketch = sketch * v.clip
        self.support.add(number, sketch, last, norm, median_norm, v.stored)
        self.history.remember(number, sketch, of_model, v.stored)
        models[new] = self._stepped(models[now], direction, v)
        none = torch.zeros_like(v.reason)
        self._count(v, none, none)
        self.rounds += 1
        if self.rounds % self.every == 0:
            self.support.refresh(self.presence.mask(self.seen))
        return Outcome(v.accepted, v.factor, v.reason, weight)

    def forget(self, client: int) -> None:
        super().forget(client)
        self.support.forget(client)

    def row_weights(self, model: Tensor) -> Tensor:
        return self.support.weights(self.presence.mask(self.seen) & (self.support.norms.square() <= MAX_SQUARE))

    def estimates(self, model: Tensor) -> Tensor:
        raise self._no_updates("estimates")

    def last_of(self, client: Tensor) -> tuple[Tensor, Tensor]:
        raise self._no_updates("last")

    def _no_updates(self, call: str) -> ValueError:
        return ValueError(f"SecureAFL.{call}: sketch must be 0, whole updates are not kept, got {self.config.sketch}")

    def _sketched_sums(self, update: Tensor, changed: Tensor, moved: Tensor) -> Tensor:
        """(JUDGED) float64, as update_sums. changed, moved: (k), sketches of the changes of update and model"""
        bad, square = (~update.isfinite()).sum().double(), inner(update[None], update)[0]
        changes = (squared_distance(change, torch.zeros_like(change)) for change in (changed, moved))
        return torch.stack([bad, square, *changes, (moved != 0).sum().double()])
