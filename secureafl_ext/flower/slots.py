"""Which client number a node has. A server has room for so many clients; nodes come and go."""

from collections.abc import Collection


class Slots:
    """A node keeps its slot when it leaves, so that the server knows it again, until a newcomer needs the place:
    then the one that has been away longest loses it. While nobody is away, a newcomer waits.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.of: dict[int, int] = {}  # node -> slot
        self.away: dict[int, None] = {}  # nodes that left and still have a slot, the first to leave first

    def admit(self, node: int) -> tuple[int, int | None] | None:
        """(its slot, the node that lost it), or None if there is no room. A node that comes back has its own."""
        self.away.pop(node, None)
        if node in self.of:
            return self.of[node], None
        if len(self.of) < self.capacity:
            slot, lost = min(set(range(self.capacity)) - set(self.of.values())), None
        elif self.away:
            lost = next(iter(self.away))
            del self.away[lost]
            slot = self.of.pop(lost)
        else:
            return None
        self.of[node] = slot
        return slot, lost

    def leave(self, node: int) -> None:
        self.away[node] = None

    @property
    def present(self) -> Collection[int]:
        return [node for node in self.of if node not in self.away]
