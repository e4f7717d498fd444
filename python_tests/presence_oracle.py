"""The clock of docs/algorithm.md in NumPy: which clients count after each stored upload."""

from fractions import Fraction

import numpy as np

PAPER = {"expiry": None, "probation": 0}  # settings without expiry and probation


class Clock:
    def __init__(self, clients, expiry=8, probation=3):
        self.expiry, self.probation = np.inf if expiry is None else expiry, probation
        self.epoch = self.rounds = self.applies = 0
        self.last = np.full(clients, np.nan)  # the epoch of the last stored upload
        self.gone, self.uploads = np.zeros(clients, bool), np.zeros(clients, int)

    def stored(self, client):
        """Returns the factor of this round's step."""
        self.uploads[client] += 1
        self.last[client], self.gone[client] = self.epoch, False
        live = self.live()
        past = [k for k in live if self.uploads[k] >= self.probation]
        self.applies = int(len(past) >= 0.75 * len(live))
        turning = past if self.applies else live
        self.rounds += 1
        done = sum(self.last[k] == self.epoch for k in turning)
        pace = 1.0 if np.isinf(self.expiry) else min(1.0, 1.5 * len(turning) / self.rounds) ** 4
        if done >= Fraction(2, 3) * len(turning) or self.rounds >= 16 * len(turning):
            self.epoch, self.rounds = self.epoch + 1, 0
        return pace

    def live(self):
        return [k for k in range(len(self.last)) if self.epoch - self.last[k] <= self.expiry and not self.gone[k]]

    def present(self):
        live = set(self.live())
        new = {k for k in live if self.uploads[k] < self.probation}
        return sorted(live - new if self.applies else live)

    def forget(self, client):
        self.last[client], self.uploads[client], self.gone[client] = np.nan, 0, False

    def leave(self, client):
        self.uploads[client], self.gone[client] = 0, True
