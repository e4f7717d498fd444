"""The Flower loop under load: floods of uploads, nodes of very different speeds, churn for a million uploads.

    python bench/loop_load.py flood
    python bench/loop_load.py speeds
    python bench/loop_load.py churn --nodes 10000 --uploads 1000000

Nodes answer on a grid in memory and a simulated clock, so a run costs what the loop itself costs. The model has one
parameter, and the server counts and does nothing else; a round takes `ROUND` seconds of simulated time. Everything
else is the package's own: messages, layout, slots, turns. `churn` ends with 1 if memory or time per upload grows.
"""

import argparse
import heapq
import logging
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message, Metadata, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from report import SEED, head, table

from secureafl_ext.flower import Event, Layout, Loop
from secureafl_ext.flower import loop as module

ROUND = 2e-4  # simulated seconds of a round
START = {"w": torch.zeros(1)}
MOST_GROWTH, MOST_SLOWDOWN = 0.02, 0.5
FLOODS = (0.33, 0.60, 0.80, 0.94)
HONEST, MALICIOUS = 40, 10


class Clock:
    """Stands in for the loop's `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Taken:
    staleness: int
    accepted = True
    factor = 1.0
    reason = ""


class Counting:
    """A server that counts rounds and does nothing else."""

    lr = 1.0

    def __init__(self, clients: int, clock: Clock):
        self.clients, self.clock = clients, clock
        self.model, self.version, self.forgotten = torch.zeros(1), 0, 0

    def submit(self, client: int, update: torch.Tensor, version: int) -> Taken:
        self.clock.now += ROUND
        self.version += 1
        return Taken(self.version - 1 - version)

    def forget(self, client: int) -> None:
        self.forgotten += 1

    def leave(self, client: int) -> None:
        pass


@dataclass
class Fleet:
    """A grid whose nodes send back the model that they got. A reply of a node that has left meanwhile is lost."""

    clock: Clock
    seconds: dict[int, float]  # mean time of an answer by node that is present
    random: random.Random
    replies: list = field(default_factory=list)  # (time, number, message)
    since: dict[int, int] = field(default_factory=dict)  # by node: the first message since it has come
    numbers: Iterable[int] = field(default_factory=count)

    def join(self, node: int, seconds: float) -> None:
        self.seconds[node], self.since[node] = seconds, next(self.numbers)

    def leave(self, node: int) -> None:
        del self.seconds[node], self.since[node]

    def get_node_ids(self) -> list[int]:
        return list(self.seconds)

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        number, node = next(self.numbers), message.metadata.dst_node_id
        if node not in self.seconds:
            return ""
        at = self.clock.now + self.seconds[node] * self.random.uniform(0.5, 1.5)
        heapq.heappush(self.replies, (at, number, message))
        return str(number)

    def pull_messages(self, identifiers: Sequence[str]) -> list[Message]:
        pulled = []
        while self.replies and self.replies[0][0] <= self.clock.now:
            at, number, message = heapq.heappop(self.replies)
            node = message.metadata.dst_node_id
            if number > self.since.get(node, sys.maxsize):
                about = Metadata(1, "", node, 1, str(number), "", at, 1.0, "train")
                pulled.append(Message(metadata=about, content=RecordDict({"arrays": message.content["arrays"]})))
        return pulled


def start(
    nodes: dict[int, float], capacity: int, watch: Callable[[Event], None], **settings: float
) -> tuple[Loop, Fleet, Clock]:
    for name in ("_task_id", "_run_id", "_node_id"):
        setattr(TaskIdentity, name, 1)  # Flower's messages ask which run they are made in
    clock = module.time = Clock()
    fleet = Fleet(clock, {}, random.Random(SEED))
    for node, seconds in nodes.items():
        fleet.join(node, seconds)
    return Loop(fleet, Counting(capacity, clock), Layout(START), watch=watch, **settings), fleet, clock


@dataclass(frozen=True)
class Result:
    rate: float  # honest rounds per simulated second
    share: float  # honest rounds of all rounds
    staleness: tuple[float, float]  # median and 99th percentile of honest rounds
    nodes: int  # honest nodes with a round
    host: float  # microseconds of host time per round


def measure(nodes: dict[int, float], honest: set[int], seconds: float, **settings: float) -> Result:
    """So many simulated seconds, after as many on the way to the steady state. The slowest node must answer in them."""
    seen: list[Event] = []
    loop, _, clock = start(nodes, len(nodes), seen.append, **settings)
    run_until(loop, clock, seconds)
    seen.clear()
    began, host = clock.now, time.process_time()
    run_until(loop, clock, 2 * seconds)
    host = time.process_time() - host
    done = [event for event in seen if event.kind == "accepted"]
    mine = [event for event in done if event.node in honest]
    median, late = np.percentile([event.staleness for event in mine], [50, 99])
    whose = len({event.node for event in mine})
    return Result(len(mine) / (clock.now - began), len(mine) / len(done), (median, late), whose, 1e6 * host / len(done))


def run_until(loop: Loop, clock: Clock, seconds: float) -> None:
    while clock.now < seconds:
        loop.run(loop.server.version + 10)


def flood() -> str:
    draw = random.Random(SEED)
    honest = {node: draw.uniform(0.5, 2.0) for node in range(HONEST)}
    lines = []
    for turns in (0.0, 0.5, 1.0):
        alone = measure(honest, set(honest), 40.0, turns=turns)
        lines.append((turns, "none", alone.rate, 1.0, 1.0, *alone.staleness))
        for share in FLOODS:
            uploads = share / (1 - share) * sum(1 / seconds for seconds in honest.values())
            quick = {HONEST + k: MALICIOUS / uploads for k in range(MALICIOUS)}
            got = measure({**honest, **quick}, set(honest), 40.0, turns=turns)
            lines.append((turns, f"{share:.0%}", got.rate, got.rate / alone.rate, got.share, *got.staleness))
    columns = ("turns", "flood", "honest rounds/s", "of those without attackers", "share of the rounds")
    return table((*columns, "median staleness", "99 %"), lines)


def speeds() -> str:
    draw = random.Random(SEED)
    nodes = {node: 0.1 * 1000 ** draw.random() for node in range(1000)}
    lines = []
    for turns, places in ((0.0, 1000), (0.5, 1000), (0.5, 600), (0.5, 300), (0.5, 100), (1.0, 1000)):
        settings = {} if places == 1000 else {"in_flight": places}
        got = measure(nodes, set(nodes), 150.0, turns=turns, **settings)
        lines.append((turns, places, got.rate, got.nodes, *got.staleness, 1e6 / got.host))
    columns = ("turns", "in_flight", "rounds/s", "nodes with a round", "median staleness", "99 %")
    return table((*columns, "rounds/s of host time"), lines)


def resident() -> float:
    """MiB"""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def entries(loop: Loop) -> dict[str, int]:
    """Sizes of the loop's tables."""
    kept = loop.turns._last_round, loop.turns._failures
    tables = loop.open, loop.answers, loop.slots.of, loop.tally, loop._message, *kept
    names = ("open", "waiting", "slots", "tallies", "last messages", "last rounds", "failures")
    return {name: len(table) for name, table in zip(names, tables, strict=True)}


