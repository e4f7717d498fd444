"""The data that observers get. Verdict: an event of one upload or one client. Look: all clients at one time."""

import math
from dataclasses import dataclass

import numpy as np

UPLOADS = {
    "accepted": "its update was accepted",
    "rejected": "its update was rejected",
    "stale": "its update was computed on a model that is no longer kept",
    "too_soon": "its update came before the client's turn",
}
EVENTS = {  # of the Flower loop; the others there are uploads
    "joined": "has a slot and gets the model",
    "waiting": "no slot is free",
    "left": "is no longer among the nodes",
    "forgotten": "everything that was kept of it is erased",
    "failed": "its app raised an error or crashed",
    "garbage": "its reply is not a finite model of this layout",
    "vanished": "no reply within the ttl",
    "late": "a reply after the ttl, dropped",
    "twice": "a reply to no message that is open, dropped",
    "unsent": "Flower took no message for it",
}
KINDS = {**UPLOADS, **EVENTS}
MEAN_UPDATES = ("with_others", "with_itself", "group")  # fields of Look: statistics of the mean updates


@dataclass(frozen=True, slots=True)
class Verdict:
    """An event: the result of one upload, or a change of one client."""

    at: float  # seconds since 1970
    kind: str  # of KINDS
    client: int | None  # the client's number at the server; None: it has none
    who: str  # the client's name outside of the server, for instance its Flower node id; "" if there is none
    version: int  # of the server, afterwards
    staleness: int | None = None  # of an upload
    factor: float | None = None  # Lipschitz factor of an upload; None if it is not defined
    seconds: float | None = None  # that `submit` took on the host
    reason: str = ""  # one line


@dataclass(frozen=True, slots=True)
class Queue:
    """The open messages, waiting replies and waiting nodes of a Flower loop."""

    open: int  # messages without a reply
    waiting: int  # replies that wait for their turn
    model_bytes: int  # that each of them holds
    longest_wait: float  # seconds since the oldest of them came
    to_ask: int  # nodes that get the model as soon as there is a place
    paused: int  # nodes that wait after a failure
    places: int  # `open` and `waiting` together are at most this

    @property
    def waiting_bytes(self) -> int:
        return self.waiting * self.model_bytes


@dataclass(frozen=True, slots=True)
class Look:
    """All clients at one time. Arrays have one entry per client."""

    at: float  # seconds since 1970
    version: int
    stats: dict[str, int]  # SecureAFL.stats()
    seen: np.ndarray  # (n) bool: with a history
    live: np.ndarray  # (n) bool: seen, and neither silent too long nor left
    present: np.ndarray  # (n) bool: live, and past its probation: these count
    weights: np.ndarray  # (n) float64 of the remembered updates in the next step
    left_out: np.ndarray | None  # (n) bool: present, with almost no weight; None if the rule has no weights
    threshold: float  # the largest factor that would be accepted now; inf if any would
    # Of the clients' mean updates, NaN if not known; None unless rule="kinship" or "support"
    with_others: np.ndarray | None = None  # (n) cosine with those of all others
    with_itself: np.ndarray | None = None  # (n) norm, 1: the median client's; near 0: its updates are noise
    group: np.ndarray | None = None  # (n) clients with similar ones, itself among them
    queue: Queue | None = None  # of the Flower loop, if the server is in one


def finite(value: float | None) -> float | None:
    """For JSON, which has no NaN and no infinity: None in place of them."""
    return float(value) if value is not None and math.isfinite(value) else None
