"""Trials: the steps of a newcomer grow from nothing to full.

An attacker that has lost its weight could come back under a new client number and make full steps until it is found
again. In a trial a client's updates are judged like all others, but they hardly move the model.

A trial lasts a number of epochs in which the client uploads: to be silent, or to upload often in one epoch, does not
shorten it. A newcomer's progress is the share of its trial that has passed. Its steps are scaled by progress / usual
progress, at most by 1. The usual progress is that of the median active client, as a rule one without a trial. If all
nodes come back under new ids after a failure, most clients are newcomers: without this comparison the model would
stand almost still, though there are no known clients to protect from them.

Epochs are counted on the host: it knows who uploads, but no verdicts. A client is active if it had a round in the last
RECENT epochs and has not left. An epoch ends when two thirds of the active clients have had a round in it that was not
their first: newcomers alone cannot end one. Or after STALL rounds for each: if many clients have fallen silent, trials
must end too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FOUNDING = 10  # epochs after the quorum has come in which a new client is a founder: founders have no trial
RETURN = 10  # epochs of the trial of a client that left and comes back: its updates are still known
RECENT, STALL = 8, 16
NEW, LEFT = -1, -2  # in place of the epoch of a client's last round
WHOLE = 2**20  # the progress of a client without a trial, or after it
COLUMNS = 4


class Trials:
    """epochs: of a newcomer's trial    quorum: number of clients that must have come before the founding ends"""

    def __init__(self, clients: int, epochs: int, quorum: int):
        self.epochs, self.quorum = epochs, max(quorum, 1)
        self.epoch, self.rounds = 0, 0  # rounds: in this epoch
        self.founded = NEW  # the epoch in which the quorum was reached; NEW: it is not yet
        self.usual = WHOLE  # progress of the median active client, at the end of the last epoch
        self.last = [NEW] * clients  # epoch of each client's last round
        self.again = [NEW] * clients  # epoch of each client's last round that was not its first
        self.served = [0] * clients  # epochs with such a round, since the client came or came back
        self.needs = [0] * clients  # length of its trial in such epochs; 0: no trial
        self._active: set[int] = set()
        self._met = self._done = 0  # clients that ever had a round; those with one, not their first, in this epoch
        self._recount()

    def share(self, client: int) -> float:
        """The part of a full step that this client may make now: 0 to 1."""
        progress = self._progress(client)
        return progress / self.usual if progress < self.usual else 1.0

    def count_round(self, client: int) -> None:
        self.served[client], self.needs[client] = self._trial(client)
        first, self.last[client] = self.last[client] == NEW, self.epoch
        self.rounds += 1
        self._active.add(client)
        if first:
            self._met += 1
            if self.founded == NEW and self._met >= self.quorum:
                self.founded = self.epoch
        elif self.again[client] < self.epoch:
            self.again[client] = self.epoch
            self.served[client] += 1
            self._done += 1
        if 3 * self._done >= 2 * len(self._active) or self.rounds >= STALL * len(self._active):
            self._end_epoch()

    def undo_of(self, client: int) -> Callable[[], None]:
        """A function that undoes the next `count_round` of this client, also one that an error has cut short."""
        lists = self.last, self.again, self.served, self.needs
        own = [numbers[client] for numbers in lists]
        clock = self.epoch, self.rounds, self.founded, self.usual, self._met, self._done
        active, was_active = self._active, client in self._active

        def undo() -> None:
            for numbers, number in zip(lists, own, strict=True):
                numbers[client] = number
            self.epoch, self.rounds, self.founded, self.usual, self._met, self._done = clock
            self._active = active  # the end of an epoch makes a new one
            if not was_active:
                active.discard(client)

        return undo

    def leave(self, client: int) -> None:
        """Record that the client left. When it comes back it has a short trial."""
        if self.last[client] != NEW:
            self._stop_counting(client)
            self.last[client] = LEFT

    def forget(self, client: int) -> None:
        """The next client with this number is a newcomer with a trial, even while others are founders."""
        if self.last[client] != NEW:
            self._stop_counting(client)
            self._met -= 1
            self.last[client], self.served[client], self.needs[client] = NEW, 0, self.epochs

    def shares(self) -> list[float]:
        """(n): `share` of every client."""
        return [self.share(client) for client in range(len(self.last))]

    def on_trial(self) -> int:
        """Number of active or silent clients whose steps still grow."""
        return sum(self.last[client] >= 0 and share < 1 for client, share in enumerate(self.shares()))

    def tensor(self, device: torch.device | None) -> Tensor:
        """(n + 1, COLUMNS) int64: the clock, then each client."""
        rows = zip(self.last, self.again, self.served, self.needs, strict=True)
        return torch.tensor([(self.epoch, self.rounds, self.founded, self.usual), *rows], device=device)

    def load(self, state: Tensor) -> None:
        (self.epoch, self.rounds, self.founded, self.usual), *rows = state.tolist()
        self.last, self.again, self.served, self.needs = (list(column) for column in zip(*rows, strict=True))
        self._recount()

    def _trial(self, client: int) -> tuple[int, int]:
        """(served, needs) of this client as they will be if it has a round now."""
        last, served, needs = self.last[client], self.served[client], self.needs[client]
        if last == NEW:
            founding = self.founded == NEW or self.epoch < self.founded + FOUNDING
            return 0, self.epochs if needs or not founding else 0
        if last == LEFT:
            known = served >= max(needs, RETURN)
            return 0, min(RETURN, self.epochs) if known else needs or self.epochs
        if not needs and self.epoch - last > RECENT:  # a founder that fell silent: its number may have been a reserve
            return served, self.epochs
        return served, needs

    def _progress(self, client: int) -> int:
        """The share of the client's trial that has passed, times WHOLE."""
        served, needs = self._trial(client)
        return WHOLE if served >= needs else WHOLE * served // needs

    def _end_epoch(self) -> None:
        self.epoch, self.rounds, self._done = self.epoch + 1, 0, 0
        oldest = self._oldest()
        self._active = {client for client in self._active if self.last[client] >= oldest}
        progress = sorted(map(self._progress, self._active))
        self.usual = progress[len(progress) // 2]

    def _oldest(self) -> int:
        """The earliest epoch that the last round of an active client can have."""
        return max(self.epoch - RECENT, 0)

    def _stop_counting(self, client: int) -> None:
        self._active.discard(client)
        self._done -= self.again[client] == self.epoch
        self.again[client] = NEW

    def _recount(self) -> None:
        """Compute the counts that follow from the lists. They are kept so that no round must look at all clients."""
        oldest = self._oldest()
        self._met = sum(last != NEW for last in self.last)
        self._active = {client for client, last in enumerate(self.last) if last >= oldest}
        self._done = sum(again == self.epoch for again in self.again)


def founders(seen: Tensor) -> Tensor:
    """The state of a server without trials, as `Trials.tensor`: nobody is on trial. seen: (n) bool"""
    state = torch.zeros(1 + len(seen), COLUMNS, dtype=torch.int64, device=seen.device)
    state[0, 3] = WHOLE
    state[1:, 0], state[1:, 1] = torch.where(seen, 0, NEW), NEW
    return state
