"""A server of a few lines, so that a history takes milliseconds: the mean of the present clients' last updates."""

import torch
from torch import Tensor

from secureafl_ext.server.receipt import Receipt, stale_receipt

LONGEST = 20.0  # norm of an update that is accepted


class PlainServer:
    """Everything that the loop tells a server shows in its state: who submitted what, in which order, who left."""

    def __init__(self, model: Tensor, clients: int, lr: float, max_staleness: int):
        self.clients, self.lr, self.max_staleness = clients, lr, max_staleness
        self.version, self.model = 0, model.clone()
        self.last = torch.zeros(clients, len(model))
        self.count = torch.zeros(clients, dtype=torch.int64)  # rounds since the client joined
        self.present = torch.zeros(clients, dtype=torch.bool)

    def submit(self, client: int, update: Tensor, version: int) -> Receipt:
        staleness = self.version - version
        if staleness > self.max_staleness:
            return stale_receipt(version, self.version, self.max_staleness, update.device)
        factor = torch.linalg.vector_norm(update.double())
        accepted = factor <= LONGEST
        if accepted:
            self.last[client], self.present[client] = update, True
            self.count[client] += 1
            self.model = self.model - self.lr * self.last[self.present].mean(0)
        self.version += 1
        return Receipt(accepted, factor, staleness, self.version, "short enough" if accepted else "too long")

    def leave(self, client: int) -> None:
        self.present[client] = False

    def forget(self, client: int) -> None:
        self.last[client], self.count[client], self.present[client] = 0.0, 0, False

    def state_dict(self) -> dict[str, Tensor | int]:
        tensors = {"model": self.model, "last": self.last, "count": self.count, "present": self.present}
        return {"version": self.version, **tensors}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        self.version = state["version"]
        for name in ("model", "last", "count", "present"):
            setattr(self, name, state[name].clone())
