"""What an audited server adds to a loop: after a kill, slots and counts are those of the last line of the log."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from ..audit.line import Line
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
    return server if hasattr(server, "recover") else NoAudit()


def begin(loop: "Loop") -> None:
    """An audited loop without a checkpoint: one that is new, or whose checkpoint is gone."""
    restore(loop, Saved({}, {}, {}, [], {}))
    if loop.path:  # a start model that was drawn at random could be recovered from nothing else
        loop.save()


def restore(loop: "Loop", state: Saved) -> None:
    """Slots and counts of a checkpoint. An audited server, which has its state, recovers what its log has after it.

    Events that are no calls of the server (a failed client, a late reply) are not in the log: they are not counted.
    """
    followed = Followed(state, loop.server.clients)
    loop.audit.recover(followed)
    loop.slots.of, loop.tally = followed.slots, followed.tally
    # All nodes are away until they are seen again; those that were away before come first.
    loop.slots.away = dict.fromkeys([*followed.away, *followed.slots])
    loop._missing = set(followed.slots).difference(followed.away)


class Followed:
    """Slots and counts, brought on line by line."""

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
        """Its node has lost the slot."""
        node = self.owners.pop(slot, None)
        if node is not None:
            del self.slots[node]
            self.away.pop(node, None)
            self.tally[None] = self.tally.get(None, Counter()) + self.tally.pop(node, Counter())
