"""Line: nodes that wait for their turn. The next one is found in logarithmic time, however many wait."""

from heapq import heapify, heappop, heappush


class Least:
    """Nodes, each with a key; the smallest key first."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple] = {}
        self._heap: list[tuple[tuple, int]] = []  # also entries of nodes that are gone, until they come first

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, node: int, *key: float) -> None:
        self._keys[node] = key
        heappush(self._heap, (key, node))
        if len(self._heap) > 2 * len(self._keys) + 16:  # nodes that come and go must not fill the memory
            self._heap = [(key, node) for node, key in self._keys.items()]
            heapify(self._heap)

    def discard(self, node: int) -> None:
        self._keys.pop(node, None)

    def first(self) -> tuple[int, tuple] | None:
        """(the node with the smallest key, that key); None if there are no nodes."""
        while self._heap:
            key, node = self._heap[0]
            if self._keys.get(node) == key:
                return node, key
            heappop(self._heap)
        return None

    def pop(self) -> tuple[int, tuple] | None:
        """As `first`, and remove that node."""
        found = self.first()
        if found:
            self.discard(found[0])
            heappop(self._heap)
        return found


class Line:
    """Nodes, each with its place in the line and with the number of its last round.

    It is a node's turn if its last round is at most some bound. The bound rises with every round, and falls when nodes
    join. Each round number belongs to one node, so a change of the bound by k changes the turn of at most k nodes.
    """

    def __init__(self) -> None:
        self._in_turn = Least()  # by place; some may have lost their turn since, which pop_in_turn checks
        self._early = Least()  # nodes whose turn has not come, by last round

    def __len__(self) -> int:
        return len(self._in_turn) + len(self._early)

    def add(self, node: int, place: int, last_round: float) -> None:
        self._in_turn.discard(node)
        self._early.add(node, last_round, place)

    def discard(self, node: int) -> None:
        self._in_turn.discard(node)
        self._early.discard(node)

    def pop_in_turn(self, latest: float) -> int | None:
        """The first in the line of those whose last round is at most `latest`."""
        while (found := self._early.first()) and found[1][0] <= latest:
            node, (last_round, place) = found
            self._early.pop()
            self._in_turn.add(node, place, last_round)
        while found := self._in_turn.pop():
            node, (place, last_round) = found
            if last_round <= latest:
                return node
            self._early.add(node, last_round, place)
        return None

    def pop_next(self) -> int | None:
        """The node whose turn comes next. Call it only when pop_in_turn has found none."""
        found = self._early.pop()
        return found and found[0]
