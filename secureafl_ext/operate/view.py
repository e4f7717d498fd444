"""View: the state of the live page. It needs the same memory for any number of uploads."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .buckets import Buckets, is_time
from .fleet import CODES, LONGEST_TEXT, MOST_CLIENTS, STATES, Fleet
from .observer import Observer
from .verdict import KINDS, UPLOADS, Look, Queue, Verdict, finite

TIMELINE = 4_000  # verdicts
MOST_ERRORS = 400  # evaluations; then every second one stays
MOST_NAMED = 200
MOST_ROWS = 100  # clients in one answer
RATE_SECONDS = 10.0  # the rate in the head is a mean over these
COMPARE_SECONDS = 1.0  # between two comparisons of all clients
COMPARE_SHARE = 0.01  # and new verdicts, per client: a forged log can have a second between any two lines
SHOWN = (*UPLOADS, "garbage", "failed")  # kinds with a curve of their own
STATE_SERIES = STATES[:4]


class View(Observer):
    """An observer that keeps the state of the page as JSON data. All methods may be called from any thread.

    title: shown at the top of the page
    """

    def __init__(self, title: str = ""):
        self.title = title[:LONGEST_TEXT]
        self.id = secrets.token_hex(4)  # a new one after a restart: then the page drops its data
        self.changes = 0
        self.fleet = Fleet()
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(KINDS, 0)
        self._series = Buckets((*SHOWN, "staleness", "staled"), ("oldest",), ("threshold", *STATE_SERIES))
        self._timeline: deque[tuple[int, float, int, int]] = deque(maxlen=TIMELINE)  # change, at, client, code
        self._recent: deque[float] = deque(maxlen=TIMELINE)  # times of uploads
        self._errors: list[tuple[float, int, float | None]] = []  # at, version, error
        self._named: deque[dict[str, Any]] = deque(maxlen=MOST_NAMED)
        self._version = self._dropped = self._damaged = 0
        self._newest: float | None = None
        self._compared_at, self._news = 0.0, 0  # verdicts and clients looked at since then
        self._threshold: float | None = None
        self._weighs: bool | None = None  # whether the rule can leave clients out; None: no look yet
        self._queue: Queue | None = None
        self._ended = False

    # As an observer

    def verdicts(self, batch: Sequence[Verdict]) -> None:
        with self._lock:
            for verdict in batch:
                if verdict.kind in CODES and is_time(verdict.at):
                    self._verdict(verdict)
                else:
                    self._damaged += 1

    def look(self, look: Look) -> None:
        with self._lock:
            if not is_time(look.at):
                self._damaged += 1
                return
            self._changed(look.at, look.version)
            self._weighs = look.left_out is not None
            self._threshold = finite(look.threshold)
            self._queue = look.queue
            self.fleet.look(look)
            self._news += len(look.seen)
            self._name(look.at, look.version)
            i, states = self._series.bucket(look.at), self._states()
            self._series.last["threshold"][i] = np.nan if self._threshold is None else self._threshold
            for state in STATE_SERIES:
                self._series.last[state][i] = states[state]

    def evaluated(self, at: float, version: int, error: float) -> None:
        with self._lock:
            if not is_time(at):
                self._damaged += 1
                return
            self._changed(at, version)
            self._errors.append((at, version, finite(error)))
            if len(self._errors) > MOST_ERRORS:
                self._errors = self._errors[-1::-2][::-1]  # the newest stays

    def dropped(self, count: int) -> None:
        with self._lock:
            self.changes += 1
            self._dropped += count

    def damaged(self, count: int = 1) -> None:
        """Count lines of a log that could not be read."""
        with self._lock:
            self.changes += 1
            self._damaged += count

    def close(self) -> None:
        with self._lock:
            self.changes += 1
            self._ended = True

    def _verdict(self, verdict: Verdict) -> None:
        self._changed(verdict.at, verdict.version)
        code = CODES[verdict.kind]
        self._totals[verdict.kind] += 1
        self.fleet.verdict(verdict)
        self._news += 1
        if abs(verdict.at - self._compared_at) >= COMPARE_SECONDS:
            self._name(verdict.at, verdict.version)
        i = self._series.bucket(verdict.at)
        if verdict.kind in SHOWN:
            self._series.sums[verdict.kind][i] += 1
            self._recent.append(verdict.at)
        if verdict.staleness is not None:
            self._series.sums["staleness"][i] += verdict.staleness
            self._series.sums["staled"][i] += 1
            oldest = self._series.largest["oldest"]
            if not oldest[i] >= verdict.staleness:  # NaN: the first one
                oldest[i] = verdict.staleness
        if verdict.client is not None and 0 <= verdict.client < MOST_CLIENTS:
            self._timeline.append((self.changes, verdict.at, verdict.client, code))

    def _name(self, at: float, version: int) -> None:
        if self._news < COMPARE_SHARE * len(self.fleet):
            return
        self._compared_at, self._news = at, 0
        for client in self.fleet.name(at, version):
            moment = {"client": client, "name": self.fleet.names[client], "at": at, "version": version}
            self._named.append({**moment, "why": self.fleet.reason(client)})

    def _changed(self, at: float, version: int) -> None:
        self.changes += 1
        self._version = version
        self._newest = at if self._newest is None else max(self._newest, at)

    # For the page

    def since(self) -> str:
        """Changes with every verdict, look and evaluation."""
        return f"{self.id}.{self.changes}"

    def snapshot(self, since: str = "", start: int = 0, count: int = MOST_ROWS, search: str = "") -> dict[str, Any]:
        """Everything that the page shows, as JSON data.

        since: that of the last answer; the timeline then has only newer verdicts
        start, count, search: select the rows of clients
        """
        with self._lock:
            now, states = time.time(), self._states()
            clients = self.fleet.suspicion(self.fleet.known())
            found = self.fleet.search(clients, search)
            start = max(0, min(start, len(found)))
            rows = found[start : start + max(0, min(count, MOST_ROWS))].tolist()
            return {
                "since": self.since(),
                "id": self.id,
                "title": self.title,
                "now": now,
                "at": self._newest,
                "ended": self._ended,
                "version": self._version,
                "rate": self._rate(now),
                "totals": {kind: count for kind, count in self._totals.items() if count},
                "dropped": self._dropped,
                "damaged": self._damaged,
                "threshold": self._threshold,
                "weighs": self._weighs,
                "queue": self._queue and {**asdict(self._queue), "waiting_bytes": self._queue.waiting_bytes},
                "states": states,
                "series": self._series_data(),
                "errors": {
                    name: [point[k] for point in self._errors] for k, name in enumerate(("at", "version", "error"))
                },
                "kinds": list(KINDS),
                "timeline": self._timeline_data(since),
                "named": self._named_data(),
                "clients": {
                    "total": len(clients),
                    "found": len(found),
                    "start": start,
                    "rows": self.fleet.rows(rows),
                },
            }

    def client(self, number: int) -> dict[str, Any] | None:
        """One client and its last verdicts, the newest first; None if there is no such client."""
        names = ("at", "kind", "version", "staleness", "factor", "reason")
        kinds = list(KINDS)
        with self._lock:
            if not 0 <= number < len(self.fleet) or number not in self.fleet.known():
                return None
            history = [
                dict(zip(names, (at, kinds[code], *rest), strict=True))
                for at, code, *rest in reversed(self.fleet.histories.get(number, ()))
            ]
            return {**self.fleet.rows([number])[0], "history": history}

    def suspects(self, most: int = 45, least: int = 15) -> list[int]:
        """Numbers of the most suspicious clients, and of the least suspicious ones to compare them with."""
        with self._lock:
            clients = self.fleet.suspicion(self.fleet.known()).tolist()
        return clients if len(clients) <= most + least else clients[:most] + clients[len(clients) - least :]

    def labels(self, clients: Sequence[int]) -> list[tuple[str, str]]:
        """(name, state) of each."""
        with self._lock:
            return [(self.fleet.names[client], STATES[self.fleet.state[client]]) for client in clients]

    def _states(self) -> dict[str, int]:
        """Number of known clients by state."""
        counted = np.bincount(self.fleet.state[self.fleet.known()], minlength=len(STATES))
        return dict(zip(STATES, counted.tolist(), strict=True))

    def _rate(self, now: float) -> float:
        """Uploads per second, lately. 0 if the last one was long ago."""
        if not self._recent:
            return 0.0
        begin = now - RATE_SECONDS
        if len(self._recent) == TIMELINE:  # so many that older ones of these seconds are not kept
            begin = max(begin, self._recent[0])
        recent = sum(begin < at <= now + RATE_SECONDS for at in self._recent)
        return recent / max(now - max(begin, self._series.start), 1.0)

    def _series_data(self) -> dict[str, Any]:
        series, used = self._series, self._series.used()
        seconds, staled = series.seconds(), series.sums["staled"][:used]
        staleness = np.divide(series.sums["staleness"][:used], staled, out=np.full(used, np.nan), where=staled > 0)
        return {
            "at": series.times().tolist(),
            "rates": {kind: (series.sums[kind][:used] / seconds).tolist() for kind in SHOWN if self._totals[kind]},
            "staleness": [finite(value) for value in staleness],
            "oldest": [finite(value) for value in series.largest["oldest"][:used]],
            **{name: [finite(value) for value in values[:used]] for name, values in series.last.items()},
        }

    def _named_data(self) -> list[dict[str, Any]]:
        """The newest first. now: whether the client is under suspicion still; another may have its number by now."""
        named_at, reason = self.fleet.named_at, self.fleet.reason
        return [
            {**moment, "now": bool(named_at[moment["client"]] == moment["at"] and reason(moment["client"]))}
            for moment in reversed(self._named)
        ]

    def _timeline_data(self, since: str) -> dict[str, list]:
        """Columns of the verdicts after `since`."""
        run, _, text = since.partition(".")
        known = int(text) if run == self.id and text.isdecimal() and len(text) < 20 else 0
        new = [entry[1:] for entry in self._timeline if entry[0] > known]
        return columns(("at", "client", "kind"), new)


def columns(names: Sequence[str], rows: Sequence[tuple]) -> dict[str, list]:
    return {name: [row[k] for row in rows] for k, name in enumerate(names)}
