"""BASGD: the median over buffers of averaged updates."""

import torch
from torch import Tensor

from .. import ops
from .base import Arrival, Verdict, need


class BASGD:
    """Averages updates in buffers. When no buffer is empty, it steps along the median of the averages.

    buffers: B. Default: a fifth of the clients, at least 5 and at most 10. More than twice the number of malicious
    clients would be safe, but slow
    interval: after this many updates without a step, the active clients are assigned to buffers again. Default: 4 B
    trim: None for the median; otherwise the trimmed mean that drops this many averages on either side
    Attribute `steps`: the number of steps so far. Each round computes a median, because only the device knows whether a
    buffer is empty (an update that is not finite fills none).
    """

    REASONS = ("accepted: buffered", "accepted: no buffer empty, a step")

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        buffers: int | None = None,
        interval: int | None = None,
        trim: int | None = None,
    ):
        size = min(clients, max(5, min(10, clients // 5))) if buffers is None else buffers
        need(1 <= size <= clients, "BASGD", "buffers", f"1 to {clients}", buffers)
        self.interval = 4 * size if interval is None else interval
        need(self.interval >= 1, "BASGD", "interval", "1 or more", interval)
        need(trim is None or 0 <= 2 * trim < size, "BASGD", "trim", f"None or 0 to {(size - 1) // 2}", trim)
        self.trim = trim

        def counter(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=model.device)

        self.means = torch.zeros(size, len(model), dtype=model.dtype, device=model.device)
        self.counts = counter(size)
        self.clients = torch.arange(clients, device=model.device)
        self.mapping = self.clients.clone()
        # clients that sent an update since the last step
        self.heard = torch.zeros(clients, dtype=torch.bool, device=model.device)
        self.waited, self.steps = counter(), counter()
        self.nothing = torch.full((), torch.nan, dtype=torch.float64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        self._fill(arrival)
        full = arrival.finite & (self.counts > 0).all()
        middle = ops.median(self.means) if self.trim is None else ops.trimmed_mean(self.means, self.trim)
        self._spread(arrival, full)
        self.counts *= ~full
        self.steps += full
        return Verdict(torch.where(full, middle, 0), arrival.finite, self.nothing, full.long())

    def _fill(self, arrival: Arrival) -> None:
        buffer = self.mapping.index_select(0, arrival.client) % len(self.means)
        count = self.counts.index_select(0, buffer).reshape(()) + arrival.finite
        mean = self.means.index_select(0, buffer)[0]
        # A weighted mean, not mean + difference / count: the first update must replace the old value exactly.
        added = mean * ((count - 1).double() / count) + arrival.update / count
        self.means.index_copy_(0, buffer, torch.where(arrival.finite, added, mean)[None])
        self.counts.index_copy_(0, buffer, count.reshape(1))

    def _spread(self, arrival: Arrival, full: Tensor) -> None:
        """Assign the active clients to buffers again. Otherwise buffers of absent clients would stay empty for ever.
        The rule is from memory of the original, not from its text."""
        self.heard |= (self.clients == arrival.client) & arrival.finite
        self.waited += arrival.finite
        due = ~full & (self.waited >= self.interval)
        self.mapping.copy_(torch.where(due & self.heard, self.heard.cumsum(0) - 1, self.mapping))
        self.waited *= ~(full | due)
        self.heard &= ~full
