"""The asynchronous server: whoever answers is judged on the spot and gets the new model at once. No rounds."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from .. import checkpoint as files
from ..sim.defenses import Server
from .layout import GarbageError, Layout
from .slots import Slots

# All that can happen with a client. What is counted, printed and documented are these words.
KINDS = {
    "joined": "has a slot and gets the model",
    "waiting": "no slot is free",
    "left": "is no longer among the nodes",
    "accepted": "its update was judged, and taken",
    "rejected": "its update was judged, and not taken",
    "stale": "its update was computed on a model that is no longer kept",
    "failed": "its app raised an error or crashed",
    "garbage": "its reply is not a model of this layout",
    "vanished": "no reply within the ttl",
    "late": "a reply after the ttl, dropped",
    "twice": "a reply to no message that is open, dropped",
    "unsent": "Flower took no message for it",
}
# Flower's error codes of messages that came to nothing; a code that is not here is the client's own failure.
ERRORS = {3: "vanished", 4: "late", 5: "left"}
LOOK = 1.0  # seconds between two looks at who is there
LONGEST_PAUSE = 0.1  # seconds between two questions for replies, when none come
FIRST_WAIT, LONGEST_WAIT = 0.1, 60.0  # seconds before a client that failed is asked again; doubled each time


@dataclass(frozen=True)
class Event:
    """One thing that happened with one client."""

    kind: str  # of KINDS
    node: int
    slot: int | None  # the client's number at the server
    version: int  # of the server, after it
    reason: str = ""
    factor: float = math.nan  # what the server judged by
    staleness: int | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)  # what the client says of itself: its word alone


@dataclass(frozen=True)
class Sent:
    """A message that is open."""

    node: int
    version: int  # the server's own note: a client cannot claim another one
    model: Tensor  # (d) of that version, as long as the server keeps it
    deadline: float


class Loop:
    """One federation: a grid that moves messages, a server that judges, a layout between the two.

    grid: Flower's    server: SecureAFL or any other of `sim.defenses`; its `clients` are the capacity
    ttl: seconds a client has for its reply    patience: seconds without a round after which `run` gives up
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
        self.grid, self.server, self.layout = grid, server, layout
        self.ttl, self.patience, self.every = ttl, patience, every
        self.watch = watch
        self.path = None if checkpoint is None else Path(checkpoint)
        self.slots = Slots(server.clients)
        self.tally: dict[int | None, Counter[str]] = {}  # node -> how often what; None: all without a slot
        self.open: dict[str, Sent] = {}  # by message id
        self._pulled: list[Message] = []  # replies not yet looked at, the next one last
        self._asked = -math.inf  # when they were asked for: what came by then is not late, however busy the server is
        self._due: dict[int, float] = {}  # nodes that are to get the model, and from when on
        self._failures: Counter[int] = Counter()  # in a row, by node
        self._waiting: set[int] = set()
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
        self._due[node] = -math.inf
        self._tell("joined", node, "" if lost is None else f"in the place of node {lost}, which is forgotten")

    def _left(self, node: int, reason: str = "") -> None:
        """Whatever it still sends is a reply to nothing: a message it had is not worth waiting for."""
        self._tell("left", node, reason)
        self.slots.leave(node)
        for noted in (self._due, self._failures):
            noted.pop(node, None)
        self.open = {message: sent for message, sent in self.open.items() if sent.node != node}

    def _send_due(self) -> None:
        now = time.monotonic()
        for node in [node for node, due in self._due.items() if due <= now]:
            del self._due[node]
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
            self._tell("unsent", node)
            self._again_later(node)

    def _again_later(self, node: int) -> None:
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures[node], 16))
        self._failures[node] += 1
        self._due[node] = time.monotonic() + wait

    # What comes back

    def _receive(self, updates: int) -> bool:
        """Whether anything came."""
        if self.open and not self._pulled:
            self._asked = time.monotonic()
            replies = self.grid.pull_messages(list(self.open))
            self._pulled = sorted(replies, key=lambda reply: reply.metadata.created_at, reverse=True)
        answered = bool(self._pulled)
        while self._pulled and self.server.version < updates:
            self._take(self._pulled.pop())
            self._send_due()
        for message in [message for message, sent in self.open.items() if sent.deadline < self._asked]:
            sent = self.open.pop(message)
            self._tell("vanished", sent.node, f"no reply within {self.ttl:g} s")
            self._again_later(sent.node)
        return answered

    def _take(self, reply: Message) -> None:
        # By the message it answers: a reply that Flower makes up itself has another node's id.
        sent = self.open.pop(reply.metadata.reply_to_message_id, None)
        if sent is None:
            self._tell("twice", reply.metadata.src_node_id)
            return
        node = sent.node
        if reply.has_error():
            kind, reason = ERRORS.get(reply.error.code, "failed"), (reply.error.reason or "").strip()
            if kind == "left":
                self._left(node, reason)
                return
            self._tell(kind, node, reason)
        elif self._asked > sent.deadline:
            self._tell("late", node, f"no reply within {self.ttl:g} s")
        else:
            try:
                trained = self._read(reply)
            except GarbageError as problem:
                self._tell("garbage", node, str(problem))
            else:
                self._judge(sent, trained, metrics_of(reply))
                self._failures.pop(node, None)
                self._due[node] = -math.inf
                return
        self._again_later(node)

    def _read(self, reply: Message) -> Tensor:
        records = list(reply.content.array_records.values())
        if len(records) != 1:
            raise GarbageError(f"a reply must have one ArrayRecord, got {len(records)}")
        return self.layout.read(records[0])

    def _judge(self, sent: Sent, trained: Tensor, metrics: Mapping[str, object]) -> None:
        """The update is gradient-like: `model - lr * update` of the model it was given is the client's own."""
        before = self.server.version
        trained = trained.to(sent.model.device)
        update = torch.sub(sent.model, trained, out=trained).div_(self.server.lr)
        receipt = self.server.submit(self.slots.of[sent.node], update, sent.version)
        kind = "stale" if self.server.version == before else "accepted" if receipt.accepted else "rejected"
        judged = {"factor": float(receipt.factor), "staleness": receipt.staleness, "metrics": metrics}
        self._tell(kind, sent.node, receipt.reason, **judged)
        if self.path and kind != "stale" and self.server.version % self.every == 0:
            self.save()

    def _tell(self, kind: str, node: int, reason: str = "", **judged: object) -> None:
        slot = self.slots.of.get(node)
        self.tally.setdefault(None if slot is None else node, Counter())[kind] += 1
        if self.watch:
            self.watch(Event(kind, node, slot, self.server.version, reason, **judged))

    def _impasse(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.totals().items()) or "nothing happened"
        here = f"{len(list(self.slots.present))} nodes are here, {len(self.open)} messages open"
        return f"Loop.run: no round for {self.patience:g} s at version {self.server.version}; {here}; so far {counts}"

    # What a killed server goes on from

    def save(self) -> None:
        """One file: the server, what is carried, who has which slot, what was counted. Open messages are not in it:
        they belong to Flower's run, and a new run asks every client anew."""
        state = self.server.state_dict()
        tensors = {f"server.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
        about = {
            "flower": self._shapes(),
            "server": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
            "slots": list(self.slots.of.items()),
            "away": list(self.slots.away),
            "tally": [[node, dict(counts)] for node, counts in self.tally.items()],
        }
        files.write(self.path, {**tensors, **{f"carried.{k}": v for k, v in self.layout.carried.items()}}, about)

    def load(self) -> None:
        tensors, about = files.read(self.path)
        if about.get("flower") != self._shapes():
            raise ValueError(f"Loop: {self.path} must be a checkpoint of a loop with this layout, got another file")
        capacity = max((slot for _, slot in about["slots"]), default=-1) + 1
        if capacity > self.server.clients:
            raise ValueError(f"Loop: {self.path} has {capacity} slots in use, the server {self.server.clients} clients")

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        self.server.load_state_dict({**part("server."), **about["server"]})
        self.layout.carried.update(part("carried."))
        self.slots.of = {node: slot for node, slot in about["slots"]}
        # Until they are seen again, all are away; those that were, first.
        self.slots.away = dict.fromkeys([*about["away"], *self.slots.of])
        self.tally = {node: Counter(counts) for node, counts in about["tally"]}

    def _shapes(self) -> list:
        return [[name, list(entry.shape)] for name, entry in self.layout.entries.items()]


def metrics_of(reply: Message) -> dict[str, object]:
    return {name: value for record in reply.content.metric_records.values() for name, value in record.items()}
