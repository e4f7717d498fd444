"""IPM, inner product manipulation (Xie et al., UAI 2019, arXiv 1903.03936): minus epsilon times the honest mean."""

import math

from torch import Tensor

from ..defenses.base import need
from .base import Scene, Simple, View


def ipm(scene: Scene, *, epsilon: float = 10.0, honest: int | None = None) -> Simple:
    """honest: number of honest clients whose mean it is. Default: all of them"""
    number = scene.honest if honest is None else honest
    need(math.isfinite(epsilon), "ipm", "epsilon", "a finite number", epsilon)
    need(1 <= number <= scene.honest, "ipm", "honest", f"1 to {scene.honest}, the honest clients", number)

    def update(view: View) -> Tensor:
        gradients = scene.net.gradients(view.model, *scene.data.train(view.honest))  # (k, d)
        return -epsilon * gradients.mean(0)

    return Simple(update, honest=number)
