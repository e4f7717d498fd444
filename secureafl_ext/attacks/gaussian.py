"""Gaussian: noise of standard deviation `std` in place of a gradient."""

from .base import Scene, Simple


def gaussian(scene: Scene, *, std: float = 200.0) -> Simple:
    noise, random = scene.zeros(scene.net.size), scene.random()
    return Simple(lambda view: std * noise, before=lambda: noise.normal_(generator=random))
