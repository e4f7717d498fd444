"""Whose turn it is: a node that had a round waits for others to have theirs, one that failed waits for a while."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from itertools import islice

FIRST_WAIT, LONGEST_WAIT = 0.1, 60.0  # seconds before a node that failed is asked again; doubled each time


class Turns:
    """Between two rounds of one node lie at least floor(share * (live - 1)) rounds of others.

    So a node that answers quickly has no more rounds than others let it have. Its reply waits, not its message: nodes
    that are equally quick answer in turn anyway, and none of them is idle. A node is live unless its last message came
    to nothing: one that hangs holds others up until its message has failed, and not for ever. At least one live node
    is not among those of the last rounds. It waits for nobody, so the next round is its reply or another one.
    """

    def __init__(self, share: float, capacity: int):
        self.share = share
        self.to_ask: dict[int, float] = {}  # nodes that get the model next, and from when on
        self._rounds: deque[int] = deque(maxlen=capacity)  # whose the last rounds were, the latest at the end
        self._failures: Counter[int] = Counter()  # in a row, by node

    def ready(self, node: int) -> None:
        """It has joined, or answered as it should."""
        self._failures.pop(node, None)
        self.to_ask[node] = -math.inf

    def failed(self, node: int, now: float) -> None:
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures[node], 16))
        self._failures[node] += 1
        self.to_ask[node] = now + wait

    def left(self, node: int) -> None:
        """Its rounds are still known: who leaves and comes back gains nothing."""
        self.to_ask.pop(node, None)
        self._failures.pop(node, None)

    def ask(self, now: float) -> list[int]:
        """The nodes that get the model now."""
        due = [node for node, since in self.to_ask.items() if since <= now]
        for node in due:
            del self.to_ask[node]
        return due

    def had_round(self, node: int) -> None:
        self._rounds.append(node)

    def gap(self, present: Collection[int]) -> int:
        """Rounds of others that must lie between two of the same node."""
        live = sum(node not in self._failures for node in present)
        return max(0, math.floor(self.share * (live - 1)))

    def first(self, answered: Iterable[int], present: Collection[int]) -> int | None:
        """The first of those that have answered whose turn it is."""
        recent = set(islice(reversed(self._rounds), self.gap(present)))
        return next((node for node in answered if node not in recent), None)
