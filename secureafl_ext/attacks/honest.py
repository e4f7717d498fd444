"""None: malicious clients send their honest gradient."""

from .base import Scene, Simple


def none(scene: Scene) -> Simple:
    return Simple(lambda view: scene.net.gradient(view.model, *scene.data.train(view.own[0])))
