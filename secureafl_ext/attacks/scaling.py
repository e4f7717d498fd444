"""Scaling: one gradient on poisoned samples, scaled up.

Default strengths of scaling, dba, pgd, neurotoxin and 3dfed: the paper leaves them open. Of all strengths that
`secureafl calibrate` tried on AsyncSGD they are the closest match to the paper's numbers
(results/calibration-fashion-mnist.json).
"""

import math
from collections.abc import Callable

from torch import Tensor

from ..defenses.base import need
from .base import Scene, Simple, View
from .trigger import SHARE, TARGET, make_trigger, poison


def scaling(scene: Scene, *, factor: float | None = 1.0, target: int = TARGET, share: float = SHARE) -> Simple:
    return scaled_poison(scene, factor, target, share, lambda client: None)


def scaled_poison(
    scene: Scene, factor: float | None, target: int, share: float, part: Callable[[Tensor], Tensor | None]
) -> Simple:
    """One poisoned gradient times `factor`; None: times the number of clients. part: of the trigger, by client (1)"""
    trigger, times = make_trigger(scene, target, share), scene.clients if factor is None else factor
    need(math.isfinite(times), "scaling and dba", "factor", "a finite number", factor)

    def update(view: View) -> Tensor:
        batch = poison(scene.data, view.own[0], trigger, share, part(view.client))
        return times * scene.net.gradient(view.model, *batch)

    return Simple(update, trigger=trigger)
