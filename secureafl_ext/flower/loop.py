"""The asynchronous server: each reply is judged at its turn, and its sender gets the new model at once."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from ..server.protocol import Server
from . import replies, saved
from .events import Event
from .layout import GarbageError, Layout
from .slots import Slots
from .turns import Turns

LOOK = 1.0  # seconds between two looks at who is there
LONGEST_PAUSE = 0.1  # seconds between two questions for replies, when none come


@dataclass(frozen=True)
class Sent:
    """A message that is open."""

    node: int
    version: int  # the server's own note: a client cannot claim another one
    model: Tensor  # (d) of that version, as long as the server keeps it
    deadline: float


@dataclass(frozen=True)
class Answer:
    """A reply that waits for its turn."""

    sent: Sent
    trained: Tensor  # (d) the client's model, on the CPU
    metrics: Mapping[str, object]


class Loop:
    """One federation: a grid that moves messages, a server that judges, a layout between the two.

    grid: Flower's    server: SecureAFL or any other of `sim.defenses`; its `clients` are the capacity
    ttl: seconds a client has for its reply    patience: seconds without a round after which `run` gives up
    turns: share of the other live nodes that must have rounds between two of the same node; 0: a reply never waits
    watch: is told every event    checkpoint: a file, written every so many rounds and gone on from if it is there
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
        watch: Callable[[Event], None] | None = None,
        checkpoint: str | os.PathLike | None = None,
        every: int = 100,
    ):
        if server.model.shape != (layout.size,) or server.model.dtype != layout.dtype:
            got = f"{tuple(server.model.shape)} {server.model.dtype}"
            expected = f"a model of the layout's ({layout.size},) {layout.dtype}"
            raise ValueError(f"Loop: server must have {expected}, got {got}")
        for name, value in {"server.lr": server.lr, "ttl": ttl, "patience": patience, "every": every}.items():
            if not value > 0:
                raise ValueError(f"Loop: {name} must be positive, got {value}")
        if not 0 <= turns <= 1:
            raise ValueError(f"Loop: turns must lie in 0..1, got {turns}")
        self.grid, self.server, self.layout = grid, server, layout
        self.ttl, self.patience, self.every = ttl, patience, every
        self.watch = watch
        self.path = None if checkpoint is None else Path(checkpoint)
        self.slots = Slots(server.clients)
        self.turns = Turns(turns, server.clients)
        self.tally: dict[int | None, Counter[str]] = {}  # node -> how often what; None: all without a slot
        self.open: dict[str, Sent] = {}  # by message id
        self.answers: dict[int, Answer] = {}  # by node, the first to come first
        self._pulled: list[Message] = []  # replies not yet looked at, the next one last
        self._asked = -math.inf  # when they were asked for: what came by then is not late, however busy the server is
        self._one_by_one = False  # whether replies are pulled so
        self._waiting: set[int] = set()  # for a slot
        self._next_look = -math.inf
        self._written = -1, None  # version, and its model as a record
        if self.path and self.path.exists():
            self.load()

    def run(self, updates: int) -> None:
        """Until the server has done so many rounds in all."""
        last_round, pause = time.monotonic(), 0.0
        while self.server.version < updates:
            before = self.server.version
            now = time.monotonic()
            if now >= self._next_look:
                self._look()
                self._next_look = now + LOOK
            self._judge_due(updates)
            self._send_due()
            answered = self._receive(updates)
            if self.server.version > before:
                last_round = time.monotonic()
            elif time.monotonic() - last_round > self.patience:
                raise TimeoutError(self._impasse())
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

    # Who is there, and who gets the model

    def _look(self) -> None:
        nodes = list(self.grid.get_node_ids())
        for node in set(self.slots.present).difference(nodes):
            self._left(node)
        for node in nodes:
            if node not in self.slots.of or node in self.slots.away:
                self._join(node)
        self._waiting.intersection_update(nodes)

    def _join(self, node: int) -> None:
        given = self.slots.admit(node)
        if given is None:
            if node not in self._waiting:
                self._waiting.add(node)
                self._tell("waiting", node, f"all {self.slots.capacity} slots are taken by nodes that are here")
            return
        slot, lost = given
        if lost is not None:
            self.tally[None] = self.tally.get(None, Counter()) + self.tally.pop(lost, Counter())
            self.server.forget(slot)
        self._waiting.discard(node)
        self.turns.ready(node)
        self._tell("joined", node, "" if lost is None else f"in the place of node {lost}, which is forgotten")

    def _left(self, node: int, reason: str = "") -> None:
        """Whatever it still sends is a reply to nothing: a message it had is not worth waiting for."""
        self._tell("left", node, reason)
        self.slots.leave(node)
        self.turns.left(node)
        self.answers.pop(node, None)
        self.open = {message: sent for message, sent in self.open.items() if sent.node != node}

    def _send_due(self) -> None:
        for node in self.turns.ask(time.monotonic()):
            self._send(node)

    def _send(self, node: int) -> None:
        version = self.server.version
        if self._written[0] != version:
            self._written = version, self.layout.write(self.server.model)
        config = ConfigRecord({"version": version, "lr": float(self.server.lr)})
        content = RecordDict({"arrays": self._written[1], "config": config})
        message = Message(content, node, MessageType.TRAIN, ttl=self.ttl)
        # One at a time: of several, a grid may take some and not say which.
        taken = [identifier for identifier in self.grid.push_messages([message]) if identifier]
        if taken:
            self.open[taken[0]] = Sent(node, version, self.server.model, time.monotonic() + self.ttl)
        else:
            self._failed("unsent", node)

    def _failed(self, kind: str, node: int, reason: str = "") -> None:
        """Its message came to nothing: it is asked again, ever more rarely."""
        self._tell(kind, node, reason)
        self.turns.failed(node, time.monotonic())

    # What comes back

    def _receive(self, updates: int) -> bool:
        """Whether anything came."""
        if self.open and not self._pulled:
            self._asked = time.monotonic()
            self._pulled = sorted(self._pull(), key=replies.made_at, reverse=True)
        answered = bool(self._pulled)
        while self._pulled and self.server.version < updates:
            self._take(self._pulled.pop())
            self._judge_due(updates)
            self._send_due()
        for message in [message for message, sent in self.open.items() if sent.deadline < self._asked]:
            self._failed("vanished", self.open.pop(message).node, f"no reply within {self.ttl:g} s")
        return answered

    def _pull(self) -> list[Message]:
        """Flower raises an error where a node has uploaded what it cannot unpack, and what it pulled with that is lost.
        Once this has happened replies are pulled one by one: a node can then lose its own only."""
        if not self._one_by_one:
            try:
                return list(self.grid.pull_messages(list(self.open)))
            except Exception:
                self.grid.get_node_ids()  # raises if it is the connection that fails, not a reply
                self._one_by_one = True
        pulled = []
        for message in list(self.open):
            try:
                pulled += self.grid.pull_messages([message])
            except Exception as problem:
                self.grid.get_node_ids()
                reason = f"Flower cannot unpack the reply: {type(problem).__name__}"
                self._failed("garbage", self.open.pop(message).node, reason)
        return pulled

    def _take(self, reply: Message) -> None:
        # By the message it answers: a reply that Flower makes up itself has another node's id.
        message, sender = replies.answers(reply)
        sent = self.open.pop(message, None)
        if sent is None:
            self._tell("twice", sender)
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
                self.answers[sent.node] = Answer(sent, replies.trained(reply, self.layout), replies.metrics(reply))
            except GarbageError as problem:
                self._failed("garbage", sent.node, str(problem))

    def _judge_due(self, updates: int) -> None:
        """Each gets the new model before the next is judged."""
        while self.answers and self.server.version < updates:
            node = self.turns.first(self.answers, self.slots.present)
            if node is None:
                return
            self._judge(self.answers.pop(node))
            self._send_due()

    def _judge(self, answer: Answer) -> None:
        """The update is gradient-like: `model - lr * update` of the model it was given is the client's own."""
        sent, before = answer.sent, self.server.version
        trained = answer.trained.to(sent.model.device)
        update = torch.sub(sent.model, trained, out=trained).div_(self.server.lr)
        if len(update) and not all(bound.isfinite() for bound in update.aminmax()):
            # No round: otherwise a node would choose how often the server goes on without anything new.
            self._failed("garbage", sent.node, "the update is not finite")
            return
        receipt = self.server.submit(self.slots.of[sent.node], update, sent.version)
        kind = "stale" if self.server.version == before else "accepted" if receipt.accepted else "rejected"
        if kind != "stale":
            self.turns.had_round(sent.node)
        self.turns.ready(sent.node)
        judged = {"factor": float(receipt.factor), "staleness": receipt.staleness, "metrics": answer.metrics}
        self._tell(kind, sent.node, receipt.reason, **judged)
        if self.path and kind != "stale" and self.server.version % self.every == 0:
            self.save()

    def _tell(self, kind: str, node: int, reason: str = "", **judged: object) -> None:
        slot = self.slots.of.get(node)
        self.tally.setdefault(None if slot is None else node, Counter())[kind] += 1
        if self.watch:
            self.watch(Event(kind, node, slot, self.server.version, replies.printable(reason), **judged))

    def _impasse(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.totals().items()) or "nothing happened"
        messages = f"{len(self.open)} messages open, {len(self.answers)} replies wait"
        seen = f"{len(self.slots.present)} nodes are here, {messages}; so far {counts}"
        return f"Loop.run: no round for {self.patience:g} s at version {self.server.version}; {seen}"

    # What a killed server goes on from

    def save(self) -> None:
        """One file: the server, what is carried, who has which slot, what was counted. Open messages are not in it:
        they belong to Flower's run, and a new run asks every client anew."""
        server, slots = self.server.state_dict(), self.slots
        state = saved.Saved(server, self.layout.carried, slots.of, list(slots.away), self.tally)
        saved.write(self.path, state, self.layout)

    def load(self) -> None:
        """Go on from the file. Nothing changes if it does not fit."""
        state = saved.read(self.path, self.layout, self.server.clients)
        try:
            self.server.load_state_dict(state.server)
        except Exception as problem:
            raise ValueError(f"Loop.load: {self.path}: {problem}") from problem
        self.layout.carried.update(state.carried)
        self.slots.of = state.slots
        # Until they are seen again, all are away; those that were, first.
        self.slots.away = dict.fromkeys([*state.away, *state.slots])
        self.tally = state.tally
