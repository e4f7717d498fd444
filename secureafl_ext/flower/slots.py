"""Slots: the client number of each node. A server has a fixed number of clients, and nodes come and go."""

from collections.abc import Collection


class Slots:
    """A node that leaves keeps its slot, so that the server recognizes it. When a new node needs a slot, the node that
    has been away longest loses its own. If no node is away, the new node waits.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.of = {}
        self.away: dict[int, None] = {}  # absent nodes that still have a slot, in the order in which they left

    @property
    def of(self) -> dict[int, int]:
        """node -> slot. Only `admit` changes it; a checkpoint replaces it."""
        return self._of

    @of.setter
    def of(self, slots: dict[int, int]) -> None:
        self._of = slots
        self._free = sorted(set(range(self.capacity)).difference(slots.values()), reverse=True)

    def offer(self, node: int) -> tuple[int, int | None] | None:
        """(its slot, the node that loses it), or None if none is free. A node that comes back gets its own. Nothing
        changes: others are told first, and that may fail."""
        if node in self.of:
            return self.of[node], None
        if self._free:
            return self._free[-1], None
        lost = next(iter(self.away), None)
        return None if lost is None else (self.of[lost], lost)

    def admit(self, node: int) -> tuple[int, int | None] | None:
        """Give the node the slot that `offer` returns."""
        offered = self.offer(node)
        if offered is None:
            return None
        slot, lost = offered
        if lost is not None:
            del self.of[lost], self.away[lost]
        elif node not in self.of:
            self._free.pop()
        self.away.pop(node, None)
        self.of[node] = slot
        return offered

    def leave(self, node: int) -> None:
        self.away[node] = None

    @property
    def present(self) -> Collection[int]:
        return [node for node in self.of if node not in self.away]
