"""The loop's tables as they were first written: each question walks all nodes. The oracle of the quick ones."""

import math
from collections import Counter, deque
from itertools import islice

from secureafl_ext.flower import Loop, loop
from secureafl_ext.flower.turns import FIRST_WAIT, LONGEST_WAIT


class PlainSlots:
    def __init__(self, capacity):
        self.capacity, self.of, self.away = capacity, {}, {}

    def offer(self, node):
        copy = PlainSlots(self.capacity)
        copy.of, copy.away = dict(self.of), dict(self.away)
        return copy.admit(node)

    def admit(self, node):
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

    def leave(self, node):
        self.away[node] = None

    @property
    def present(self):
        return [node for node in self.of if node not in self.away]


class PlainTurns:
    """For as many places as nodes."""

    def __init__(self, share, capacity, places):
        self.share, self.places = share, places
        self.to_ask = {}
        self.present, self.answers = {}, {}
        self._rounds = deque(maxlen=capacity)
        self._failures = Counter()

    def joined(self, node):
        self.present[node] = None
        self.ready(node)

    def ready(self, node):
        self._failures.pop(node, None)
        self.to_ask[node] = -math.inf

    def failed(self, node, now):
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures[node], 16))
        self._failures[node] += 1
        self.to_ask[node] = now + wait

    def left(self, node):
        for table in (self.present, self.answers, self.to_ask, self._failures):
            table.pop(node, None)

    def ask(self, now, asked):
        due = [node for node, since in self.to_ask.items() if since <= now]
        for node in due:
            del self.to_ask[node]
        return due

    def answered(self, node):
        self.answers[node] = None

    def had_round(self, node):
        self._rounds.append(node)

    def gap(self):
        live = sum(node not in self._failures for node in self.present)
        return max(0, math.floor(self.share * (live - 1)))

    def first(self):
        recent = set(islice(reversed(self._rounds), self.gap()))
        node = next((node for node in self.answers if node not in recent), None)
        self.answers.pop(node, None)
        return node


class PlainLoop(Loop):
    """With `loop.Slots` and `loop.Turns` patched by those above: the loop before it was made for many nodes."""

    def _left(self, node, reason=""):
        self._record("left", node, reason)
        self.slots.leave(node)
        self._stop_counting(node)
        self.turns.left(node)
        self.answers.pop(node, None)
        self.open = {message: sent for message, sent in self.open.items() if sent.node != node}

    def _receive(self, updates):
        if self.open and not self._pulled:
            self._asked = loop.time.monotonic()
            self._pulled = self._pull()
        answered = bool(self._pulled)
        while self._pulled and self.server.version < updates:
            self._take(self._pulled.pop())
            self._judge_due(updates)
            self._send_due()
        for message in [message for message, sent in self.open.items() if sent.deadline < self._asked]:
            self._failed("vanished", self.open.pop(message).node, f"no reply within {self.ttl:g} s")
        return answered
