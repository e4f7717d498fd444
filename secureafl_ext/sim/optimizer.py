"""Adam as the server's optimizer, for all defenses alike: FedAdam (Reddi et al. 2021) without momentum.

A defense moves the model by some step. Adam divides each coordinate of it by its root mean square over the rounds.
Updates are up to `delay` versions old, and the coordinates with the largest curvature limit the step of plain SGD;
divided by their size, they do not.
"""

import torch
from torch import Tensor

MEMORY = 0.999  # beta_2: the mean square is over about a thousand rounds
SMALLEST = 1e-8  # epsilon


class Adam:
    """square: (d) running mean of the squared steps of the defense    missing: () weight in it of its start, zero
    rate: () learning rate of the next steps, on the device: a captured graph follows it
    """

    def __init__(self, model: Tensor, lr: float, decay: float):
        self.decay, self.smallest = decay, lr * SMALLEST  # a step of the defense is lr times a direction
        self.square = torch.zeros_like(model)
        self.missing = torch.ones((), dtype=model.dtype, device=model.device)
        self.rate = torch.full_like(self.missing, lr)

    def step(self, before: Tensor, after: Tensor) -> None:
        """Replace the model `after` a round by that of Adam's step from the model `before` it. (d) each. If the defense
        did not move the model, nothing changes."""
        moved = before - after
        steps = moved.any()
        self.square.mul_(torch.where(steps, MEMORY, 1.0)).addcmul_(moved, moved, value=1 - MEMORY)
        self.missing.mul_(torch.where(steps, MEMORY, 1.0))
        size = self.square.sqrt().add_(self.smallest)
        kept = before * (1 - self.rate * self.decay * steps)
        stepped = kept.addcdiv_(moved.mul_(self.rate * (1 - self.missing).sqrt()), size, value=-1)
        torch.where(stepped.isfinite(), stepped, before, out=after)  # a coordinate that overflows keeps its value
