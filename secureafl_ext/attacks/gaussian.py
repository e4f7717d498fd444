"""Gaussian: noise of standard deviation `std` in place of a gradient."""

import math

from ..defenses.base import need
from .base import Scene, Simple


def gaussian(scene: Scene, *, std: float = 200.0) -> Simple:
    need(0 <= std < math.inf, "gaussian", "std", "0 or more, finite", std)
    noise, random = scene.zeros(scene.net.size), scene.random()
    return Simple(lambda view: std * noise, before=lambda: noise.normal_(generator=random))
