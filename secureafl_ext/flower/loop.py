"""Loop: the asynchronous Flower server. Each reply is judged on its turn, and its sender gets the new model at once."""

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from ..operate.verdict import Queue
from ..server.protocol import Server
from . import recovery, replies, saved
from .checks import check, positive_lr
from .events import LEVELS, Event
from .inbox import Answer, Inbox, Sent, longest_wait, train_message
from .layout import GarbageError, Layout
from .slots import Slots
from .turns import Turns

logger = logging.getLogger(__name__)

NODES_EVERY = 1.0  # seconds between two queries of the node list
LONGEST_PAUSE = 0.1  # seconds between two queries for replies, when none come


class Loop:
    """One federation: a grid that moves messages, a server that judges updates, and a layout that converts both.

    grid: Flower's    server: SecureAFL or any other `Server`; its `clients` is the capacity
    ttl: seconds that a client has for its reply    patience: seconds without a round after which `run` gives up
    turns: share of the other live nodes that must have rounds between two rounds of one node; 0: a reply never waits
    in_flight: most messages open plus replies waiting, of which each holds a model; None: one for every node
    watch: called with every Event    checkpoint: a file; written every `every` rounds, and loaded if it exists
    An `Audited` server that was killed goes on where it was: with a checkpoint, and with the calls of its log after it.
    Events are also logged by `logging` as secureafl_ext.flower.loop, at the levels in events.LEVELS.
    """

    def __init__(
        self,
        grid: Grid,
        server: Server,
        layout: Layout,
        *,
        ttl: float = 600.0,
        patience: float = 1800.0,
        turns: float = 0.5,
        in_flight: int | None = None,
        watch: Callable[[Event], None] | None = None,
        checkpoint: str | os.PathLike | None = None,
        every: int = 100,
    ):
        settings = {"ttl": ttl, "patience": patience, "turns": turns, "in_flight": in_flight, "every": every}
        plain = check(server, layout, watch, settings)
        self.grid, self.server, self.layout, self.watch = grid, server, layout, watch
        self.ttl, self.patience, self.every = plain["ttl"], plain["patience"], plain["every"]
        self.audit = recovery.audit_of(server)
        self.path = None if checkpoint is None else Path(checkpoint)
        self.slots = Slots(server.clients)
        self.turns = Turns(plain["turns"], server.clients, plain["in_flight"])
        self.tally: dict[int | None, Counter[str]] = {}  # node -> counts by kind; None: nodes without a slot
        self.open: dict[str, Sent] = {}  # by message id, in the order of their deadlines
        self._message: dict[int, str] = {}  # id of the last message by node
        self.answers: dict[int, Answer] = {}  # by node, in order of arrival
        self._pulled: list[Message] = []  # replies not yet handled, the next one last
        self._asked = -math.inf  # time of the last pull: a reply pulled then is not late, however busy the server is
        self._inbox = Inbox()
        self._waiting: set[int] = set()  # nodes that wait for a slot
        # Nodes that may be away without a call of server.leave: those that were present at the checkpoint.
        self._missing: set[int] = set()
        self._next_look = -math.inf
        self._written: tuple[int, ArrayRecord | None] = -1, None  # version, and its model as a record
        if self.path and self.path.exists():
            self.load()
        elif self.audit is server:
            recovery.begin(self)

    def run(self, updates: int) -> None:
        """Run until the server has done this many rounds in all."""
        last_round, pause = time.monotonic(), 0.0
        while self.server.version < updates:
            before = self.server.version
            now = time.monotonic()
            if now >= self._next_look:
                self._update_nodes()
                self._next_look = now + NODES_EVERY
            self._judge_due(updates)
            self._send_due()
            answered = self._receive(updates)
            if self.server.version > before:
                last_round = time.monotonic()
            elif time.monotonic() - last_round > self.patience:
                raise TimeoutError(self._stalled())
            pause = 0.0 if answered else min(LONGEST_PAUSE, 2 * pause + 1e-3)
            if pause:
                time.sleep(pause)
        if self.path:
            self.save()

    def state_dict(self) -> dict[str, Tensor]:
        """The current model."""
        return self.layout.unflatten(self.server.model)

    def totals(self) -> Counter[str]:
        return sum(self.tally.values(), Counter())

    def queue(self) -> Queue:
        """Numbers of open messages, waiting replies and waiting nodes. Takes microseconds; any thread may call it."""
        size, longest = self.layout.size * self.layout.dtype.itemsize, longest_wait(self.answers, time.monotonic())
        return Queue(len(self.open), len(self.answers), size, longest, *self.turns.counts(), self.turns.places)

    # Nodes that join and leave, and messages to them

    def _update_nodes(self) -> None:
        nodes = list(self.grid.get_node_ids())
        for node in self._missing.difference(nodes):
            self._stop_counting(node)
        self._missing = set()
        for node in set(self.slots.present).difference(nodes):
            self._left(node)
        for node in nodes:
            if node not in self.slots.of or node in self.slots.away:
                self._join(node)
        self._waiting.intersection_update(nodes)

    def _join(self, node: int) -> None:
        offered = self.slots.offer(node)
        if offered is None:
            if node not in self._waiting:
                self._waiting.add(node)
                self._record("waiting", node, f"all {self.slots.capacity} slots are taken by nodes that are present")
            return
        slot, lost = offered
        if lost is not None:
            self.server.forget(slot)
        self.audit.name_client(slot, node)
        self.slots.admit(node)  # only now: if the log cannot be written, the node joins in the next run
        if lost is not None:
            self.tally[None] = self.tally.get(None, Counter()) + self.tally.pop(lost, Counter())
        self._waiting.discard(node)
        self.turns.joined(node)
        self._record("joined", node, "" if lost is None else f"takes the slot of node {lost}, which is forgotten")

    def _left(self, node: int, reason: str = "") -> None:
        """Record that the node left. Its open message is dropped: a later reply to it is ignored."""
        self._record("left", node, reason)
        self.slots.leave(node)
        self.turns.left(node)
        self.answers.pop(node, None)
        self.open.pop(self._message.pop(node, ""), None)
        self._missing.add(node)  # if the log cannot be written, the server is told in the next look
        self._stop_counting(node)
        self._missing.discard(node)

    def _stop_counting(self, node: int) -> None:
        """The node's last update stops pulling the model. A server without `leave` keeps none that could."""
        if hasattr(self.server, "leave"):
            self.server.leave(self.slots.of[node])

    def _send_due(self) -> None:
        due = deque(self.turns.ask(time.monotonic(), len(self.open) + len(self.answers)))
        try:
            while due:
                self._send(due[0])
                due.popleft()
        finally:  # if the connection fails, these are still due in the next run
            for node in due:
                self.turns.still_due(node)

    def _send(self, node: int) -> None:
        version, lr = self.server.version, positive_lr("Loop.run", self.server)
        if self._written[0] != version:
            self._written = version, self.layout.write(self.server.model)
        message = train_message(node, self._written[1], version, lr, self.ttl)
        # One at a time: of several messages, a grid may take some and not say which.
        taken = [identifier for identifier in self.grid.push_messages([message]) if identifier]
        if taken:
            self._message[node] = taken[0]
            self.open[taken[0]] = Sent(node, version, self.server.model, lr, time.monotonic() + self.ttl)
        else:
            self._failed("unsent", node)

    def _failed(self, kind: str, node: int, reason: str = "") -> None:
        """Record that the node sent no usable reply. It is asked again after a pause that doubles each time."""
        self._record(kind, node, reason)
        self.turns.failed(node, time.monotonic())

    def _receive(self, updates: int) -> bool:
        """Whether any reply arrived."""
        if self.open and not self._pulled:
            self._asked = time.monotonic()
            self._pulled = self._pull()
        answered = bool(self._pulled)
        while self._pulled and self.server.version < updates:
            self._take(self._pulled.pop())
            self._judge_due(updates)
            self._send_due()
        for message in list(takewhile(lambda message: self.open[message].deadline < self._asked, self.open)):
            self._failed("vanished", self.open.pop(message).node, f"no reply within {self.ttl:g} s")
        return answered

    def _pull(self) -> list[Message]:
        """New replies, in the reverse order of their messages: `_receive` takes them from the end. The times in a reply
        do not matter, because its sender can forge them. Replies to no open message are taken after all others."""
        places = {message: place for place, message in enumerate(self.open)}
        pulled, broken = self._inbox.pull(self.grid, self.open)
        for message, reason in broken.items():
            self._failed("garbage", self.open.pop(message).node, reason)
        return sorted(pulled, key=lambda reply: places.get(replies.answers(reply)[0], len(places)))[::-1]

    def _take(self, reply: Message) -> None:
        # Identified by the message it answers: a reply made by Flower itself has another node's id.
        message, sender = replies.answers(reply)
        sent = self.open.pop(message, None)
        if sent is None:
            self._record("twice", sender)
        elif reply.has_error():
            kind, reason = replies.error(reply)
            if kind == "left":
                self._left(sent.node, reason)
            else:
                self._failed(kind, sent.node, reason)
        elif self._asked > sent.deadline:
            self._failed("late", sent.node, f"no reply within {self.ttl:g} s")
        else:
            try:
                trained, metrics = replies.trained(reply, self.layout), replies.metrics(reply)
                self.answers[sent.node] = Answer(sent, trained, metrics, time.monotonic())
                self.turns.answered(sent.node)
            except GarbageError as problem:
                self._failed("garbage", sent.node, str(problem))

    def _judge_due(self, updates: int) -> None:
        """Judge all replies whose turn it is. Each sender gets the new model before the next reply is judged."""
        while self.answers and self.server.version < updates:
            positive_lr("Loop.run", self.server)  # otherwise the round would move the model not at all, or backwards
            node = self.turns.first()
            if node is None:
                return
            self._judge(self.answers.pop(node))
            self._send_due()

    def _judge(self, answer: Answer) -> None:
        sent, before = answer.sent, self.server.version
        update = answer.update()
        if len(update) and not all(bound.isfinite() for bound in update.aminmax()):
            # Not a round: otherwise a node could advance the version as often as it likes.
            self._failed("garbage", sent.node, "the update is not finite")
            return
        try:
            receipt = self.server.submit(self.slots.of[sent.node], update, sent.version)
        except BaseException:  # the log cannot be written: the reply is lost, and its node is asked again
            self.turns.still_due(sent.node)
            raise
        kind = "stale" if self.server.version == before else "accepted" if receipt.accepted else "rejected"
        if kind != "stale":
            self.turns.had_round(sent.node)
        self.turns.ready(sent.node)
        judged = {"factor": float(receipt.factor), "staleness": receipt.staleness, "metrics": answer.metrics}
        self._record(kind, sent.node, receipt.reason, **judged)
        if self.path and kind != "stale" and self.server.version % self.every == 0:
            self.save()

    def _record(self, kind: str, node: int, reason: str = "", **details: Any) -> None:
        """Count an event, log it and pass it to `watch`. details: the other fields of Event"""
        slot = self.slots.of.get(node)
        self.tally.setdefault(None if slot is None else node, Counter())[kind] += 1
        event = Event(kind, node, slot, self.server.version, replies.one_line(reason), **details)
        logger.log(LEVELS[kind], "%s: node %d, slot %s, version %d %s", kind, node, slot, event.version, event.reason)
        if self.watch:
            self.watch(event)

    def _stalled(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.totals().items()) or "nothing happened"
        messages = f"{len(self.open)} messages open, {len(self.answers)} replies wait"
        seen = f"{len(self.slots.present)} nodes are present, {messages}; so far {counts}"
        return f"Loop.run: no round for {self.patience:g} s at version {self.server.version}; {seen}"

    # Checkpoints

    def save(self) -> None:
        """Write one file: the server's state, carried entries, slots and counts. Open messages are not in it: they
        belong to Flower's run, and a new run asks every client anew."""
        path, slots = self._checkpoint("Loop.save"), self.slots
        # Nodes of the last checkpoint that were not looked for yet are not away: their updates still count.
        away = [node for node in slots.away if node not in self._missing]
        state = saved.Saved(self.server.state_dict(), self.layout.carried, slots.of, away, self.tally)
        saved.write(path, state, self.layout)
        self.audit.checkpointed(state.server["version"])
        logger.info("checkpoint %s written at version %d", path, self.server.version)

    def load(self) -> None:
        """Continue from the file. If it does not fit, nothing changes."""
        path = self._checkpoint("Loop.load")
        state = saved.read(path, self.layout, self.server.clients)
        try:
            recovery.load(self, state)
        except Exception as problem:
            raise ValueError(f"Loop.load: {path}: {problem}") from problem
        self.layout.carried.update(state.carried)
        logger.info("continued from checkpoint %s at version %d", path, self.server.version)

    def _checkpoint(self, caller: str) -> Path:
        if self.path is None:
            raise ValueError(f"{caller}: checkpoint must be the path of a file, got None")
        return self.path
