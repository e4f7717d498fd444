"""What APPFL loads by path for the clients of the example."""

import numpy as np
from appfl.algorithm.trainer import VanillaTrainer
from fleet import ATTACK


def accuracy(labels: np.ndarray, logits: np.ndarray) -> float:
    return float((logits.argmax(1) == labels).mean())


class MaliciousTrainer(VanillaTrainer):
    """Trains as the others do, and sends the opposite, much longer."""

    def get_parameters(self) -> tuple[dict, dict]:
        update, about = super().get_parameters()
        return {name: ATTACK * value for name, value in update.items()}, about
