"""A world for the Flower loop that one seed decides: clock, network, fleet and disk, with all their faults."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import Error, Message
from fuzz.dice import Dice
from loop.disk import ERRORS, Disk, DiskError
from loop.model import Model
from loop.replies import KINDS, Reply
from loop.tables import Pulled
from memory_grid import Clock, MemoryGrid

MOST_KILLS = 4
RATES = (0.125, 0.25, 0.5)  # lr: powers of two, by which everybody divides alike


class Killed(BaseException):
    """The process ends here."""


class GridError(ConnectionError):
    """The connection to Flower fails."""


@dataclass(frozen=True)
class Faults:
    """How often: a share of the calls, replies or looks."""

    dropped: float = 0.0
    duplicated: float = 0.0
    unasked: float = 0.0  # replies that are handed out although nobody asks for them
    refused: float = 0.0
    connection: float = 0.0
    disk: float = 0.0
    killed: float = 0.0
    churn: float = 0.0
    crowds: float = 0.0  # many nodes join or leave at once
    slow_calls: float = 0.0
    schedule: float = 0.0  # the server's lr is set to another one
    oversleeps: float = 0.9


def draw_faults(dice: Dice) -> Faults:
    """Each kind of fault is missing from half of the histories: some defects show only without the others."""

    def share(most: float) -> float:
        return dice.choice((0.0, most * dice.random()))

    return Faults(
        dropped=share(0.3),
        duplicated=share(0.3),
        unasked=share(0.5),
        refused=share(0.3),
        connection=share(0.05),
        disk=share(0.05),
        killed=share(0.03),
        churn=dice.choice((0.0, 0.3, 1.0)),
        crowds=share(0.1),
        slow_calls=share(0.3),
        schedule=share(0.2),
    )


class Node:
    """A client: how long it takes, and what it sends. Both change with time."""

    def __init__(self, world: "World", node: int):
        self.world, self.node, dice = world, node, world.dice
        self.seconds = 10 ** dice.uniform(-3, 0.7)
        self.honesty = dice.choice((1.0, 1.0, 0.7, 0.0))
        self.habit = dice.choice(world.kinds)  # of a node that is not honest: its usual reply

    def __call__(self, message: Message) -> list[tuple[float, object]]:
        world, dice = self.world, self.world.dice
        sent = world.model_in(message), message.content["config"]["lr"]
        if world.calm:
            return [(0.1 * dice.random(), KINDS[0](dice, *sent))]
        if dice.chance(0.05):
            self.seconds = 10 ** dice.uniform(-3, 1.3)
        if dice.chance(world.faults.dropped):
            return []
        kind = KINDS[0] if dice.chance(self.honesty) else dice.choice((self.habit, dice.choice(world.kinds)))
        world.counts[f"reply {kind.__name__}"] += 1
        answers = [(self.seconds * dice.random(), kind(dice, *sent))]
        if dice.chance(world.faults.duplicated):
            answers.append((self.seconds * 2 * dice.random(), answers[0][1]))
        return answers


class World(MemoryGrid):
    """The grid and the clock of one history. It tells the model everything that passes."""

    def __init__(self, dice: Dice, faults: Faults, model: Model, say: Callable[[str], None] | None = None):
        super().__init__({}, Clock(), expires=dice.chance(0.7))
        self.clock.sleep = self.sleep  # the loop's `time` is the clock
        self.dice, self.faults, self.model, self.say = dice, faults, model, say
        self.kinds = dice.sample(KINDS, dice.randrange(1, len(KINDS)))  # what nodes send in this history
        self.disk = Disk(self.touch, self._replaced)
        self.looks_every = dice.choice((0.01, 0.1, 1.0))  # seconds: histories are short, and nodes come and go in looks
        self.calm, self.touches, self.kills = False, 0, 0
        self.kill_at: int | None = None  # the number of a touch
        self.failed_pull: list[str] | None = None  # what the last pull asked for, if it failed
        self.gone: dict[int, Node] = {}  # nodes that left and may come back
        self.counts: Counter = Counter()
        self.last_round = -math.inf
        self.loop = None  # set by the history: its tables are compared with the model's

    @property
    def now(self) -> float:
        return self.clock.now

    # Every call of the loop to the outside comes through here

    def touch(self, what: str) -> None:
        """The process may be killed here, or the disk fail."""
        if self.disk.dead:
            raise Killed
        self.touches += 1
        if self.say:
            self.say(f"{self.touches:5d} {self.now:9.3f}  {what}")
        random = not self.calm and self.kill_at is None and self.kills < MOST_KILLS
        if self.touches == self.kill_at or (random and self.dice.chance(self.faults.killed)):
            self.kills += 1
            self.counts[f"killed at {what.split(':')[0]}"] += 1
            self.tell("killed")
            self.disk.dead = True
            raise Killed
        if what.startswith("disk") and self._chance(self.faults.disk):
            self.counts[f"error of {what}"] += 1
            number = self.dice.choice(ERRORS)
            self.tell(f"error {number} of the disk")
            raise DiskError(number, "the disk fails")

    def tell(self, line: str) -> None:
        if self.say:
            self.say(f"      {line}")

    def _chance(self, share: float) -> bool:
        return not self.calm and self.dice.chance(share)

    def _call(self, what: str) -> None:
        """A call of the grid: it may take time, and the connection may fail."""
        self.touch(what)
        if self._chance(self.faults.slow_calls):
            self.clock.now += self.dice.choice((0.01, 0.3, 2.0))
        self._may_fail(what.split(":")[0])

    def _may_fail(self, call: str) -> None:
        if self._chance(self.faults.connection):
            self.counts[f"connection fails at {call}"] += 1
            self.tell("the connection fails")
            raise GridError("the connection fails")

    def sleep(self, seconds: float) -> None:
        self.touch(f"sleep: {seconds:g}")
        self.model.sleeps()
        self.model.compare(self.loop)
        self.model.compare_sizes(self.loop)
        self.clock.now += seconds
        if self.dice.chance(self.faults.oversleeps):  # to the next thing that can happen: histories stay short
            times = [one[0] for one in self.queue] + [sent.deadline + 1e-3 for sent in self.model.open.values()]
            times += [at for at in self.model.ask_at.values() if at > self.now]
            self.clock.now = max(self.now, min((at for at in times if at > self.now), default=self.now))
        self.model.slept_at = self.now

    def watch(self, event) -> None:
        self.counts[event.kind] += 1
        self.last_round = self.now if event.kind in ("accepted", "rejected") else self.last_round
        self.tell(f"{event.kind}: node {event.node}, slot {event.slot}, version {event.version} {event.reason:.60}")
        self.model.happened(event, self.now)
        self._may_set_lr()
        self.touch(f"event: {event.kind}")

    def _may_set_lr(self) -> None:
        if self._chance(self.faults.schedule):
            lr = self.dice.choice(RATES)
            self.counts["lr set"] += 1
            self.tell(f"lr {lr}")
            self.loop.server.lr = lr
            self.model.set_lr(lr)

    def _replaced(self) -> None:
        self.counts["checkpoints"] += 1
        self.model.saved()

    # The grid

    def get_node_ids(self) -> list[int]:
        failed, self.failed_pull = self.failed_pull, None
        self._call("nodes")
        if failed is not None:  # the loop only checks the connection
            self.model.pull_failed(failed)
            return list(self.nodes)
        self.model.catch_up(self.loop)
        self._move()
        listed = self.dice.sample(list(self.nodes), len(self.nodes))
        self.tell(f"nodes {listed}")
        self.model.looked(listed)
        return listed + listed[: self.dice.randrange(2)]

    def push_messages(self, messages: list[Message]) -> list:
        (message,) = messages
        node = message.metadata.dst_node_id
        self._call(f"push: to {node}")
        vector, config = self.model_in(message), dict(message.content["config"])
        refused = node not in self.nodes or self._chance(self.faults.refused)
        if refused:
            self.counts["refused"] += 1
            taken = self.dice.choice(([], [""], [None]))
        else:
            taken = super().push_messages(messages)
            self._may_fail("push")  # the node has the message, and the loop does not know its id
        self.tell(f"version {config['version']}: {taken}")
        self.model.pushed(node, vector, config, next(iter(filter(None, taken)), None), self.now)
        return taken

    def pull_messages(self, identifiers: list[str]) -> list[Message]:
        self.model.asks(identifiers, self.now)
        self.failed_pull = identifiers
        self._call(f"pull: {len(identifiers)}")
        wanted = set(identifiers)
        if self._chance(self.faults.unasked):
            broken = {one[1] for one in self.queue if isinstance(one[2], Exception)}
            wanted.update(one[1] for one in self.queue if one[1] not in broken)
        due = super().pull_messages(wanted)
        self.failed_pull = None
        due += [reply for reply in due if self._chance(self.faults.duplicated)]
        self.dice.shuffle(due)
        pulled = [pulled_as(reply) for reply in due]
        for one in pulled:
            self.tell(f"reply to {one.message}, sender {one.sender}")
        self.model.got(pulled)
        return due

    def _queue(self, message: Message, answer: object, seconds: float, src: int | None = None) -> None:
        """A reply with the truth about it."""
        reply = answer if isinstance(answer, Reply) else Reply(Error(answer, "no reply"))
        if isinstance(reply.body, Exception):
            super()._queue(message, reply.body, seconds)
            return
        super()._queue(message, reply.body, seconds, src)
        at, identifier, made = self.queue.pop()
        about = dict(reply.about)
        if "reply_to_message_id" in about:
            identifier, about["reply_to_message_id"] = self._forged_id(message, about["reply_to_message_id"])
        made.metadata.__dict__.update({f"_{name}": value for name, value in about.items()})
        made.__dict__["truth"] = replace(reply, about=about)
        self.queue.append((at, identifier, made))

    def _forged_id(self, message: Message, which: object) -> tuple[str, object]:
        """(the message for whose reply the grid takes it, the message that it says it answers)"""
        mine = message.metadata.message_id
        others = list(self.model.open)
        said = {"other": self.dice.choice(others) if others else "nobody's", "old": "message 0"}.get(which, which)
        return (said if isinstance(said, str) and self.dice.chance(0.7) else mine), said

    def model_in(self, message: Message) -> np.ndarray:
        """The values are the last bytes of each array."""
        content = message.content["arrays"]
        data = b"".join(content[name].data[-count * 4 :] for name, count in (("w", 4), ("b", 2)))
        return np.frombuffer(data, np.float32)

    # The fleet

    def _move(self) -> None:
        """Nodes join, leave and come back."""
        dice = self.dice
        if self._chance(self.faults.churn):
            for node in dice.sample(list(self.nodes), min(len(self.nodes), dice.randrange(3))):
                self.gone[node] = self.nodes.pop(node)
            for node in dice.sample(list(self.gone), min(len(self.gone), dice.randrange(3))):
                self.nodes[node] = self.gone.pop(node)
            self.join(dice.randrange(3))
        if self._chance(self.faults.crowds):
            self.counts["crowds"] += 1
            if len(self.nodes) > 20:
                self.gone |= {node: self.nodes.pop(node) for node in dice.sample(list(self.nodes), len(self.nodes) - 2)}
            else:
                self.join(dice.choice((20, 20, 20, 200)))
        if not self.nodes and (self.calm or dice.chance(0.5)):
            self.join(1)
        while len(self.gone) > 300:
            del self.gone[next(iter(self.gone))]

    def join(self, count: int) -> None:
        for _ in range(count):
            node = self.dice.getrandbits(64)
            self.nodes[node] = Node(self, node)


def pulled_as(reply: Message) -> Pulled:
    about = reply.metadata
    return Pulled(about.reply_to_message_id, about.src_node_id, reply.truth)
