"""Turns: a node that had a round waits for rounds of others; a node that failed waits for some time."""

import math
from collections import Counter, OrderedDict
from itertools import count

from .line import Least, Line

FIRST_WAIT, LONGEST_WAIT = 0.1, 60.0  # seconds before a node that failed is asked again; doubled each time
NEVER = -math.inf


class Turns:
    """Between two rounds of one node there are at least floor(share * (live - 1)) rounds of others.

    This limits the rounds of a node that answers quickly. Its reply waits, not its message, so that no node is idle.
    A node is live unless its last message failed. A node that hangs delays others until its message expires, not for
    ever. No deadlock: at least one live node had none of the last rounds, and its reply never waits.

    places: most nodes that have a message or a reply without a verdict at a time. With fewer places than nodes, a free
    one goes to a node whose turn it is, the longest waiting first; else to the one whose turn comes next. The last
    place is kept for a node whose turn it is, and a node that is asked in its turn keeps it: so one place always moves
    on. Every call takes logarithmic time, amortised.
    """

    def __init__(self, share: float, capacity: int, places: int):
        self.share, self.capacity, self.places = share, capacity, places
        self.to_ask: dict[int, float] = {}  # nodes that get the model next, and the earliest time
        self._present = 0
        self._rounds = 0
        self._last_round: OrderedDict[int, int] = OrderedDict()  # of the last nodes, at most `capacity`
        self._failures: Counter[int] = Counter()  # consecutive failures by node
        self._paused = Least()  # nodes of `to_ask` that failed, by time
        self._ready = Line()  # the other nodes of `to_ask`
        self._replies = Line()
        self._in_turn: set[int] = set()  # nodes that were asked in their turn, if places are few
        self._place = count()  # next(self._place): the place at the end of a line

    def joined(self, node: int) -> None:
        self._present += 1
        self.ready(node)

    def ready(self, node: int) -> None:
        """The node has joined, or sent a usable reply."""
        self._failures.pop(node, None)
        self.still_due(node)

    def failed(self, node: int, now: float) -> None:
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures[node], 16))
        self._failures[node] += 1
        self._in_turn.discard(node)
        self.to_ask[node] = now + wait
        self._paused.add(node, now + wait, next(self._place))

    def left(self, node: int) -> None:
        """Its rounds still count: a node gains nothing when it leaves and comes back."""
        self._present -= 1
        self.to_ask.pop(node, None)
        self._failures.pop(node, None)
        for waiting in (self._paused, self._ready, self._replies, self._in_turn):
            waiting.discard(node)

    def ask(self, now: float, asked: int) -> list[int]:
        """The nodes that get the model now. asked: the number of nodes that hold a place"""
        while (found := self._paused.first()) and found[1][0] <= now:
            self._paused.pop()
            self._line_up(found[0], found[1][1])
        due: list[int] = []
        while asked < self.places:
            node = self._ready.pop_in_turn(self._latest())
            if node is not None:
                if self._few():
                    self._in_turn.add(node)
            elif asked - len(self._in_turn) < self.places - 1:
                node = self._ready.pop_next()
            if node is None:
                break
            del self.to_ask[node]
            due.append(node)
            asked += 1
        return due

    def still_due(self, node: int) -> None:
        """The node could not be given its message, though it did not fail itself."""
        self._in_turn.discard(node)
        self.to_ask[node] = NEVER
        self._line_up(node, next(self._place))

    def answered(self, node: int) -> None:
        """Record that the node's reply has come and waits for its turn."""
        in_turn = node in self._in_turn
        self._replies.add(node, next(self._place), NEVER if in_turn else self._last_round.get(node, NEVER))

    def first(self) -> int | None:
        """The node whose reply is judged now: of those whose turn it is, the one that answered first."""
        return self._replies.pop_in_turn(self._latest())

    def had_round(self, node: int) -> None:
        self._rounds += 1
        self._last_round[node] = self._rounds
        self._last_round.move_to_end(node)
        if len(self._last_round) > self.capacity:
            self._last_round.popitem(last=False)

    def gap(self) -> int:
        """Rounds of others required between two rounds of one node."""
        live = self._present - len(self._failures)
        return max(0, math.floor(self.share * (live - 1)))

    def counts(self) -> tuple[int, int]:
        """(nodes that wait for a place, nodes that wait after a failure)"""
        return len(self._ready), len(self._paused)

    def _latest(self) -> int:
        """It is a node's turn if its last round is not later than this."""
        return self._rounds - self.gap()

    def _few(self) -> bool:
        """Whether there are fewer places than nodes."""
        return self.places < self.capacity

    def _line_up(self, node: int, place: int) -> None:
        """Let the node wait for a free place. With a place for every node no turn matters, only the order."""
        self._ready.add(node, place, self._last_round.get(node, NEVER) if self._few() else NEVER)
