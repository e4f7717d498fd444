"""Adam for all defenses alike: gradients are scaled before the defense judges them.

Updates are up to `delay` versions old, and the coordinates with the largest curvature limit the step of plain SGD;
divided by their usual size, they do not. Adam behind the defense does that too, but then it enlarges coordinates that
the defense saw as small, and attackers hide there. So every gradient is scaled where it is computed: those of clients,
of attackers, and of the server's own data.
"""

import torch
from torch import Tensor

MEMORY = 0.999  # beta_2: the mean square is over about a thousand rounds
# Coordinates of this usual size are halved, smaller ones hardly change. It is epsilon in Adam and tau in FedAdam (Reddi
# et al. 2021); there the rate is divided by it.
USUAL = 1e-3
START = 1e-2  # the usual size at first: steps are small until it fades, which is a warm-up


class Adam:
    """scale: (d) factor of every gradient, in (0, 1)    square: (d) running mean of the squared directions
    rate: () learning rate of the next steps, on the device: a captured graph follows it
    """

    def __init__(self, model: Tensor, lr: float, decay: float):
        self.lr, self.decay = lr, decay
        self.square = torch.full_like(model, START**2)
        self.scale = torch.full_like(model, USUAL / (USUAL + START))
        self.rate = torch.full((), lr, dtype=model.dtype, device=model.device)

    def step(self, before: Tensor, after: Tensor) -> None:
        """Replace the model `after` a round: the step from `before` has this round's rate, and weights decay. (d) each.
        If the defense did not move the model, nothing changes."""
        moved = before - after
        steps = moved.any()
        direction = moved / (self.lr * self.scale)  # as it was before it was scaled
        square = self.square.lerp(direction.square(), (1 - MEMORY) * steps)
        self.square.copy_(torch.where(square.isfinite(), square, self.square))
        torch.div(USUAL, self.square.sqrt() + USUAL, out=self.scale)
        stepped = before * (1 - self.rate * self.decay * steps) - moved * (self.rate / self.lr)
        torch.where(stepped.isfinite(), stepped, before, out=after)  # a coordinate that overflows keeps its value
