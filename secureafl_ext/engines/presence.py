"""Presence: which clients count in the aggregate. The fused rounds do the same in C++ (csrc/round/presence.h).

A remembered update takes part in every later round. A client that sends one and then stays silent would move the model
for ever. So a client counts only if it is live (it uploaded within the last `expiry` epochs) and past its probation (it
has at least `probation` stored uploads).

The clock counts epochs, not rounds: otherwise a client that uploads often could age the others. An epoch ends when two
thirds of the clients that count have uploaded in it. So fewer than that cannot end it alone, however often they upload.
Only a stored upload moves the clock: a rejected one ages nobody.

Each upload makes a step along the remembered updates of all clients. A client that uploads often would decide how
often the model steps along the others' old updates; with step="received" it would even decide the direction. So a step
is full only if half of the clients that count keep up with the uploading client in this epoch. Otherwise its steps
shrink, to a sum of about FREE + 1 in an epoch. If fewer than half of the clients fall silent, the others keep up with
each other, and most steps stay full.

Over several epochs a client that uploads more than 1.5 times as often as the median client has smaller steps too: a
quarter, above 3 times a sixteenth, and so on. Then they add up to less than those of others: flooding gains nothing.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..config import GONE, Config

STALL = 16  # an epoch also ends after this many rounds per client that counts: otherwise a third could stop it
# Uploads of a client in an epoch that always make full steps, by the setting `step`. With step="received" each upload
# has a direction of its own, so there are fewer. With random arrivals 1 % of the steps are lost with 3, 5 % with 2.
FREE = {"all": 3, "received": 2}
AHEAD = 1.5  # a client with u uploads in an epoch keeps up with one that has AHEAD * u + the free ones
UPLOAD, MOST_RECENT = 1024, 2**40  # recent uploads are fixed-point numbers: 1.0, and a bound for numbers from a file
FADED = 64  # epochs: older uploads are not recent
LEVELS = 6  # steps are quartered at most so many times: at 1.5 times the median client's rate, at 3 times, ..
NEVER = 2**63 - 1  # expiry=None, in epochs


class Presence:
    """clock: (3) int64: the epoch, stored uploads in it, and whether probation applies (0 or 1)
    last_epoch: (n) int64, the epoch of each client's last stored upload; GONE if it left since
    uploads: (n, 3) int64, stored uploads of each client since its first contact, or since it left; those of them in its
    last epoch; and its recent ones in units of 1 / UPLOAD, as of its last epoch: they fade by an eighth per epoch

    Probation applies while at least three quarters of the live clients are past it. Otherwise a new server would learn
    nothing, and clients that upload often would be the only ones that count until the others have uploaded as often. A
    share f of attackers that pass it first is at most f / 0.75 of the clients that count.
    """

    def __init__(self, config: Config, clients: int, device: torch.device):
        self.expiry, self.probation = settings_of(config)
        self.free = FREE[config.step]
        self.clock = torch.zeros(3, dtype=torch.int64, device=device)
        self.last_epoch = torch.zeros(clients, dtype=torch.int64, device=device)
        self.uploads = torch.zeros(clients, 3, dtype=torch.int64, device=device)

    def tensors(self, clients: int | None = None) -> dict[str, Tensor]:
        """In the order of the ops' arguments; of the first `clients` clients."""
        return {"clock": self.clock, "last_epoch": self.last_epoch[:clients], "uploads": self.uploads[:clients]}

    def count_upload(self, client: Tensor, stored: Tensor, seen: Tensor) -> Tensor:
        """Move the clock if an upload of client (1) is stored. Returns the factor of this round's step, () float64.

        stored: () bool    seen: (n) bool, before this upload
        """
        epoch, rounds, _ = self.clock.unbind()
        recent = torch.where(self.last_epoch == epoch, self.uploads[:, 1], 0)  # (n), in this epoch
        own = recent.index_select(0, client)[0] + 1
        recent = recent.index_copy(0, client, own[None])
        often = self._recent()  # (n)
        own_often = often.index_select(0, client)[0] + UPLOAD
        often = often.index_copy(0, client, own_often[None])
        before = self.uploads.index_select(0, client)  # (1, 3)
        after = torch.stack([before[0, 0] + 1, own, own_often])[None]
        self.uploads.index_copy_(0, client, torch.where(stored, after, before))
        before = self.last_epoch.index_select(0, client)
        self.last_epoch.index_copy_(0, client, torch.where(stored, epoch, before))
        live = self.live(seen.index_fill(0, client, True))
        current, past = live & (self.last_epoch == epoch), self.uploads[:, 0] >= self.probation
        keeping = live & (AHEAD * recent >= own - self.free)
        applies = 4 * (live & past).sum() >= 3 * live.sum()
        counted, done, near = (torch.where(applies, (k & past).sum(), k.sum()) for k in (live, current, keeping))
        ends = (3 * done >= 2 * counted) | (rounds + 1 >= STALL * counted)
        full = (own <= self.free) | (2 * near >= counted) | (~stored if self.expiry != NEVER else True)
        after = torch.stack([epoch + ends, torch.where(ends, 0, rounds + 1), applies.long()])
        self.clock.copy_(torch.where(stored, after, self.clock))
        pace = torch.where(full, 1.0, (self.free / own.double()) ** 4)
        if self.expiry == NEVER:
            return pace
        levels = torch.arange(LEVELS, device=often.device)
        near = live & (3 * (often + UPLOAD) << levels[:, None] >= 2 * own_often)  # (LEVELS, n)
        near = torch.where(applies, (near & past).sum(1), near.sum(1))
        above = (2 * near < counted).sum()  # levels that the client is above; each has more clients than the one before
        return torch.where(stored, torch.minimum(pace, 0.25 ** above.double()), pace)

    def _recent(self) -> Tensor:
        """(n): the recent uploads of each client as of now."""
        left = self.uploads[:, 2].clamp(0, MOST_RECENT)
        age, oldest = self.clock[0] - self.last_epoch, min(self.expiry, FADED)
        for epochs in range(oldest):
            left = torch.where(age > epochs, left - (left + 7) // 8, left)
        return torch.where((self.last_epoch == GONE) | (age > oldest), 0, left)

    def live(self, seen: Tensor) -> Tensor:
        """(n) bool: clients of `seen` (n) that have uploaded within the last `expiry` epochs."""
        return seen & (self.last_epoch != GONE) & (self.clock[0] - self.last_epoch <= self.expiry)

    def mask(self, seen: Tensor) -> Tensor:
        """(n) bool: clients of `seen` (n) that count."""
        return self.live(seen) & ((self.uploads[:, 0] >= self.probation) | (self.clock[2] == 0))

    def forget(self, client: int) -> None:
        self.last_epoch[client] = 0
        self.uploads[client] = 0

    def leave(self, client: int) -> None:
        """The client counts no more until it is past its probation again."""
        self.last_epoch[client] = GONE
        self.uploads[client] = 0


def settings_of(config: Config) -> tuple[int, int]:
    """(expiry, probation) as the ops take them."""
    return NEVER if config.expiry is None else config.expiry, config.probation


def presence_counts(present: Tensor, live: Tensor, seen: Tensor) -> dict[str, int]:
    """For stats(): every client with a history is one of the three. All: (n) bool"""
    groups: Iterable[Tensor] = present, live & ~present, seen & ~live
    sums = torch.stack([group.sum() for group in groups]).tolist()
    return dict(zip(("present", "on_probation", "expired"), sums, strict=True))
