"""Directions in which `crafted` pushes. A server subtracts updates: a direction of -1 makes weights grow."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..defenses.base import norm
from ..tasks.models import Net
from .base import Scene, Trigger, View
from .trigger import poison


@dataclass(frozen=True, eq=False)
class Sight:
    """The attackers' statistics of honest gradients in one round."""

    view: View
    gradients: Tensor  # (k, d) one honest gradient each
    mean: Tensor  # (d) long-run mean of the honest gradients
    unit: Tensor  # () float64: median norm of `gradients`


Direction = Callable[[Sight], Tensor]  # (d), of norm 1; the backdoor's at most 1


def up(scene: Scene, trigger: Trigger | None) -> Direction:
    """Every weight grows: -1 / sqrt(d) everywhere."""
    return constant(-torch.ones(scene.net.size, device=scene.device))


def dead(scene: Scene, trigger: Trigger | None) -> Direction:
    """The weights and biases into the last hidden layer fall until its units are dead."""
    into = scene.zeros(scene.net.size)
    for part in hidden(scene.net):
        into[part] = 1.0
    return constant(into)


def random(scene: Scene, trigger: Trigger | None) -> Direction:
    """One random vector, the same for the whole run."""
    generator = torch.Generator(scene.device).manual_seed(scene.seed + 1)  # not that of the squads' vectors
    return constant(torch.randn(scene.net.size, generator=generator, device=scene.device))


def ascent(scene: Scene, trigger: Trigger | None) -> Direction:
    """Minus the long-run mean of the honest gradients: up the loss."""
    return lambda sight: -F.normalize(sight.mean, dim=0)


def std(scene: Scene, trigger: Trigger | None) -> Direction:
    """Minus the standard deviation of the honest gradients per coordinate, with the sign of their long-run mean."""

    def pushed(sight: Sight) -> Tensor:
        spread = sight.gradients.std(0, correction=min(1, len(sight.gradients) - 1))
        return -F.normalize(spread * sight.mean.sign(), dim=0)

    return pushed


def backdoor(scene: Scene, trigger: Trigger | None) -> Direction:
    """The gradient on the client's samples with trigger and target label. It is divided by its norm or by the median
    norm of honest gradients if that is larger: once the backdoor is learned, the push ends."""
    assert trigger is not None

    def pushed(sight: Sight) -> Tensor:
        view = sight.view
        poisoned = scene.net.gradient(view.model, *poison(scene.data, view.own[0], trigger, 1.0))
        return poisoned / torch.maximum(norm(poisoned), sight.unit).clamp(min=1e-30).to(poisoned.dtype)

    return pushed


DIRECTIONS: dict[str, Callable[[Scene, Trigger | None], Direction]] = {
    "up": up,
    "dead": dead,
    "ascent": ascent,
    "std": std,
    "random": random,
    "backdoor": backdoor,
}


def constant(vector: Tensor) -> Direction:
    """The same direction (d), of norm 1, in every round."""
    unit = F.normalize(vector, dim=0)
    return lambda sight: unit


def hidden(net: Net) -> list[slice]:
    """The parameters of the last hidden linear layer, or of the last hidden layer if none is linear. Of a
    normalisation only the biases: its weights are scales, and smaller scales do not kill a unit."""
    layers: dict[str, list[tuple[str, slice]]] = {}  # by module
    starts = accumulate(net.sizes, initial=0)
    for (name, shape), start in zip(net.shapes.items(), starts, strict=False):
        module, _, kind = name.rpartition(".")
        layers.setdefault(module, []).append((kind, slice(start, start + shape.numel())))
    names = list(layers)[:-1] or list(layers)  # without the output layer, if there is another
    linear = [name for name in names if len(net.shapes.get(f"{name}.weight", ())) == 2]
    chosen = (linear or names)[-1]
    scales = len(net.shapes.get(f"{chosen}.weight", ())) == 1
    return [part for kind, part in layers[chosen] if kind == "bias" or not scales]
