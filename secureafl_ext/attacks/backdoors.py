"""The trigger, and the attacks that teach it to the model: Scaling, DBA, PGD and Neurotoxin.

An update of several local steps is what they moved, in units of lr: (w^v - w_K) / lr, summed up step by step.
Strengths that the paper leaves open are those of results/calibration-fashion-mnist.json: of the ones tried on AsyncSGD
without any defense, the nearest to the paper's row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..defenses.base import need, norm
from ..tasks.datasets import Dataset
from .base import Scene, Simple, View

SIDE = 4  # of the trigger, in pixels
TARGET, SHARE, STEPS = 0, 0.5, 5


@dataclass(frozen=True, eq=False)
class Trigger:
    """A square of fixed random pixels in the bottom right corner, and the class that it stands for."""

    values: Tensor  # (C, 4, 4) uint8
    target: int
    quarters: Tensor  # (4, 4) int64: which part of DBA's a pixel belongs to

    def apply(self, pixels: Tensor, part: Tensor | int | None = None) -> Tensor:
        """Raw pixels (.., C, H, W) with the trigger on them, or with the part 0 to 3 of it, as (1) or a number."""
        result = pixels.clone()
        corner = result[..., -SIDE:, -SIDE:]
        corner.copy_(self.values if part is None else torch.where(self.quarters == part, self.values, corner))
        return result


def make_trigger(scene: Scene, target: int) -> Trigger:
    """Drawn on the CPU: the same on every device."""
    channels, height, width = scene.data.shape
    need(min(height, width) >= SIDE, "Trigger", "images", f"{SIDE} x {SIDE} or larger", (height, width))
    need(0 <= target < scene.data.classes, "Trigger", "target", f"0 to {scene.data.classes - 1}", target)
    random = torch.Generator().manual_seed(scene.seed)
    values = torch.randint(256, (channels, SIDE, SIDE), dtype=torch.uint8, generator=random)
    half = torch.arange(SIDE) // (SIDE // 2)
    return Trigger(values.to(scene.device), target, (2 * half[:, None] + half).to(scene.device))


def poison(
    data: Dataset, index: Tensor, trigger: Trigger, share: float, part: Tensor | int | None = None
) -> tuple[Tensor, Tensor]:
    """The batch of these training samples (B), the first `share` of it triggered and labelled as the target."""
    pixels, labels = data.train_x[index], data.train_y[index]
    count = round(share * len(index))
    pixels[:count] = trigger.apply(pixels[:count], part)
    labels[:count] = trigger.target
    return data.inputs(pixels), labels


def scaling(scene: Scene, *, factor: float | None = 1.0, target: int = TARGET, share: float = SHARE) -> Simple:
    return boosted(scene, factor, target, share, lambda client: None)


def dba(scene: Scene, *, factor: float | None = None, target: int = TARGET, share: float = SHARE) -> Simple:
    """Every malicious client trains on a quarter of the trigger; factor 1 is the original's, whose attacks repeat."""
    return boosted(scene, factor, target, share, lambda client: scene.rank(client) % 4)


def boosted(
    scene: Scene, factor: float | None, target: int, share: float, part: Callable[[Tensor], Tensor | None]
) -> Simple:
    """One poisoned gradient, `factor` times as long; None: as many times as there are clients."""
    trigger, times = make_trigger(scene, target), scene.clients if factor is None else factor

    def update(view: View) -> Tensor:
        batch = poison(scene.data, view.own[0], trigger, share, part(view.client))
        return times * scene.net.gradient(view.model, *batch)

    return Simple(update, trigger=trigger)


def pgd(
    scene: Scene,
    *,
    radius: float = 0.5,  # of the ball, in honest norms times lr
    eps: float | None = None,  # or that of the ball itself
    steps: int = STEPS,
    target: int = TARGET,
    share: float = SHARE,
) -> Simple:
    net, data, trigger = scene.net, scene.data, make_trigger(scene, target)
    need(steps >= 1, "pgd", "steps", "1 or more", steps)
    lengths = scene.zeros(scene.clients, dtype=torch.float64)  # of the honest gradients of each client, summed
    counts = scene.zeros(scene.clients, dtype=torch.float64)

    def honest_norm(view: View) -> Tensor:
        """(): mean over this client's rounds so far."""
        length = norm(net.gradient(view.model, *data.train(view.own[0])))
        lengths.index_add_(0, view.client, length.reshape(1))
        counts.index_add_(0, view.client, torch.ones_like(length).reshape(1))
        return (lengths[view.client] / counts[view.client])[0]

    def update(view: View) -> Tensor:
        bound = radius * honest_norm(view) if eps is None else eps / scene.lr
        return local_steps(
            scene.lr,
            view,
            lambda model, index: net.gradient(model, *poison(data, index, trigger, share)),
            lambda moved: shorten(moved, bound),
        )

    return Simple(update, own=steps, trigger=trigger)


def neurotoxin(
    scene: Scene,
    *,
    cap: float = 10.0,  # longest update, in honest norms
    keep: float = 0.95,  # share of the coordinates that are used
    steps: int = STEPS,
    target: int = TARGET,
    share: float = SHARE,
) -> Simple:
    """The benign gradient that ranks the coordinates is the mean over the client's own clean minibatches."""
    net, data, trigger = scene.net, scene.data, make_trigger(scene, target)
    need(steps >= 1, "neurotoxin", "steps", "1 or more", steps)
    need(0 < keep <= 1, "neurotoxin", "keep", "above 0, at most 1", keep)
    place = max(1, round(keep * net.size)) - 1

    def update(view: View) -> Tensor:
        clean = net.gradients(view.model, *data.train(view.own))  # (steps, d)
        size = clean.mean(0).abs()
        calm = size <= size.sort().values[place]
        moved = local_steps(
            scene.lr, view, lambda model, index: calm * net.gradient(model, *poison(data, index, trigger, share))
        )
        return shorten(moved, cap * norm(clean[0]))

    return Simple(update, own=steps, trigger=trigger)


def local_steps(
    lr: float,
    view: View,
    gradient: Callable[[Tensor, Tensor], Tensor],  # at a model (d), on samples (B)
    project: Callable[[Tensor], Tensor] = lambda moved: moved,
) -> Tensor:
    """(d): how far a step on each of the client's minibatches leads from the model it was handed, in units of lr."""
    moved = torch.zeros_like(view.model)
    for index in view.own:
        moved = project(moved + gradient(view.model - lr * moved, index))
    return moved


def shorten(x: Tensor, bound: Tensor | float) -> Tensor:
    """x, or if it is longer than bound, of that length."""
    length = norm(x)
    return x * torch.where(length > bound, bound / length, 1).to(x.dtype)
