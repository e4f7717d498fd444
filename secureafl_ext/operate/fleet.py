"""Fleet: the statistics of all clients for a view, in arrays with one row per client number."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from .verdict import KINDS, Look, Verdict, finite

MOST_CLIENTS = 20_000  # numbers above are counted in the totals alone
HISTORY = 200  # verdicts per client, while few clients share the room
ALL_HISTORIES = 200_000  # verdicts of all clients together
LONGEST_TEXT = 120  # characters of a name or a reason
CODES = {kind: code for code, kind in enumerate(KINDS)}
REFUSED = [CODES[kind] for kind in ("rejected", "garbage", "failed")]
# When a client is named. A single look leaves out an honest client now and then, and the filter rejects some honest
# uploads by design. So: means over several looks, or far more refused uploads than the median client has.
# docs/guides/watch.md has how soon these bounds name attackers, and how many honest clients (bench/naming.py).
LOOKS = np.array([10, 5, 10, 10])  # that a mean is over, roughly: of `means`. A client with fewer is not judged by it
LOW = 0.1  # times the median of the mean weights
AGAINST = -0.2  # cosine with the others, and this many standard deviations below the median client's:
APART = 2.0
NOISY = 0.2  # norm of the mean update, 1 being the median client's
CROWDED = 1.7  # times the median size of the clients' groups
LATELY = 50  # uploads that count for this, roughly: weights fall by 1 / LATELY with each
FEWEST = 8  # of them
USUAL = 0.05  # share of refused uploads, at least, that is taken for the median client's
TIMES = 2.5  # this many times the median client's share,
SPREADS = 4.0  # and this many standard deviations of a binomial distribution above it
STATES = ("left out", "counts", "on probation", "expired", "left", "new")  # new: no look has seen it yet
LEFT_OUT, COUNTS, PROBATION, EXPIRED, LEFT, NEW = range(len(STATES))

WEIGHT, OTHERS, ITSELF, GROUP = range(4)  # columns of `means`
IS_LOW, IS_AGAINST, IS_NOISY, IS_CROWDED, IS_REFUSED = range(5)  # columns of `why`
SUMS = ("staleness_sum", "means", "lately", "lately_refused")  # begin at 0; other floats are unknown at first

Entry = tuple[float, int, int, int | None, float | None, str]  # at, code, version, staleness, factor, reason


class Fleet:
    """Rows grow with the largest client number, up to MOST_CLIENTS."""

    def __init__(self) -> None:
        self.counts = np.zeros((0, len(KINDS)), np.int64)
        self.staleness_sum, self.staleness_count = np.zeros(0), np.zeros(0, np.int64)
        self.factor, self.weight, self.last_at = np.full(0, np.nan), np.full(0, np.nan), np.full(0, np.nan)
        self.with_others = np.full(0, np.nan)
        self.state = np.full(0, NEW, np.int8)
        self.has_left = np.zeros(0, bool)  # since its last upload
        self.looks, self.looks_out = np.zeros(0, np.int64), np.zeros(0, np.int64)  # while it counts; left out
        # In the last looks: weight times the number of clients that count, with_others, with_itself, group
        self.means, self.mean_looks = np.zeros((0, 4)), np.zeros((0, 4), np.int64)
        self.lately, self.lately_refused = np.zeros(0), np.zeros(0)  # uploads, by weight
        self.why = np.zeros((0, 5), bool)  # reasons to name it now
        self.named_at, self.named_version = np.full(0, np.nan), np.zeros(0, np.int64)
        self.names: list[str] = []
        self.histories: dict[int, deque[Entry]] = {}
        self._longest = HISTORY

    def __len__(self) -> int:
        return len(self.names)

    def grow(self, clients: int) -> None:
        """Room for this many clients. Doubles, so that a client at a time costs little."""
        clients = min(clients, MOST_CLIENTS)
        if clients <= len(self):
            return
        more = clients - len(self)
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray) and len(values) < clients:
                room = min(MOST_CLIENTS, max(clients, 2 * len(values)))
                empty = np.nan if values.dtype.kind == "f" and name not in SUMS else 0
                grown = np.full((room, *values.shape[1:]), NEW if name == "state" else empty, values.dtype)
                grown[: len(values)] = values
                setattr(self, name, grown)
        self.names += [""] * more

    def verdict(self, verdict: Verdict) -> None:
        client = verdict.client
        if client is None or not 0 <= client < MOST_CLIENTS:
            return
        self.grow(client + 1)
        if verdict.kind == "forgotten":
            self._clear(client)
            return
        code = CODES[verdict.kind]
        self.counts[client, code] += 1
        self.last_at[client] = verdict.at
        if verdict.who:
            self.names[client] = verdict.who[:LONGEST_TEXT]
        if verdict.staleness is not None:
            self.staleness_sum[client] += verdict.staleness
            self.staleness_count[client] += 1
        if verdict.factor is not None:
            self.factor[client] = verdict.factor
        self.has_left[client] = verdict.kind == "left"
        if verdict.kind == "left":
            self.state[client] = LEFT
        elif self.state[client] == LEFT:
            self.state[client] = NEW
        reason = "" if verdict.kind == "accepted" else verdict.reason[:LONGEST_TEXT]  # always the same
        entry = (verdict.at, code, verdict.version, verdict.staleness, verdict.factor, reason)
        self._history(client).append(entry)
        if code in REFUSED or verdict.kind == "accepted":
            self.lately[client] += 1 - self.lately[client] / LATELY
            self.lately_refused[client] += (code in REFUSED) - self.lately_refused[client] / LATELY

    def look(self, look: Look) -> None:
        n = min(len(look.seen), MOST_CLIENTS)
        masks = look.seen, look.live, look.present, np.zeros(n, bool) if look.left_out is None else look.left_out
        seen, live, present, without = (np.asarray(mask, bool)[:n] for mask in masks)
        given = look.weights, look.with_others, look.with_itself, look.group
        numbers = [np.full(n, np.nan) if values is None else np.asarray(values, float)[:n] for values in given]
        weights, *mean_updates = numbers
        if any(values.shape != (n,) for values in (live, present, without, *numbers)):
            got = [len(values) for values in (seen, live, present, without, *numbers)]
            raise ValueError(f"View.look: look must have one entry per client in every array, got {got}")
        self.grow(n)
        choices = [without, present, live, seen & self.has_left[:n], seen]
        self.state[:n] = np.select(choices, [LEFT_OUT, COUNTS, PROBATION, LEFT, EXPIRED], self.state[:n])
        self.state[:n][~seen] = np.where(self.has_left[:n], LEFT, NEW)[~seen]
        self.weight[:n] = np.where(seen, weights, np.nan)
        self.looks[:n] += present
        self.looks_out[:n] += without
        now = np.stack([weights * present.sum(), *mean_updates], 1)  # (n, 4)
        known = present[:, None] & np.isfinite(now)
        self.with_others[:n] = np.where(known[:, OTHERS], now[:, OTHERS], np.nan)
        self.mean_looks[:n] += known
        step = (now - self.means[:n]) / np.clip(self.mean_looks[:n], 1, LOOKS)
        self.means[:n] += np.where(known, step, 0)

    def name(self, at: float, version: int) -> list[int]:
        """Compare the clients. Returns those that are named now, for the first time."""
        n, refused = self.lately, self.lately_refused
        share = refused / np.maximum(n, 1)
        enough = n >= FEWEST * (1 - 1 / LATELY) ** FEWEST
        usual = np.clip(np.median(share[enough]), USUAL, 1 - USUAL) if enough.any() else 1 - USUAL
        is_far = refused - n * usual > SPREADS * np.sqrt(n * usual * (1 - usual))
        self.why[:, IS_REFUSED] = enough & (share > TIMES * usual) & is_far
        judged = (self.state <= COUNTS)[:, None] & (self.mean_looks >= LOOKS)  # (n, 4)
        weight, others, itself, group = self.means.T
        middle, _ = middle_of(weight[judged[:, WEIGHT]])
        self.why[:, IS_LOW] = judged[:, WEIGHT] & (weight < LOW * middle)
        middle, spread = middle_of(others[judged[:, OTHERS]])
        self.why[:, IS_AGAINST] = judged[:, OTHERS] & (others < min(AGAINST, middle - APART * spread))
        self.why[:, IS_NOISY] = judged[:, ITSELF] & (itself < NOISY)
        middle, _ = middle_of(group[judged[:, GROUP]])
        self.why[:, IS_CROWDED] = judged[:, GROUP] & (group > CROWDED * middle)
        first = np.flatnonzero(self.why.any(1) & np.isnan(self.named_at))
        self.named_at[first], self.named_version[first] = at, version
        return first.tolist()

    def reason(self, client: int) -> str:
        """Why a client is under suspicion now; "" if it is not."""
        weight, others, itself, group = self.means[client].tolist()
        if self.why[client, IS_LOW]:
            return f"its weight is {weight:.2f} of the mean"
        if self.why[client, IS_AGAINST]:
            return f"its updates point against those of the others, cosine {others:.2f}"
        if self.why[client, IS_NOISY]:
            return f"its updates have no direction in common, mean norm {itself:.2f} of the median client's"
        if self.why[client, IS_CROWDED]:
            return f"it is one of {group:.0f} clients that send similar updates, far more than usual"
        if self.why[client, IS_REFUSED]:
            return f"{self.lately_refused[client] / self.lately[client]:.0%} of its last uploads were refused"
        return ""

    def known(self) -> np.ndarray:
        """Client numbers with a verdict, or seen by a look."""
        n = len(self)
        return np.flatnonzero(self.counts[:n].any(1) | (self.state[:n] != NEW))

    def suspicion(self, clients: np.ndarray) -> np.ndarray:
        """These clients, the most suspicious first: with a reason to be named now, then left out now, then the share of
        looks that left it out, then the share of its uploads that were refused, then a low weight."""
        counts = self.counts[clients]
        refused = counts[:, REFUSED].sum(1) / np.maximum(counts.sum(1), 1)
        left_out = self.looks_out[clients] / np.maximum(self.looks[clients], 1)
        weight = np.nan_to_num(self.weight[clients], nan=np.inf)
        weight[self.state[clients] != COUNTS] = np.inf  # nobody else has one
        # lexsort sorts by the last key first.
        is_out = self.state[clients] == LEFT_OUT
        has_reason = self.why[clients].any(1)
        return clients[np.lexsort((clients, weight, -refused, -left_out, ~is_out, ~has_reason))]

    def search(self, clients: np.ndarray, text: str) -> np.ndarray:
        """Those of the clients with this text in their name, number or state, in the same order."""
        text = text.strip().lower()
        if not text:
            return clients
        found = [c for c in clients.tolist() if text in f"{c} {self.names[c]} {STATES[self.state[c]]}".lower()]
        return np.array(found, np.int64)

    def rows(self, clients: Sequence[int]) -> list[dict[str, object]]:
        """One dict of JSON data per client; None for a number that is not known."""
        return [self._row(client) for client in clients]

    def _row(self, client: int) -> dict[str, object]:
        counts, uploads = self.counts[client], int(self.staleness_count[client])
        named = None if np.isnan(self.named_at[client]) else float(self.named_at[client])
        return {
            "client": client,
            "name": self.names[client],
            "state": STATES[self.state[client]],
            "counts": {kind: int(counts[code]) for kind, code in CODES.items() if counts[code]},
            "staleness": float(self.staleness_sum[client]) / uploads if uploads else None,
            "factor": finite(self.factor[client]),
            "weight": finite(self.weight[client]),
            "with_others": finite(self.with_others[client]),
            "left_out": int(self.looks_out[client]) / int(self.looks[client]) if self.looks[client] else None,
            "named_at": named,
            "named_version": None if named is None else int(self.named_version[client]),
            "reason": self.reason(client),
            "last_at": finite(self.last_at[client]),
        }

    def _history(self, client: int) -> deque[Entry]:
        """The client's verdicts. The more clients there are, the fewer verdicts of each are kept."""
        if client not in self.histories:
            self.histories[client] = deque(maxlen=self._longest)
            share = ALL_HISTORIES // (1 << (len(self.histories) - 1).bit_length())  # halves when clients double
            if share < self._longest:
                self._longest = max(1, share)
                self.histories = {each: deque(kept, self._longest) for each, kept in self.histories.items()}
        return self.histories[client]

    def _clear(self, client: int) -> None:
        """Reset the client's row: another client may take this number."""
        blank = Fleet()
        blank.grow(1)
        for name, values in vars(blank).items():
            if isinstance(values, np.ndarray):
                getattr(self, name)[client] = values[0]
        self.names[client] = ""
        self.histories.pop(client, None)


def middle_of(values: np.ndarray) -> tuple[float, float]:
    """The median, and a standard deviation that a minority cannot enlarge: of the distances from the median."""
    if not len(values):
        return 0.0, 0.0
    middle = float(np.median(values))
    return middle, 1.4826 * float(np.median(np.abs(values - middle)))
