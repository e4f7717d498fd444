"""Label flip: the gradient on labels y that became Z - 1 - y, for Z classes."""

from torch import Tensor

from .base import Scene, Simple, View


def label_flip(scene: Scene) -> Simple:
    def update(view: View) -> Tensor:
        x, y = scene.data.train(view.own[0])
        return scene.net.gradient(view.model, x, scene.data.classes - 1 - y)

    return Simple(update)
