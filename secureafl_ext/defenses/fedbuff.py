"""FedBuff with a trimmed mean: a buffer of updates, one robust step when it is full."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from .base import Arrival, Verdict, need

# Factor of an update by its staleness ().
STALENESS: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda staleness: (1 + staleness) ** -0.5,
    "off": torch.ones_like,
}


class FedBuffTrimmedMean:
    """Collects `buffer` updates, each scaled by 1 / sqrt(1 + staleness). When the buffer is full, the model steps along
    their trimmed mean, and the buffer is empty again.

    Source: Nguyen et al., AISTATS 2022 (FedBuff, with a mean); trimmed mean: Yin et al., ICML 2018
    buffer: K, 10 in FedBuff    server_lr: eta_g, the step is server_lr * trimmed mean
    trim: values dropped on either side of each coordinate. Default: a fifth of the buffer
    staleness: "sqrt" as above, or "off"
    Nothing is kept per client: one that uploads often fills the buffer alone.
    """

    REASONS = ("accepted: buffered", "accepted: buffer full, a step")

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        buffer: int = 10,
        trim: int | None = None,
        server_lr: float = 1.0,
        staleness: str = "sqrt",
    ):
        need(buffer >= 1, "FedBuffTrimmedMean", "buffer", "1 or more", buffer)
        most = (buffer - 1) // 2
        self.trim = min(round(0.2 * buffer), most) if trim is None else trim
        need(0 <= self.trim <= most, "FedBuffTrimmedMean", "trim", f"0 to {most}", trim)
        need(server_lr > 0, "FedBuffTrimmedMean", "server_lr", "positive", server_lr)
        choices = ", ".join(STALENESS)
        need(staleness in STALENESS, "FedBuffTrimmedMean", "staleness", f"one of {choices}", staleness)
        self.server_lr, self.staleness = server_lr, staleness
        self.buffered = torch.zeros(buffer, len(model), dtype=model.dtype, device=model.device)
        self.count = torch.zeros((), dtype=torch.int64, device=model.device)
        self.nothing = torch.full((), torch.nan, dtype=torch.float64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        slot = self.count.reshape(1)
        scaled = arrival.update * STALENESS[self.staleness](arrival.staleness)
        old = self.buffered.index_select(0, slot)[0]
        self.buffered.index_copy_(0, slot, torch.where(arrival.finite, scaled, old)[None])
        count = self.count + arrival.finite
        full = count == len(self.buffered)
        step = self.server_lr * ops.trimmed_mean(self.buffered, self.trim)
        self.count.copy_(torch.where(full, 0, count))
        return Verdict(torch.where(full, step, 0), arrival.finite, self.nothing, full.long())
