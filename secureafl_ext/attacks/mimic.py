"""Mimic (Karimireddy et al., ICLR 2022, arXiv 2006.09365): all attackers send what one honest client would send.

The victim counts many times. A defense that removes too similar clients removes the victim and those like it (framing).
With a negative factor they send the opposite: a defense that removes clients whom others oppose removes the victim.
"""

import math

from torch import Tensor

from ..defenses.base import need
from .base import Scene, Simple, View


def mimic(scene: Scene, *, victim: int = 0, factor: float = 1.0) -> Simple:
    """victim: the honest client, by its place among the honest ones    factor: times its gradient"""
    need(math.isfinite(factor), "mimic", "factor", "a finite number", factor)
    need(0 <= victim < scene.honest, "mimic", "victim", f"0 to {scene.honest - 1}, an honest client", victim)

    def update(view: View) -> Tensor:
        return factor * scene.net.gradient(view.model, *scene.data.train(view.honest[victim]))

    return Simple(update, honest=scene.honest)  # of all, in order: otherwise other clients each round
