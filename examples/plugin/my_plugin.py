"""A plug-in for `secureafl`: the attack `my-attack` and the defense `my-defense`."""

import torch
from torch import Tensor

from secureafl_ext.attacks import Scene, Simple, View, register_attack
from secureafl_ext.defenses import Arrival, Verdict, register_defense


def my_attack(scene: Scene, *, strength: float = 5.0) -> Simple:
    """Inner product manipulation: the honest mean with the opposite sign, times `strength`."""

    def update(view: View) -> Tensor:
        batches = scene.data.train(view.honest)  # one minibatch of each honest client
        return -strength * scene.net.gradients(view.model, *batches).mean(0)

    return Simple(update, honest=scene.honest)


class MyDefense:
    """Rejects an update whose norm is above `factor` times the moving average of the accepted norms."""

    REASONS = ("accepted", "rejected: norm above the average")

    def __init__(self, model: Tensor, clients: int, *, factor: float = 2.0, momentum: float = 0.9):
        self.factor, self.momentum = factor, momentum
        self.average = torch.zeros((), dtype=torch.float64, device=model.device)  # 0: nothing was accepted yet

    def judge(self, arrival: Arrival) -> Verdict:
        norm, accepted = torch.linalg.vector_norm(arrival.update).double(), self.would_accept(arrival)
        average = torch.where(self.average > 0, self.momentum * self.average + (1 - self.momentum) * norm, norm)
        self.average.copy_(torch.where(accepted, average, self.average))
        return Verdict(arrival.update, accepted, norm, (~accepted).long())

    def would_accept(self, arrival: Arrival) -> Tensor:
        """Optional. The attack `adaptive` asks it."""
        norm = torch.linalg.vector_norm(arrival.update).double()
        return arrival.finite & ((self.average == 0) | (norm <= self.factor * self.average))


def register() -> None:
    register_attack("my-attack", my_attack, about="the honest mean with the opposite sign")
    register_defense("my-defense", MyDefense, about="norm filter against the average of accepted norms")
