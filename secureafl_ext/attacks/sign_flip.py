"""Sign flip: the honest gradient with the opposite sign, times `scale`."""

import math

from ..defenses.base import need
from .base import Scene, Simple


def sign_flip(scene: Scene, *, scale: float = 1.0) -> Simple:
    need(math.isfinite(scale), "sign-flip", "scale", "a finite number", scale)
    return Simple(lambda view: -scale * scene.net.gradient(view.model, *scene.data.train(view.own[0])))
