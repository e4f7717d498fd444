"""History: last update, last model and L-BFGS pairs of every client, in the layout of the ops."""

import torch
from torch import Tensor

from .. import ops
from ..config import Config
from .host_memory import history_zeros

CURVATURE = 1e-8  # a pair is kept only if s.y > CURVATURE * s.s: otherwise its Hessian is not positive definite


class History:
    """Last update and model, and the newest L-BFGS pairs, of n clients. Nothing here waits for the device.

    last_updates, last_models: (n, d), or (0, d) if they are not kept
    dw, dg: (n, memory, d), oldest first in slots 0 .. pairs[k] - 1    pairs: (n) int64    seen: (n) bool
    """

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        memory, kept = config.memory, clients if config.keeps_last else 0

        def zeros(*shape: int) -> Tensor:
            return history_zeros(config.history_device, *shape, dtype=config.dtype, device=device)

        self.last_updates, self.last_models = zeros(kept, size), zeros(kept, size)
        self.dw, self.dg = zeros(clients, memory, size), zeros(clients, memory, size)
        self.pairs = torch.zeros(clients, dtype=torch.int64, device=device)
        self.seen = torch.zeros(clients, dtype=torch.bool, device=device)
        self._slots = torch.arange(memory, device=device)[:, None]  # (memory, 1)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, in the order of the ops' arguments."""
        names = ("last_updates", "last_models", "dw", "dg", "pairs", "seen")
        return {name: getattr(self, name) for name in names}

    def estimates(self, model: Tensor, trust: float, clients: slice = slice(None)) -> Tensor:
        """(n, d) as ops.estimate gives them, of these clients."""
        c = clients
        last = self.last_updates[c], self.last_models[c]
        return ops.estimate(model, *last, self.dw[c], self.dg[c], self.pairs[c], trust)

    def remember(self, client: Tensor, update: Tensor, model: Tensor, when: Tensor) -> None:
        """Store update, computed at model, as the last of client (1) int64 if `when` () bool is true."""
        known = self.seen.index_select(0, client)[0]
        if len(self.last_updates):
            last_update, last_model = self.of(client)
            self.push(client, model - last_model, update - last_update, when & known)
            self.last_updates.index_copy_(0, client, torch.where(when, update, last_update)[None])
            self.last_models.index_copy_(0, client, torch.where(when, model, last_model)[None])
        self.seen.index_copy_(0, client, (known | when)[None])

    def forget(self, client: int) -> None:
        for rows in self.tensors().values():
            rows[client : client + 1] = 0  # a slice: there may be no rows

    def of(self, client: Tensor) -> tuple[Tensor, Tensor]:
        """Last update (d) and last model (d) of client (1)."""
        return self.last_updates.index_select(0, client)[0], self.last_models.index_select(0, client)[0]

    def push(self, client: Tensor, dw: Tensor, dg: Tensor, when: Tensor) -> None:
        """Append the pair (dw, dg) if `when` is true and its curvature positive; drop the oldest pair if full."""
        memory = self.dw.shape[1]
        if memory == 0:
            return
        s, y = dw.double(), dg.double()
        useful = when & (s @ y > CURVATURE * (s @ s)) & (y @ y).isfinite()
        count = self.pairs.index_select(0, client)  # (1)
        full = count == memory
        here = self._slots == count - full.long()  # (memory, 1)
        for pairs, new in ((self.dw, dw), (self.dg, dg)):
            rows = pairs.index_select(0, client)[0]  # (memory, d)
            kept = torch.where(full, rows.roll(-1, 0), rows)
            pairs.index_copy_(0, client, torch.where(useful, torch.where(here, new, kept), rows)[None])
        self.pairs.index_copy_(0, client, count + (useful & ~full))
