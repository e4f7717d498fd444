"""The clock of docs/algorithm.md in NumPy: which clients count after each stored upload."""

from fractions import Fraction

import numpy as np

PAPER = {"expiry": None, "probation": 0}  # settings without expiry and probation


class Clock:
    def __init__(self, clients, expiry=8, probation=3, step="all"):
        self.free = {"all": 3, "received": 2}[step]
        self.expiry, self.probation = np.inf if expiry is None else expiry, probation
        self.epoch = self.rounds = self.applies = 0
        self.last = np.full(clients, np.nan)  # the epoch of the last stored upload
        self.gone, self.uploads, self.recent = np.zeros(clients, bool), np.zeros(clients, int), np.zeros(clients, int)
        self.often = [0] * clients  # recent uploads in units of 1 / 1024, as of the client's last epoch

    def stored(self, client):
        """Returns the factor of this round's step."""
        self.uploads[client] += 1
        self.often[client] = self.recently(client) + 1024
        self.recent[client] = self.in_epoch(client) + 1
        self.last[client], self.gone[client] = self.epoch, False
        live = self.live()
        past = [k for k in live if self.uploads[k] >= self.probation]
        self.applies = int(len(past) >= 0.75 * len(live))
        turning = past if self.applies else live
        self.rounds += 1
        done = sum(self.last[k] == self.epoch for k in turning)
        own = self.in_epoch(client)
        near = sum(self.in_epoch(k) >= (own - self.free) / 1.5 for k in turning)
        full = np.isinf(self.expiry) or own <= self.free or near >= len(turning) / 2
        pace = 1.0 if full else (self.free / own) ** 4
        often = self.often[client]
        if not np.isinf(self.expiry):
            for level in range(6):
                if 2 * sum(1.5 * (self.recently(k) + 1024) * 2**level >= often for k in turning) >= len(turning):
                    break
            else:
                level = 6
            pace = min(pace, 0.25**level)
        if done >= Fraction(2, 3) * len(turning) or self.rounds >= 16 * len(turning):
            self.epoch, self.rounds = self.epoch + 1, 0
        return pace

    def in_epoch(self, client):
        return self.recent[client] if self.last[client] == self.epoch else 0

    def recently(self, client):
        age = self.epoch - self.last[client]
        if np.isnan(age) or self.gone[client] or age > min(self.expiry, 64):
            return 0
        left = self.often[client]
        for _ in range(int(age)):
            left -= -(-left // 8)
        return left

    def live(self):
        return [k for k in range(len(self.last)) if self.epoch - self.last[k] <= self.expiry and not self.gone[k]]

    def present(self):
        live = set(self.live())
        new = {k for k in live if self.uploads[k] < self.probation}
        return sorted(live - new if self.applies else live)

    def forget(self, client):
        self.last[client], self.uploads[client], self.recent[client], self.gone[client] = np.nan, 0, 0, False
        self.often[client] = 0

    def leave(self, client):
        self.uploads[client], self.recent[client], self.often[client], self.gone[client] = 0, 0, 0, True
