"""Watched: a server with observers. `submit` never waits for them, nor for the device."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..server.receipt import Receipt
from .look import look_at, similarity
from .observer import Observer
from .verdict import EVENTS, Look, Queue, Verdict

logger = logging.getLogger(__name__)

MOST_WAITING = 100_000  # queued verdicts; more are dropped and counted
LARGEST_BATCH = 1_000  # verdicts: a batch is one wait for the device
GATHER = 0.5  # seconds to gather a batch: if the thread woke up at every submit, it would slow that submit


@dataclass(slots=True)
class Upload:
    """A receipt that has not been read yet: its values may still be on their way from the device."""

    at: float
    seconds: float
    client: int
    who: str
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Evaluation:
    at: float
    version: int
    error: float


News = Upload | Verdict | Evaluation | Look  # for the observers


class Watched:
    """Use it in place of the server: it has the same methods. The observers are told about every call in a thread, in
    the order in which the server answered, whatever threads call it.

    server: SecureAFL, or another `Server`    observers: told in this order
    every: seconds between two looks at all clients; 0: none    names: client -> its name outside of the server
    A look takes as long as `server.weights()`, and a `submit` at the same time waits for it. It is of a single version,
    as long as all calls of the server go through this object.
    queue: set it to `loop.queue` if the server is in a Flower loop, and every look tells about it
    """

    def __init__(
        self,
        server: Any,
        observers: Sequence[Observer],
        *,
        every: float = 2.0,
        names: dict[int, str] | None = None,
    ):
        if not (math.isfinite(every) and every >= 0):
            raise ValueError(f"Watched: every must be a finite number of seconds, 0 or more, got {every}")
        self.server, self.observers, self.every = server, list(observers), every
        self.names = dict(names or {})
        self.queue: Callable[[], Queue] | None = None
        # Held from a call of the server until its news is queued, and during a look: so news is in the order of the
        # calls, and a look is of one version. Reentrant: a signal's handler may call within a call.
        self._calls = threading.RLock()
        self._waiting: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._told = threading.Condition()  # for the counts and _closed; no other lock is taken while it is held
        self._given = self._handled = self._dropped = 0
        self._closed = False
        self._hurry = threading.Event()  # someone waits for the observers
        self._thread = threading.Thread(target=self._tell_all, name="secureafl-observers", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the server."""
        return getattr(self.server, name)

    @property
    def version(self) -> int:
        return self.server.version

    @version.setter
    def version(self, value: int) -> None:
        self.server.version = value

    @property
    def lr(self) -> float:
        return self.server.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.server.lr = value

    def submit(self, client: int, update: Tensor, version: int) -> Receipt:
        """`server.submit`, and its receipt for the observers."""
        began = time.perf_counter()
        with self._calls:
            receipt = self.server.submit(client, update, version)
            seconds = time.perf_counter() - began
            client = int(client)
            self._give(Upload(time.time(), seconds, client, self.names.get(client, ""), receipt))
            return receipt

    def forget(self, client: int) -> None:
        with self._calls:
            self.server.forget(client)
            self._give(self._event("forgotten", client))
            self.names.pop(int(client), None)

    def leave(self, client: int) -> None:
        with self._calls:
            if hasattr(self.server, "leave"):  # optional in `Server`, and the Flower loop calls it where it is there
                self.server.leave(client)
            self._give(self._event("left", client))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._calls:
            self.server.load_state_dict(state)

    def event(self, event: Any) -> None:
        """For `Loop(watch=...)`: events that are no calls of the server. Node ids become the clients' names."""
        if event.kind == "joined":
            self.names[event.slot] = str(event.node)
        if event.kind in EVENTS and event.kind != "left":  # the loop calls `leave` too
            self._give(
                Verdict(time.time(), event.kind, event.slot, str(event.node), event.version, reason=event.reason)
            )

    def evaluated(self, error: float) -> None:
        """Tell the observers the error of the current model."""
        with self._calls:
            self._give(Evaluation(time.time(), self.server.version, float(error)))

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until the observers know everything so far. False if that takes longer."""
        self._hurry.set()
        with self._told:
            goal = self._given
            told = self._told.wait_for(lambda: self._handled >= goal, seconds)
        if not self._closed:
            self._hurry.clear()
        return told

    def close(self) -> None:
        """Tell the rest, and close the observers. The server stays usable; nobody is told about later calls."""
        with self._told:
            if self._closed:
                return
            self._closed = True
            self._waiting.put(None)  # nothing follows
        self._hurry.set()
        self._thread.join()

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> Look:
        """All clients now. Waits for the device."""
        return self._look(in_turn=False)

    def similarity(self, clients: Sequence[int]) -> np.ndarray | None:
        """(k, k) cosines of the mean updates of these clients: `look.similarity` of the server."""
        return similarity(self.server, clients)

    def _look(self, in_turn: bool) -> Look:
        """in_turn: also queue it for the observers, in order with the calls of the server."""
        queue = self.queue() if self.queue else None
        with self._calls:
            look = replace(look_at(self.server), queue=queue)
            if in_turn:
                self._give(look)
        return look

    def _event(self, kind: str, client: int) -> Verdict:
        client = int(client)
        return Verdict(time.time(), kind, client, self.names.get(client, ""), self.server.version)

    def _give(self, what: News) -> None:
        with self._told:
            if self._closed:  # nobody takes it: it would be kept for good
                return
            if self._waiting.qsize() >= MOST_WAITING and not isinstance(what, Look):  # at most one look waits
                self._dropped += 1
                return
            self._given += 1
            self._waiting.put(what)

    # The observers' thread

    def _tell_all(self) -> None:
        next_look = time.monotonic() + self.every if self.every else math.inf
        known_dropped, open_, look_waits = 0, True, False
        while open_:
            seconds = 0.0 if look_waits else max(0.0, min(next_look - time.monotonic(), 3600.0))
            batch, open_ = self._next_batch(seconds)
            try:
                self._tell_batch(batch)
            except Exception:
                logger.exception("Watched: %d receipts could not be read", len(batch))
            with self._told:
                dropped = self._dropped
            if dropped > known_dropped:
                self._tell("dropped", dropped - known_dropped)
                known_dropped = dropped
            with self._told:
                self._handled += len(batch)
                self._told.notify_all()
            if look_waits and any(isinstance(what, Look) for what in batch):
                look_waits, next_look = False, time.monotonic() + self.every
            if (not look_waits and time.monotonic() >= next_look) or (not open_ and self.every):
                try:
                    look = self._look(in_turn=open_)
                    look_waits = open_
                    if not open_:  # everything else has been told
                        self._tell("look", look)
                except Exception:
                    logger.exception("Watched: a look at the clients failed")
                next_look = time.monotonic() + self.every
        self._tell("close")

    def _next_batch(self, seconds: float) -> tuple[list[News], bool]:
        """(the news that came within these seconds, whether more may follow)"""
        batch: list[News] = []
        try:
            what = self._waiting.get(timeout=seconds) if seconds else self._waiting.get_nowait()
            if self._waiting.qsize() < LARGEST_BATCH:
                self._hurry.wait(min(GATHER, seconds))
            while what is not None:
                batch.append(what)
                if len(batch) == LARGEST_BATCH:
                    return batch, True
                what = self._waiting.get_nowait()
            return batch, False
        except queue.Empty:
            return batch, True

    def _tell_batch(self, batch: Sequence[News]) -> None:
        uploads = [what.receipt for what in batch if isinstance(what, Upload)]
        if uploads and uploads[0].accepted.is_cuda:
            torch.cuda.synchronize(uploads[0].accepted.device)  # they may come from any stream
        verdicts: list[Verdict] = []
        for what in batch:
            if isinstance(what, (Evaluation, Look)):
                self._tell("verdicts", verdicts)
                verdicts = []
                if isinstance(what, Look):
                    self._tell("look", what)
                else:
                    self._tell("evaluated", what.at, what.version, what.error)
            else:
                verdicts.append(read(what) if isinstance(what, Upload) else what)
        self._tell("verdicts", verdicts)

    def _tell(self, method: str, *arguments: object) -> None:
        if arguments == ([],):
            return
        for observer in self.observers:
            try:
                getattr(observer, method)(*arguments)
            except Exception:
                logger.exception("Watched: %s.%s failed", type(observer).__name__, method)


def read(upload: Upload) -> Verdict:
    """The verdict of a receipt. Waits for the device."""
    receipt, factor = upload.receipt, float(upload.receipt.factor)
    return Verdict(
        at=upload.at,
        kind=receipt.kind,
        client=upload.client,
        who=upload.who,
        version=receipt.version,
        staleness=receipt.staleness,
        factor=factor if math.isfinite(factor) else None,
        seconds=upload.seconds,
        reason=receipt.reason,
    )
