"""The clock of docs/algorithm.md in NumPy: which clients count after each stored upload."""

import numpy as np

PAPER = {"expiry": None, "probation": 0}  # settings without expiry and probation


class Clock:
    def __init__(self, clients, expiry=8, probation=3, step="all"):
        self.free = {"all": 3, "received": 2}[step]
        self.expiry, self.probation = np.inf if expiry is None else expiry, probation
        self.epoch = self.rounds = self.applies = 0
        self.last = np.full(clients, np.nan)  # the epoch of the last stored upload
        self.gone, self.uploads, self.recent = np.zeros(clients, bool), np.zeros(clients, int), np.zeros(clients, int)
        self.often = np.zeros(clients, int)  # recent uploads in units of 1 / 1024, as of the client's last epoch

    def stored(self, client):
        """Returns the factor of this round's step."""
        self.uploads[client] += 1
        recently, in_epoch = self.recently(), np.where(self.last == self.epoch, self.recent, 0)
        recently[client] += 1024
        in_epoch[client] += 1
        self.often[client], self.recent[client] = recently[client], in_epoch[client]
        self.last[client], self.gone[client] = self.epoch, False
        live = self.live()
        past = live & (self.uploads >= self.probation)
        self.applies = int(4 * np.count_nonzero(past) >= 3 * np.count_nonzero(live))
        turning = past if self.applies else live
        count = np.count_nonzero(turning)
        self.rounds += 1
        pace = self.pace(in_epoch[client], in_epoch[turning], recently[client], recently[turning])
        done = np.count_nonzero(self.last[turning] == self.epoch)
        if 3 * done >= 2 * count or self.rounds >= 16 * count:
            self.epoch, self.rounds = self.epoch + 1, 0
        return pace

    def pace(self, own, in_epoch, often, recently):
        """From the client's uploads in this epoch and recently, and those of all who turn the clock, (count) each."""
        if np.isinf(self.expiry):
            return 1.0
        half = len(in_epoch) / 2
        ahead = own > self.free and np.count_nonzero(in_epoch >= (own - self.free) / 1.5) < half
        level = next((j for j in range(6) if np.count_nonzero(1.5 * (recently + 1024) * 2**j >= often) >= half), 6)
        return min((self.free / own) ** 4 if ahead else 1.0, 0.25**level)

    def recently(self):
        age = self.epoch - self.last
        left = np.where((age <= min(self.expiry, 64)) & ~self.gone, self.often, 0)
        for passed in range(int(age[left > 0].max(initial=0))):
            left -= np.where(age > passed, -(-left // 8), 0)
        return left

    def live(self):
        return (self.epoch - self.last <= self.expiry) & ~self.gone

    def present(self):
        counts = self.live()
        return np.flatnonzero(counts & (self.uploads >= self.probation) if self.applies else counts).tolist()

    def forget(self, client):
        self.last[client], self.uploads[client], self.recent[client], self.gone[client] = np.nan, 0, 0, False
        self.often[client] = 0

    def leave(self, client):
        self.uploads[client], self.recent[client], self.often[client], self.gone[client] = 0, 0, 0, True
