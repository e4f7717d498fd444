"""Audited: a server whose calls are logged on disk before they return, so that a kill loses none that returned."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any

from torch import Tensor

from ..rules.registry import RuleError
from ..server.core import need_no_call
from ..server.receipt import Receipt
from ..validation import converted, name_of, number_in, shown, whole
from .facts import bytes_of, changed_settings, check_update, digest, settings_of, sha256, weight_of
from .line import CALLS, UPLOADS, Line, one_line
from .log import Log, read
from .replays import Place, after, find, replay
from .updates import REFUSED, Updates

KEEP = ("nothing", "recent", "all")
ROTATE = 16 * 2**20  # bytes: some 40,000 uploads
LEAST_ROTATE = 1024  # more than the first line of a file
REFUSALS = (ValueError, RuleError)  # of a server: the call changed nothing
MOST_STATES = 1000  # versions whose state was named and not saved


class Audited:
    """Use it in place of the server: it has the same methods. `Watched` can wrap it.

    server: SecureAFL without a process_group, or another `Server`    folder: of the log; one process at a time
    keep: updates to keep: "nothing"; "recent": those since the last checkpoint, so that `recover` works; "all"
    rotate: bytes after which the log begins a new file
    sync: wait for the disk at every call. False: a kill of the process loses nothing, a crash of the machine may
    weights: log the client's weight in the next step too. It costs what `server.weights()` costs, at every upload.

    The price: every call waits for the device, since its line has the verdict; and a state_dict or save hashes all of
    the state. `enqueue` does not work: nobody would see its updates.
    """

    def __init__(
        self,
        server: Any,
        folder: str | os.PathLike,
        *,
        keep: str = "nothing",
        rotate: int = ROTATE,
        sync: bool = False,
        weights: bool = False,
    ):
        if keep not in KEEP:
            raise ValueError(f"Audited: keep must be one of {', '.join(KEEP)}, got {shown(keep)}")
        expected = f"a whole number of bytes, {LEAST_ROTATE} or more"
        rotate = converted("Audited", "rotate", rotate, whole, expected, lambda size: size >= LEAST_ROTATE)
        if getattr(server, "_sharded", None) is not None:
            raise ValueError("Audited: server must have no process_group, got one: each rank has only its slices")
        if weights and not hasattr(server, "weights"):
            raise ValueError(f"Audited: weights must be False for a {type(server).__name__}, which has none, got True")
        self.server, self.folder, self.keep, self.weigh = server, Path(folder), keep, weights
        self.names: dict[int, str] = {}
        self._lock = threading.RLock()
        self._shape, self._dtype = server.model.shape, server.model.dtype
        self._updates = Updates(self.folder, sync)
        self._updates.need_own_folder()
        self._log = Log(self.folder, rotate, sync)
        self._at_head = False  # whether the server has the state that the end of the log describes
        self._behind = False  # whether the server has changed without a line
        self._state = ""  # digest of the last state that the log names
        self._states: dict[int, int] = {}  # version -> the first line that names a state of it

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the server."""
        return getattr(self.server, name)

    @property
    def version(self) -> int:
        return self.server.version

    @property
    def lr(self) -> float:
        return self.server.lr

    @lr.setter
    def lr(self, value: float) -> None:
        raise ValueError(
            f"Audited: lr must stay {self.server.lr}, got {shown(value)}: the log does not record a change of it"
        )

    @property
    def head(self) -> str:
        """The hash of the last line. Store it elsewhere: `verify` can then prove that the log was not cut or forged."""
        return self._log.head.hash

    def submit(self, client: int, update: Tensor, version: int) -> Receipt:
        """`server.submit`. When it returns, the log has its line, and the update is kept. Waits for the device."""
        with self._one_call("submit"):
            client = self._ready("submit", client)
            check_update(update, self._shape, self._dtype)
            data, seq = bytes_of(update), self._log.next_seq()
            about = {"update": sha256(data), "dtype": name_of(update.dtype), "shape": tuple(update.shape)}
            try:
                if self.keep != "nothing":
                    self._updates.put(seq, data)
                receipt = self._ask("submit", client, update, version)
            except (*REFUSALS, OSError):
                self._updates.drop(seq)
                raise
            kind, factor = receipt.kind, float(receipt.factor)
            weight = weight_of(self.server, client) if self.weigh else None
            self._note(kind, client, trained_on=index(version), factor=factor, weight=weight, **about)
            if kind in REFUSED and self.keep == "recent":  # or a flood of them would fill the disk
                self._updates.drop(seq)
            return receipt

    def leave(self, client: int) -> None:
        """`server.leave`, if the server has it, and a line in any case."""
        with self._one_call("leave"):
            client = self._ready("leave", client)
            if hasattr(self.server, "leave"):
                self._ask("leave", client)
            self._note("leave", client)

    def forget(self, client: int) -> None:
        with self._one_call("forget"):
            client = self._ready("forget", client)
            self._ask("forget", client)
            self._note("forget", client)
            self.names.pop(client, None)

    def name_client(self, client: int, who: object) -> None:
        """Name the client in all later lines; the line `joined` records it. The name is cut to 100 characters."""
        with self._one_call("name_client"):
            client = self._ready("name_client", client)
            name = one_line(str(who))
            self._log.append("joined", client=client, who=name, version=self.server.version)
            self.names[client] = name  # not before: an error of the disk must leave the old one

    def enqueue(self, *_: object, **__: object) -> Receipt:
        raise ValueError("Audited.enqueue: not supported, the log needs the update and the verdict; use submit")

    @property
    def capturable(self) -> bool:
        return False

    # Checkpoints and recovery

    def state_dict(self) -> dict[str, Any]:
        """`server.state_dict`, after a line with its digest, by which `recover` finds the place in the log."""
        with self._one_call("state_dict"):
            self._need_head("state_dict")
            return self._name_state()

    def save(self, path: str | os.PathLike) -> None:
        """`server.save`, after a line with the digest of the state."""
        with self._one_call("save"):
            self._need_head("save")
            version = self._name_state()["version"]
            self.server.save(path)
            self.checkpointed(version)

    def checkpointed(self, version: int) -> None:
        """A state of this version, from `state_dict`, has been saved: with keep="recent" older updates are deleted."""
        with self._lock:
            if self.keep == "recent":
                self._updates.drop_before(self._states.get(version, 0))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`server.load_state_dict`. Then call `recover`: until then the server takes no calls."""
        with self._one_call("load_state_dict"):
            self._ask("load_state_dict", state)
            self._at_head = self._behind = False

    def recover(self, tell: Callable[[Line], None] = lambda line: None, *, give_up: bool = False) -> int:
        """Repeat the calls that the log has after the server's state. Returns the number of calls repeated.

        Call it after every start: the server has the state of a checkpoint, or that of its beginning. Afterwards its
        state is that before the kill, bit for bit. Every verdict is compared with the log; a difference is an error.

        tell: called with every line after the state, in order
        give_up: repeat nothing, go on from the state as it is, and log that the calls after it are lost. With
        keep="nothing" this happens by itself if updates are missing.
        """
        with self._one_call("recover"):
            if self._behind:
                raise ValueError(f"Audited.recover: {BEHIND}")
            if self._at_head:
                return 0
            place = find(self.folder, digest(self.server.state_dict()))
            if place is None:
                self._begin()
                return 0
            calls, missing = self._survey(place)
            if give_up or (missing and self.keep == "nothing"):
                self._resume(place, calls)
                return 0
            if missing:
                how = "load a later checkpoint, or call recover(give_up=True)"
                raise ValueError(f"Audited.recover: the update of line {missing.seq} is not kept; {how}")
            self._repeat(place, calls, tell)
            return calls

    def close(self) -> None:
        """Close the log. Nothing is written: a server that was closed recovers like one that was killed."""
        with self._lock:
            self._log.close()

    def __enter__(self) -> "Audited":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _one_call(self, method: str) -> Iterator[None]:
        """Hold the lock. Refuse a call within another one of this thread: a signal's handler would take the line number
        of the call that it interrupts."""
        need_no_call(self._lock, f"Audited.{method}")
        with self._lock:
            yield

    def _need_head(self, method: str) -> None:
        if self._behind:
            raise ValueError(f"Audited.{method}: {BEHIND}")
        if not self._at_head and self._log.head.seq > 1:
            raise ValueError(f"Audited.{method}: {self.folder} has a log, call recover() before any other call")
        if not self._at_head:
            self._begin()

    def _ready(self, method: str, client: int) -> int:
        """The client as a plain number, if it is one of the server's."""
        self._need_head(method)
        return number_in(f"Audited.{method}", "client", client, 0, self.server.clients - 1)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the server. Unless it refuses, the server is ahead of the log until the next line."""
        before, version, self._behind = self._behind, self.version, True
        try:
            return getattr(self.server, method)(*arguments)
        except REFUSALS:  # or the error of a signal's handler, after the round
            self._behind = before or self.version != version
            raise

    def _note(self, kind: str, client: int, **fields: Any) -> None:
        self._log.append(kind, client=client, who=self.names.get(client, ""), version=self.server.version, **fields)
        self._behind = False

    def _begin(self) -> None:
        """Name the first state of the log."""
        if any(line.kind in CALLS for line in read(self.folder)):
            how = "load a checkpoint that was written under this log, or take another folder"
            raise ValueError(f"Audited: the log in {self.folder} names no state like the server's; {how}")
        self._name_state()
        self._at_head = True

    def _name_state(self) -> dict[str, Any]:
        """The server's state, after a line with its digest. A state that the last such line names gets no second one:
        recovery from its checkpoint starts at the first."""
        state = self.server.state_dict()
        named = digest(state)
        if named != self._state:
            line = self._log.append("state", version=self.version, state=named, settings=settings_of(self.server))
            self._log.to_disk()  # before a checkpoint is: a crash of the machine must not leave one that is not named
            self._named(line)
        return state

    def _named(self, line: Line) -> None:
        self._state = line.state
        self._states.setdefault(line.version, line.seq)
        if len(self._states) > MOST_STATES:
            del self._states[next(iter(self._states))]

    def _survey(self, place: Place) -> tuple[int, Line | None]:
        """(calls after the place, the first of them whose update is not kept)"""
        calls, missing = 0, None
        for line in after(self.folder, place):
            calls += line.kind in CALLS
            if line.kind in UPLOADS and not self._updates.has(line):
                missing = missing or line
        return calls, missing

    def _resume(self, place: Place, calls: int) -> None:
        line = self._log.append(
            "resumed", version=self.version, state=place.line.state, settings=settings_of(self.server), count=calls
        )
        self._log.to_disk()
        self._states.clear()
        self._named(line)
        self._at_head = True

    def _repeat(self, place: Place, calls: int, tell: Callable[[Line], None]) -> None:
        changed = changed_settings(place.line.settings, settings_of(self.server))
        if changed and calls:
            how = "recover with the old settings and save, then change them"
            raise ValueError(f"Audited.recover: {calls} calls were made with other settings: {changed}; {how}")

        def learn(line: Line) -> None:
            if line.kind == "joined":
                self.names[line.client] = line.who
            elif line.kind == "forget":
                self.names.pop(line.client, None)
            tell(line)

        replay(self.server, self.folder, place, tell=learn)
        self._named(place.line)
        self._state = "" if calls or changed else place.line.state
        self._log.append("recovered", version=self.version, count=calls)
        if changed:
            self._name_state()
        self._at_head = True


BEHIND = (
    "an earlier call changed the server and could not be logged, so the server is ahead of its log; "
    "load a checkpoint and call recover"
)
