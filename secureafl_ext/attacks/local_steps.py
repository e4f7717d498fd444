"""Several local steps as one update: the distance that they move the model, in units of lr, (w^v - w_K) / lr."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..defenses.base import norm
from .base import View

STEPS = 5  # default number of local steps


def local_steps(
    lr: float,
    view: View,
    gradient: Callable[[Tensor, Tensor], Tensor],  # of a model (d) and samples (B)
    project: Callable[[Tensor], Tensor] = lambda moved: moved,
) -> Tensor:
    """(d): the update after one step on each of the client's minibatches. project: applied after each step"""
    moved = torch.zeros_like(view.model)
    for index in view.own:
        moved = project(moved + gradient(view.model - lr * moved, index))
    return moved


def shorten(x: Tensor, bound: Tensor | float) -> Tensor:
    """x, clipped to the norm `bound`."""
    length = norm(x)
    return x * torch.where(length > bound, bound / length, 1).to(x.dtype)
