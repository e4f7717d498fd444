"""AsyncSGD: no defense. Each update is a step."""

import torch
from torch import Tensor

from .base import Arrival, Verdict


class AsyncSGD:
    """Every update is a step. The paper cites the delay-compensated variant but describes the plain one."""

    REASONS = ("accepted",)

    def __init__(self, model: Tensor, clients: int):
        self.nothing = torch.full((), torch.nan, dtype=torch.float64, device=model.device)
        self.first_word = torch.zeros((), dtype=torch.int64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        return Verdict(arrival.update, arrival.finite, self.nothing, self.first_word)
