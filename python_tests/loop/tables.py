"""The tables of a plain model of the Flower loop: slots, turns, messages and counts, by the rules of docs/flower.md.

Simple and slow: every list is kept whole, and nothing is shared with the loop's own code.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from loop.replies import Reply

FLOWER = 1  # the id under which Flower itself answers
OF_FLOWER = {3: "vanished", 4: "late", 5: "left"}  # what its error codes mean; of a client they mean nothing


class DivergenceError(BaseException):
    """The loop did not do what the model says. No `except Exception` of the loop may hide it."""


def need(holds: bool, *what: object) -> None:
    if not holds:
        raise DivergenceError(" ".join(str(one) for one in what))


@dataclass(frozen=True)
class Open:
    node: int
    version: int
    model: np.ndarray
    lr: float
    deadline: float


@dataclass(frozen=True)
class Pulled:
    message: object  # id of the message that it says it answers
    sender: object
    reply: Reply
    place: int = -1  # in the order in which the messages were sent; those that answer none of the open ones are last


class Tables:
    """The model's own tables, and the rules that change them."""

    def __init__(self, make_server: Callable[[], object], share: float, ttl: float, every: int):
        self.make_server, self.share, self.ttl, self.every = make_server, share, ttl, every
        self.snapshots: list[dict] = []  # of the checkpoints that are on the disk: at most the last two
        self.target = 0
        self.start(None)

    def start(self, snapshot: dict | None) -> None:
        """A new loop: from a checkpoint, or from nothing."""
        self.twin = self.make_server()
        saved = copy.deepcopy(snapshot) or {"slots": {}, "away": [], "tally": {}, "server": None}
        if saved["server"]:
            self.twin.load_state_dict(saved["server"])
        self.slots: dict[int, int] = saved["slots"]
        self.missing = set(self.slots).difference(saved["away"])  # present at the checkpoint, not seen since
        self.away: list[int] = saved["away"] + [node for node in self.slots if node in self.missing]
        self.tally: dict[int | None, Counter] = saved["tally"]
        self.listed: list[int] = []
        self.looking, self.one_by_one = False, False
        self.waiting: set[int] = set()
        self.open: dict[str, Open] = {}
        self.pulled_at = -math.inf
        self.pulled: list[Pulled] = []
        self.broken: set[str] = set()
        self.answers: dict[int, tuple[Open, np.ndarray]] = {}
        self.rounds: list[int] = []  # whose they were, since the start
        self.failures: Counter = Counter()
        self.ask_at: dict[int, float] = {}
        self.resume(0)

    def resume(self, target: int) -> None:
        """`run` begins, perhaps after an error ended the last one."""
        self._end_look()  # the look was through before the error
        self.target = target or self.target
        self.refused: int | None = None
        self.owed: int | None = None  # had a round and must get the model before the next round
        self.save_due = False
        self.was_due: tuple | None = None
        self.loosened = False  # a failure between two replies: an answer that became due may wait for the next reply
        self.slept_at = -math.inf
        self.asked_ids: set[str] = set()  # of the pulls since the last thing that happened

    @property
    def present(self) -> list[int]:
        return [node for node in self.slots if node not in self.away]

    @property
    def done(self) -> bool:
        return self.twin.version >= self.target

    # Turns

    def gap(self) -> int:
        live = sum(node not in self.failures for node in self.present)
        return max(0, math.floor(self.share * (live - 1)))

    def _due(self) -> int | None:
        """The first node whose reply waits and whose turn it is."""
        gap = self.gap()
        recent = self.rounds[-gap:] if gap else []
        return next((node for node in self.answers if node not in recent), None)

    def _next(self) -> int | None:
        """The same, after as many usable replies as the loop must have taken to find one."""
        while (node := self._due()) is None and self.pulled:
            if self._kind(self._head())[0] != "usable":
                return None
            self._take()
        return node

    def _head(self) -> Pulled:
        """The reply whose message was sent first."""
        return min(self.pulled, key=lambda one: one.place)

    def _take(self) -> None:
        """A usable reply waits for its turn from now on."""
        head = self._head()
        self.pulled.remove(head)
        sent = self.open.pop(head.message)
        self.answers[sent.node] = sent, head.reply.vector

    def _kind(self, pulled: Pulled) -> tuple[str, int]:
        """(what the loop must make of it, the node that is meant)"""
        sent = self.open.get(pulled.message) if isinstance(pulled.message, str) else None
        if sent is None:
            return "twice", pulled.sender if isinstance(pulled.sender, int) else 0
        if hasattr(pulled.reply.body, "code"):
            code = pulled.reply.body.code if pulled.sender == FLOWER else None
            return OF_FLOWER.get(code, "failed"), sent.node
        if self.pulled_at > sent.deadline:
            return "late", sent.node
        return "garbage" if pulled.reply.vector is None else "usable", sent.node

    # Nodes that come, go and fail

    def _moves(self, event) -> None:
        node, listed = event.node, event.node in self.listed
        if event.kind == "left":
            need(node in self.present, "left a second time:", node)
            return self._leaves(node)
        need(listed and node not in self.present, event.kind, "of a node that is not new:", node)
        if event.kind == "waiting":
            need(node not in self.waiting, "waiting a second time:", node)
            self.waiting.add(node)
            return None
        if node in self.slots:
            self.away.remove(node)
        elif len(self.slots) < self.twin.clients:
            need(event.slot in range(self.twin.clients), "slot", event.slot)
            need(event.slot not in self.slots.values(), "slot", event.slot, "has two nodes")
            self.slots[node] = event.slot
        else:
            need(bool(self.away), "joined although no slot is free:", node)
            lost = self.away.pop(0)  # away longest
            self.slots[node] = self.slots.pop(lost)
            self.tally[None] = self.tally.get(None, Counter()) + self.tally.pop(lost, Counter())
            self.twin.forget(self.slots[node])
        self.waiting.discard(node)
        self.ask_at[node] = -math.inf
        return None

    def _leaves(self, node: int) -> None:
        self.away.append(node)
        self.twin.leave(self.slots[node])
        for table in (self.ask_at, self.failures, self.answers):
            table.pop(node, None)
        self.owed = None if self.owed == node else self.owed
        self.open = {message: sent for message, sent in self.open.items() if sent.node != node}

    def _failed(self, node: int, now: float) -> None:
        self.ask_at[node] = now + min(60.0, 0.1 * 2 ** self.failures[node])
        self.failures[node] += 1

    # The loop's own tables

    def catch_up(self, loop) -> None:
        """Take the usable replies that the loop has taken without an event, because it is not their turn."""
        while len(self.open) > len(loop.open) and self.pulled and self._kind(self._head())[0] == "usable":
            self._take()

    def compare(self, loop) -> None:
        """At any moment between two calls."""
        need(loop.slots.of == self.slots, "slots", loop.slots.of, "not", self.slots)
        need(list(loop.slots.away) == self.away, "away", list(loop.slots.away), "not", self.away)
        need({k: v for k, v in loop.tally.items() if v} == self.tally, "tally", loop.tally, "not", self.tally)
        need(loop.server.version == self.twin.version, "version", loop.server.version, "not", self.twin.version)
        self.catch_up(loop)
        need(loop.open.keys() == self.open.keys(), "open", [*loop.open], "not", [*self.open])
        need(loop.turns.to_ask.keys() == self.ask_at.keys(), "to ask", [*loop.turns.to_ask], "not", [*self.ask_at])

    def compare_sizes(self, loop) -> None:
        """Before a pause: the loop keeps nothing but what the fleet needs."""
        need(list(loop.answers) == list(self.answers), "replies wait of", [*loop.answers], "not", [*self.answers])
        left = [loop.turns._failures.keys() - set(self.present), loop._waiting - set(self.listed)]
        need(not any(left), "kept of nodes that are gone:", *left)
        need(self.done or not loop._pulled, "replies kept:", len(loop._pulled))
        need(len(loop.turns._last_round) <= self.twin.clients, "rounds kept:", len(loop.turns._last_round))

    def compare_states(self, server) -> None:
        """The whole server, bit for bit, and a finite model."""
        ours, theirs = server.state_dict(), self.twin.state_dict()
        need(ours.keys() == theirs.keys(), "state", [*ours], "not", [*theirs])
        for name, value in theirs.items():
            need(same(ours[name], value), "state", name, ours[name], "not", value)
        need(bool(server.model.isfinite().all()), "the model is not finite")


def same(one, other) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=np.asarray(one).dtype.kind == "f")
