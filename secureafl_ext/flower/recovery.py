"""Recovery of a loop with an audited server: after a kill, slots and counts are those at the last line of the log."""

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..audit.audited import Audited
from ..audit.line import Line
from ..audit.log import read
from .saved import LARGEST, Saved

if TYPE_CHECKING:
    from .loop import Loop

COUNTED = {  # kind of a line -> kind of event
    "joined": "joined",
    "leave": "left",
    "accepted": "accepted",
    "rejected": "rejected",
    "stale": "stale",
    "too_soon": "stale",
}


class NoAudit:
    """In place of `Audited`, for a server that is not audited."""

    def name_client(self, client: int, who: object) -> None: ...
    def checkpointed(self, version: int) -> None: ...
    def recover(self, tell: object) -> int:
        return 0


def audit_of(server: Any) -> Any:
    """The server itself if it is audited, else a stand-in without effect."""
    return server if hasattr(server, "recover") else NoAudit()


def begin(loop: "Loop") -> None:
    """An audited loop without a checkpoint: one that is new, or whose checkpoint is gone."""
    restore(loop, Saved({}, {}, {}, [], {}))
    if loop.path:  # a start model that was drawn at random could be recovered from nothing else
        loop.save()


def load(loop: "Loop", state: Saved) -> None:
    """Load the server's state of a checkpoint, then `restore`. The log may refuse the state only after the server has
    loaded it, even after some repeated calls: then the server gets its old state back."""
    audited = unwrapped(loop.audit)
    if audited is None:
        loop.server.load_state_dict(state.server)  # whole, or not at all
        restore(loop, state)
        return
    before, named = state_of(audited)
    names = dict(audited.names)
    loop.server.load_state_dict(state.server)
    try:
        restore(loop, state)
    except Exception:
        loop.server.load_state_dict(before)
        if named:
            audited.recover()
        audited.names = names
        raise


def unwrapped(audit: Any) -> Audited | None:
    """The Audited itself, which may be wrapped in `Watched`; None without one."""
    while audit is not None and not isinstance(audit, Audited):
        audit = getattr(audit, "server", None)
    return audit


def state_of(audited: Audited) -> tuple[dict[str, Any], bool]:
    """(its state, whether the log has it at its end). The log of a new server has no state, and must not get one that
    no call follows."""
    if any(line.state for line in read(audited.folder)):
        with suppress(ValueError):  # it is not recovered yet, or it is ahead of its log
            return audited.state_dict(), True
    state = audited.server.state_dict()
    # On the CPU: a device may not have the room, since `recover` makes a copy too.
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}, False


def restore(loop: "Loop", state: Saved) -> None:
    """Restore the slots and counts of a checkpoint. An audited server, which has the checkpoint's state, repeats the
    later calls of its log, and slots and counts follow them.

    Events that are no calls of the server (a failed client, a late reply) are not in the log: they are not counted.
    """
    restored = SlotsAndCounts(state, loop.server.clients)
    loop.audit.recover(restored)
    loop.slots.of, loop.tally = restored.slots, restored.tally
    # All nodes are away until they are seen again; those that were away before come first.
    loop.slots.away = dict.fromkeys([*restored.away, *restored.slots])
    loop._missing = set(restored.slots).difference(restored.away)


class SlotsAndCounts:
    """Those of a checkpoint, updated with each later line of the log."""

    def __init__(self, state: Saved, clients: int):
        self.slots, self.away, self.tally = dict(state.slots), dict.fromkeys(state.away), dict(state.tally)
        self.clients = clients
        self.owners = {slot: node for node, slot in self.slots.items()}

    def __call__(self, line: Line) -> None:
        if line.kind == "joined":
            self._join(line)
        elif line.kind == "forget":
            self._forget(line.client)
        elif line.kind == "leave" and line.client in self.owners:
            self.away[self.owners[line.client]] = None
        if line.kind in COUNTED:
            self.tally.setdefault(self.owners.get(line.client), Counter())[COUNTED[line.kind]] += 1

    def _join(self, line: Line) -> None:
        node = int(line.who) if line.who.isdecimal() else LARGEST
        if node >= LARGEST or line.client >= self.clients:
            expected = f"a node id and a slot below {self.clients}"
            raise ValueError(f"audit log, line {line.seq}: expected {expected}, got {line.who!r}, slot {line.client}")
        if self.owners.get(line.client, node) != node:
            self._forget(line.client)
        self.owners.pop(self.slots.get(node, -1), None)
        self.slots[node], self.owners[line.client] = line.client, node
        self.away.pop(node, None)

    def _forget(self, slot: int) -> None:
        """Free the slot: its node has lost it."""
        node = self.owners.pop(slot, None)
        if node is not None:
            del self.slots[node]
            self.away.pop(node, None)
            self.tally[None] = self.tally.get(None, Counter()) + self.tally.pop(node, Counter())
