"""Trials by their definition, and a server that has them."""

from statistics import median_high

import torch

from secureafl_ext import SecureAFL
from secureafl_ext.engines.trials import FOUNDING, RETURN

N, D = 12, 40
TRIAL = {"rule": "support", "step": "received", "memory": 0, "filter": False, "probation": 0, "lr": 0.1, "trial": 20}


class Definition:
    """The same in sets and dicts: who had which rounds in which epoch."""

    def __init__(self, trial, quorum):
        self.trial, self.quorum = trial, quorum
        self.epoch, self.rounds, self.founded, self.usual = 0, 0, None, 1.0
        self.history = {}  # client -> (epoch, whether it was its first) of its rounds
        self.left, self.forgotten, self.needs, self.since = set(), set(), {}, {}

    def share(self, client):
        return min(self.progress(client) / self.usual, 1.0)

    def progress(self, client):
        if client not in self.history:
            began_late = self.founded is not None and self.epoch >= self.founded + FOUNDING
            return 0.0 if began_late or client in self.forgotten else 1.0
        if client in self.left:
            return 0.0
        silent = self.epoch - self.history[client][-1][0] > 8
        needs = self.trial if silent and not self.needs[client] else self.needs[client]
        return 1.0 if self.served(client) >= needs else self.served(client) / needs

    def served(self, client):
        """Epochs with a round that was not its first, since it came or came back."""
        return len({epoch for epoch, first in self.history[client][self.since[client] :] if not first})

    def submitted(self, client):
        first = client not in self.history
        if first:
            self.needs[client] = 0 if self.progress(client) else self.trial
            self.history[client], self.since[client] = [], 0
        elif client in self.left:
            if self.served(client) >= max(self.needs[client], RETURN):
                self.needs[client] = min(RETURN, self.trial)
            elif not self.needs[client]:
                self.needs[client] = self.trial
            self.since[client] = len(self.history[client])
            self.left.remove(client)
        elif not self.needs[client] and self.epoch - self.history[client][-1][0] > 8:
            self.needs[client] = self.trial
        if self.founded is None and len(self.history) >= self.quorum:
            self.founded = self.epoch
        self.history[client].append((self.epoch, first))
        self.rounds += 1
        active = [c for c, rounds in self.history.items() if c not in self.left and rounds[-1][0] >= self.epoch - 8]
        done = [c for c in active if (self.epoch, False) in self.history[c][self.since[c] :]]
        if 3 * len(done) >= 2 * len(active) or self.rounds >= 16 * len(active):
            self.epoch, self.rounds = self.epoch + 1, 0
            active = [c for c in active if self.history[c][-1][0] >= self.epoch - 8]
            self.usual = median_high([self.progress(c) for c in active])

    def forget(self, client):
        if client in self.history:
            del self.history[client]
            self.left.discard(client)
            self.forgotten.add(client)

    def leave(self, client):
        if client in self.history:
            self.left.add(client)


def founded(device="cpu", size=D, **settings):
    """A server whose founding is over."""
    server = SecureAFL(torch.zeros(size, device=device), N, **TRIAL | settings)
    random = torch.Generator().manual_seed(0)
    for i in range(2 * FOUNDING * (N - 1)):
        server.submit(i % (N - 1), torch.randn(size, generator=random).to(device), server.version)
    return server
