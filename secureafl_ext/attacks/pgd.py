"""PGD: local steps on poisoned samples, projected into a ball around the received model."""

import torch
from torch import Tensor

from ..defenses.base import need, norm
from .base import Scene, Simple, View
from .local_steps import STEPS, local_steps, shorten
from .trigger import SHARE, TARGET, make_trigger, poison


def pgd(
    scene: Scene,
    *,
    radius: float = 1.0,  # relative to lr * norm of an honest gradient
    eps: float | None = None,  # absolute radius; overrides the relative one
    steps: int = STEPS,
    target: int = TARGET,
    share: float = SHARE,
) -> Simple:
    net, data, trigger = scene.net, scene.data, make_trigger(scene, target, share)
    need(steps >= 1, "pgd", "steps", "1 or more", steps)
    need(radius > 0, "pgd", "radius", "positive", radius)
    need(eps is None or eps > 0, "pgd", "eps", "positive", eps)
    lengths = scene.zeros(scene.clients, dtype=torch.float64)  # sum of the norms of each client's honest gradients
    counts = scene.zeros(scene.clients, dtype=torch.float64)

    def honest_norm(view: View) -> Tensor:
        """(): mean norm of this client's honest gradients so far."""
        length = norm(net.gradient(view.model, *data.train(view.own[0])))
        finite = length.isfinite()  # one NaN would stay in the sum for ever, and no ball would bound the attack
        lengths.index_add_(0, view.client, torch.where(finite, length, 0).reshape(1))
        counts.index_add_(0, view.client, finite.to(counts.dtype).reshape(1))
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
