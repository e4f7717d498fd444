"""Sign flip: the honest gradient with the opposite sign, times `scale`."""

from .base import Scene, Simple


def sign_flip(scene: Scene, *, scale: float = 1.0) -> Simple:
    return Simple(lambda view: -scale * scene.net.gradient(view.model, *scene.data.train(view.own[0])))
