"""Neurotoxin: a backdoor in the coordinates where honest gradients are smallest."""

from torch import Tensor

from ..defenses.base import need, norm
from .base import Scene, Simple, View
from .local_steps import STEPS, local_steps, shorten
from .trigger import SHARE, TARGET, make_trigger, poison


def neurotoxin(
    scene: Scene,
    *,
    cap: float = 3.0,  # largest norm of the update, relative to an honest gradient
    keep: float = 0.99,  # share of the coordinates that carry the backdoor
    steps: int = STEPS,
    target: int = TARGET,
    share: float = SHARE,
) -> Simple:
    """The mean gradient of the client's clean minibatches ranks the coordinates."""
    net, data, trigger = scene.net, scene.data, make_trigger(scene, target, share)
    need(steps >= 1, "neurotoxin", "steps", "1 or more", steps)
    need(cap > 0, "neurotoxin", "cap", "positive", cap)
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
