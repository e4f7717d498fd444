"""Turns: a node that had a round waits for rounds of others; a node that failed waits for some time."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from itertools import islice

FIRST_WAIT, LONGEST_WAIT = 0.1, 60.0  # seconds before a node that failed is asked again; doubled each time


class Turns:
    """Between two rounds of one node there are at least floor(share * (live - 1)) rounds of others.

    This limits the rounds of a node that answers quickly. Its reply waits, not its message, so that no node is idle.
    A node is live unless its last message failed. A node that hangs delays others until its message expires, not for
    ever. No deadlock: at least one live node had none of the last rounds, and its reply never waits.
    """

    def __init__(self, share: float, capacity: int):
        self.share = share
        self.to_ask: dict[int, float] = {}  # nodes that get the model next, and the earliest time
        self._rounds: deque[int] = deque(maxlen=capacity)  # the nodes of the last rounds, the latest at the end
        self._failures: Counter[int] = Counter()  # consecutive failures by node

    def ready(self, node: int) -> None:
        """The node has joined, or sent a usable reply."""
        self._failures.pop(node, None)
        self.to_ask[node] = -math.inf

    def failed(self, node: int, now: float) -> None:
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures[node], 16))
        self._failures[node] += 1
        self.to_ask[node] = now + wait

    def left(self, node: int) -> None:
        """Its rounds still count: a node gains nothing when it leaves and comes back."""
        self.to_ask.pop(node, None)
        self._failures.pop(node, None)

    def ask(self, now: float) -> list[int]:
        """The nodes that get the model now. Each stays due until `asked`."""
        return [node for node, since in self.to_ask.items() if since <= now]

    def asked(self, node: int) -> None:
        """The grid was given a message for the node."""
        del self.to_ask[node]

    def had_round(self, node: int) -> None:
        self._rounds.append(node)

    def gap(self, present: Collection[int]) -> int:
        """Rounds of others required between two rounds of one node."""
        live = sum(node not in self._failures for node in present)
        return max(0, math.floor(self.share * (live - 1)))

    def first(self, answered: Iterable[int], present: Collection[int]) -> int | None:
        """The first node of `answered` whose turn it is."""
        recent = set(islice(reversed(self._rounds), self.gap(present)))
        return next((node for node in answered if node not in recent), None)
