"""Min-Max: the update farthest from the honest mean that is no farther from any honest gradient than two of them are
from each other."""

import torch
from torch import Tensor

from ..defenses.base import need
from .base import Scene, Simple, View

DIRECTIONS = {
    "std": lambda gradients, mean: gradients.std(0, correction=min(1, len(gradients) - 1)),
    "unit": lambda gradients, mean: torch.nn.functional.normalize(mean, dim=0),
    "sign": lambda gradients, mean: mean.sign(),
}


def min_max(scene: Scene, *, p: str = "std", gamma0: float = 10.0, honest: int | None = None) -> Simple:
    """p: the direction that is subtracted    honest: number of honest clients that it sees. Default: all of them"""
    need(p in DIRECTIONS, "min-max", "p", f"one of {', '.join(DIRECTIONS)}", p)
    need(gamma0 > 0, "min-max", "gamma0", "positive", gamma0)
    number = scene.honest if honest is None else honest
    need(1 <= number <= scene.honest, "min-max", "honest", f"1 to {scene.honest}, the honest clients", number)

    def update(view: View) -> Tensor:
        gradients = scene.net.gradients(view.model, *scene.data.train(view.honest))  # (k, d)
        mean = gradients.mean(0)
        direction = DIRECTIONS[p](gradients, mean)
        gamma = largest(gradients, mean, direction)
        if p != "unit":  # the original's search ends below twice its start
            gamma = gamma.clamp(max=2 * gamma0)
        return mean - gamma.to(mean.dtype) * direction

    return Simple(update, honest=number)


def largest(gradients: Tensor, mean: Tensor, direction: Tensor) -> Tensor:
    """(): the largest gamma for which mean - gamma * direction is within the diameter of all gradients (k, d).

    |mean - gamma p - g_k|^2 is a quadratic in gamma for each k, and at most the squared diameter at gamma 0. So the
    bound is the smallest of the larger roots. The original searches by trials and ends within 2e-5 below it.
    """
    away, p = (mean - gradients).double(), direction.double()
    products = away @ away.T  # (k, k)
    squares = products.diagonal()
    diameter = (squares[:, None] + squares - 2 * products).amax().clamp(min=0)  # squared
    along, length = away @ p, p @ p
    root = (along.square() + length * (diameter - squares)).clamp(min=0).sqrt()
    gamma = ((along + root) / length).amin()
    return torch.where(length > 0, gamma, 0)