def churn(nodes: int, uploads: int) -> tuple[str, bool]:
    """Of `nodes` slots nine of ten are taken. Every simulated second 1 % of the nodes leave, and as many join: half of
    them were there before, the others are new and take the slots of nodes that are away."""
    draw, new = random.Random(SEED), count(nodes)
    seconds = [30**share for share in (draw.random() for _ in range(1000))]  # 1 to 30 s
    first = {k: draw.choice(seconds) for k in range(9 * nodes // 10)}
    loop, fleet, clock = start(first, nodes, lambda event: None, ttl=120.0)
    away: list[int] = []
    names = fleet.get_node_ids

    def look() -> list[int]:
        for node in draw.sample(names(), nodes // 100):
            fleet.leave(node)
            away.append(node)
            other = next(new) if draw.random() < 0.5 else away.pop(draw.randrange(len(away)))
            fleet.join(other, draw.choice(seconds))
        del away[: -(nodes // 5)]  # these do not come back
        return names()

    fleet.get_node_ids = look
    lines, parts, before = [], 20, time.process_time()
    for part in range(1, parts + 1):
        loop.run(uploads * part // parts)
        now = time.process_time()
        if part in (1, parts // 10, parts // 2, parts):
            sizes = ", ".join(f"{size:,} {name}" for name, size in entries(loop).items())
            us = 1e6 * (now - before) * parts / uploads
            lines.append((f"{part / parts:.0%}", f"{clock.now:.0f}", resident(), us, sizes))
        before = time.process_time()
    early, late = lines[1], lines[-1]
    flat = late[2] <= early[2] * (1 + MOST_GROWTH) and late[3] <= early[3] * (1 + MOST_SLOWDOWN)
    totals = ", ".join(f"{number:,} {kind}" for kind, number in sorted(loop.totals().items()))
    columns = ("of the uploads", "simulated s", "resident MiB", "host us/upload", "entries")
    return f"{table(columns, lines)}\n\nEvents: {totals}; {loop.server.forgotten:,} forgotten.", flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["flood", "speeds", "churn"])
    parser.add_argument("--nodes", type=int, default=10_000, help="of churn (default: 10000)")
    parser.add_argument("--uploads", type=int, default=1_000_000, help="of churn (default: 1000000)")
    chosen = parser.parse_args()
    logging.getLogger("secureafl_ext").setLevel(logging.ERROR)  # as an operator would not: a line per lost message
    print(head(f"The loop under load: {chosen.what}", "cpu"), end="\n\n")
    if chosen.what == "churn":
        text, flat = churn(chosen.nodes, chosen.uploads)
        print(text)
        sys.exit(not flat)
    print({"flood": flood, "speeds": speeds}[chosen.what]())


if __name__ == "__main__":
    main()
