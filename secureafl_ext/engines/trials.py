"""Trials: the steps of a newcomer grow from nothing to full.

A client that has lost its weight could come back under a fresh number, of which nothing is known, and have full steps
until it is found again. In a trial its updates are judged like all others, but they hardly move the model.

A newcomer's progress is that of its trial, and its steps are as long as its progress compared with the usual one: that
of the median active client, which usually has no trial. If most clients are newcomers (all nodes came back under new
ids after a failure), the model would otherwise stand almost still, and there would be nobody to protect.

The trial is counted in epochs, on the host: it knows who uploads, but no verdicts. A client is active if it had a round
in the last RECENT epochs and has not left. An epoch ends when two thirds of the active clients have had a round in it
that was not their first: newcomers alone cannot end one. Or after STALL rounds for each: if many clients have fallen
silent, trials must end too.
"""

import torch
from torch import Tensor

FOUNDING = 10  # epochs after the quorum has come in which a new client is a founder: founders have no trial
RETURN = 10  # epochs of the trial of a client that left and comes back: its updates are still known
RECENT, STALL = 8, 16
NEW, LEFT = -1, -2  # in place of the epoch of a client's last round
WHOLE = 2**20  # the progress of a client without a trial, or after it
COLUMNS = 4


class Trials:
    """epochs: of a newcomer's trial    quorum: clients that must have come before the founding ends"""

    def __init__(self, clients: int, epochs: int, quorum: int):
        self.epochs, self.quorum = epochs, max(quorum, 1)
        self.epoch, self.rounds = 0, 0  # rounds: in this epoch
        self.founded = NEW  # the epoch in which the quorum had come
        self.usual = WHOLE  # progress of the median active client, at the end of the last epoch
        self.last = [NEW] * clients  # epoch of each client's last round
        self.again = [NEW] * clients  # the same of rounds that were not its first
        self.began, self.lasts = [0] * clients, [0] * clients  # epoch in which each client's trial began; its epochs
        self._count()

    def share(self, client: int) -> float:
        """Of a full step, that this client may make now."""
        progress = self._progress(client)
        return progress / self.usual if progress < self.usual else 1.0

    def count_round(self, client: int) -> None:
        self.began[client], self.lasts[client] = self._trial(client)
        last = self.last[client]
        self.rounds += 1
        self._active += last < self._oldest()
        self.last[client] = self.epoch
        if last == NEW:
            self._met += 1
            if self.founded == NEW and self._met >= self.quorum:
                self.founded = self.epoch
        elif self.again[client] < self.epoch:
            self.again[client] = self.epoch
            self._done += 1
        if 3 * self._done >= 2 * self._active or self.rounds >= STALL * self._active:
            self.epoch, self.rounds = self.epoch + 1, 0
            self._count()
            progress = sorted(map(self._progress, self._active_clients()))
            self.usual = progress[len(progress) // 2]

    def leave(self, client: int) -> None:
        """When it comes back it has a short trial."""
        if self.last[client] != NEW:
            self._stop_counting(client)
            self.last[client] = LEFT

    def forget(self, client: int) -> None:
        """Whoever has this number next is a newcomer, in the time of the founders too."""
        if self.last[client] != NEW:
            self._stop_counting(client)
            self._met -= 1
            self.last[client] = NEW
            self.began[client], self.lasts[client] = 0, self.epochs

    def shares(self) -> list[float]:
        """(n): as `share`, of all clients."""
        return [self.share(client) for client in range(len(self.last))]

    def on_trial(self) -> int:
        """Number of active or silent clients whose steps still grow."""
        return sum(self.last[client] >= 0 and share < 1 for client, share in enumerate(self.shares()))

    def tensor(self, device: torch.device | None) -> Tensor:
        """(n + 1, COLUMNS) int64: the clock, then each client."""
        rows = zip(self.last, self.again, self.began, self.lasts, strict=True)
        return torch.tensor([(self.epoch, self.rounds, self.founded, self.usual), *rows], device=device)

    def load(self, state: Tensor) -> None:
        (self.epoch, self.rounds, self.founded, self.usual), *rows = state.tolist()
        self.last, self.again, self.began, self.lasts = (list(column) for column in zip(*rows, strict=True))
        self._count()

    def _trial(self, client: int) -> tuple[int, int]:
        """(began, lasts) of this client, if it has a round now."""
        if self.last[client] == NEW:
            founding = self.founded == NEW or self.epoch < self.founded + FOUNDING
            return self.epoch, self.epochs if self.lasts[client] or not founding else 0
        if self.last[client] == LEFT:
            on_trial = self.epoch - self.began[client] < self.lasts[client]
            return self.epoch, self.epochs if on_trial else min(RETURN, self.epochs)
        return self.began[client], self.lasts[client]

    def _progress(self, client: int) -> int:
        began, lasts = self._trial(client)
        passed = self.epoch - began
        return WHOLE if passed >= lasts else WHOLE * passed // lasts

    def _oldest(self) -> int:
        """Epoch from which on the last round of an active client is."""
        return max(self.epoch - RECENT, 0)

    def _active_clients(self) -> list[int]:
        oldest = self._oldest()
        return [client for client, last in enumerate(self.last) if last >= oldest]

    def _stop_counting(self, client: int) -> None:
        self._active -= self.last[client] >= self._oldest()
        self._done -= self.again[client] == self.epoch
        self.again[client] = NEW

    def _count(self) -> None:
        self._met = sum(last != NEW for last in self.last)
        self._active = len(self._active_clients())
        self._done = sum(again == self.epoch for again in self.again)


def founders(seen: Tensor) -> Tensor:
    """The state of a server without trials, as `Trials.tensor`: nobody is on trial. seen: (n) bool"""
    state = torch.zeros(1 + len(seen), COLUMNS, dtype=torch.int64, device=seen.device)
    state[0, 3] = WHOLE
    state[1:, 0], state[1:, 1] = torch.where(seen, 0, NEW), NEW
    return state
