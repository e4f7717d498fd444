"""When an attacker attacks: by the share of the run that is done. One function for the device and for the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..defenses.base import need


@dataclass(frozen=True)
class Timing:
    """start, stop: shares of the run between which it attacks    period: share of the run
    duty: it attacks in the first part of every period, which is this share of the period
    silence: a client stays silent after so many attacking uploads; 0: never
    """

    start: float
    stop: float
    duty: float
    period: float
    silence: int

    def check(self, who: str) -> None:
        need(0 <= self.start <= 1, who, "start", "0 to 1, a share of the run", self.start)
        need(self.start <= self.stop <= 1, who, "stop", f"start ({self.start}) to 1, a share of the run", self.stop)
        need(0 < self.duty <= 1, who, "duty", "above 0, at most 1", self.duty)
        need(1e-6 <= self.period <= 1, who, "period", "0.000001 to 1, a share of the run", self.period)
        need(self.silence >= 0, who, "silence", "0 or more uploads", self.silence)

    def attacks(self, progress: Tensor) -> Tensor:
        """bool: whether it attacks at this progress, a tensor of any shape."""
        return (progress >= self.start) & (progress < self.stop) & ((progress / self.period).frac() < self.duty)

    def turn(self, progress: Tensor, count: int) -> Tensor:
        """int64, 0 to count - 1: the item of a list of this length whose turn it is. It changes with every period."""
        return (progress / self.period).long() % count

    def uploads(self, client: Tensor, malicious: Tensor) -> Tensor:
        """(rounds) bool: see Attack. A client is silent after `silence` attacking uploads; honest ones do not count."""
        if not self.silence:
            return torch.ones_like(malicious)
        progress = torch.arange(len(client), dtype=torch.float64) / len(client)
        harmful = malicious & self.attacks(progress)
        keeps = torch.ones_like(malicious)
        for attacker in client[malicious].unique():
            own = client == attacker
            before = harmful[own].cumsum(0) - harmful[own].long()  # attacking uploads before each of its arrivals
            keeps[own] = before < self.silence
        return keeps
