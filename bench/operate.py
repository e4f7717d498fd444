"""What observers cost: rounds of a server alone, and of the same server in Watched with metrics and a log.

python bench/operate.py [--device cpu|cuda] [--quick] [--out DIR]
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from prometheus_client import generate_latest
from report import SEED, Row, head, options, table, write
from timing import Clock

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.operate import Observer, Verdict, Watched
from secureafl_ext.operate.json_log import JsonLog, read_line
from secureafl_ext.operate.prometheus import Prometheus

RULES = {"median": {}, "support": RECOMMENDED | {"quorum": 0.0}}
MUST = 0.01  # of a round
LAG = 3  # rounds that an upload is late by
EVERY = 2.0  # seconds between two looks: the default of Watched


@dataclass(frozen=True)
class Sizes:
    clients: int
    parameters: tuple[int, ...]
    seconds: float  # of a block of rounds
    repeats: int  # of a block alone and a block in Watched, in turn, so that a busy machine is busy for both
    calls: int  # of a part


SIZES = {
    "full": Sizes(50, (1_000, 140_000), 1.0, 21, 200),
    "quick": Sizes(50, (1_000, 140_000), 1.0, 5, 50),
    "tiny": Sizes(4, (1_000,), 0.01, 2, 3),
}


@dataclass(frozen=True)
class Block:
    """Seconds per round."""

    submit: float  # median of the calls, on the host
    whole: float  # from the start to the end of everything, the device and the observers included
    adds: float = 0.0  # median over the calls: Watched's submit less the server's within it
    thread: float = 0.0  # CPU time of the observers' thread; other programs on the machine do not count here


class Meter(Observer):
    """The last observer: how much CPU time their thread has used, and how long every submit of the server took."""

    def __init__(self) -> None:
        self.cpu, self.calls = 0.0, []

    def verdicts(self, batch: Sequence[Verdict]) -> None:
        self.calls += [verdict.seconds for verdict in batch]
        self.cpu = time.thread_time()


def block(server: SecureAFL | Watched, updates: torch.Tensor, rounds: int, meter: Meter | None = None) -> Block:
    calls, used = [], meter.cpu if meter else 0.0
    began = time.perf_counter()
    for t in range(rounds):
        client, version = t % len(updates), max(0, server.version - LAG)
        start = time.perf_counter()
        server.submit(client, updates[client], version)
        calls.append(time.perf_counter() - start)
    if updates.is_cuda:
        torch.cuda.synchronize()
    if isinstance(server, Watched):
        assert server.flush()
    submit, whole = statistics.median(calls), (time.perf_counter() - began) / rounds
    if meter is None:
        return Block(submit, whole)
    within = meter.calls[-rounds:]
    adds = statistics.median(call - inner for call, inner in zip(calls, within, strict=True))
    return Block(submit, whole, adds, (meter.cpu - used) / rounds)


def measure(device: str, rule: str, d: int, sizes: Sizes) -> tuple[list[Block], list[Block], float]:
    """(alone, watched, seconds of a look)"""
    random = torch.Generator().manual_seed(SEED)
    updates = torch.randn(sizes.clients, d, generator=random).to(device)
    server, meter = SecureAFL(torch.zeros(d, device=device), sizes.clients, lr=0.01, **RULES[rule]), Meter()
    alone, watched = [], []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        with Watched(server, [Prometheus(), JsonLog(log), meter], every=0) as used:
            warm = block(used, updates, 6 * sizes.clients)  # all pairs are there, and all series
            rounds = max(10, int(sizes.seconds / warm.submit))
            for _ in range(sizes.repeats):
                alone.append(block(server, updates, rounds))
                watched.append(block(used, updates, rounds, meter))
            look = Clock(device, sizes.calls).ms(used.look) / 1e3
        with log.open() as lines:
            told = sum(isinstance(read_line(line), Verdict) for line in lines)
        assert told == 6 * sizes.clients + sizes.repeats * rounds
    return alone, watched, look


def added(alone: list[Block], watched: list[Block], look: float) -> list[object]:
    """Cells of the table. Medians over the pairs: each pair is a moment of the machine."""
    submit = statistics.median(block.submit for block in alone)
    adds = statistics.median(block.adds for block in watched)
    thread = statistics.median(block.thread for block in watched)
    share = (adds + thread) / submit + look / EVERY
    longer = statistics.median(b.whole / a.whole - 1 for a, b in zip(alone, watched, strict=True))
    microseconds = [1e6 * seconds for seconds in (adds, thread, look)]
    return [1e3 * submit, *microseconds, f"{100 * share:.2f}", f"{100 * longer:.2f}"]


def parts(n: int, calls: int) -> list[tuple[str, float]]:
    """(part, microseconds), in the observers' thread and in that of a scrape"""
    clock, batch = Clock("cpu", calls), 5
    verdicts = [
        Verdict(time.time(), "accepted", k % n, "", k, staleness=LAG, factor=1.5, seconds=0.01, reason="accepted")
        for k in range(batch)
    ]
    server = SecureAFL(torch.zeros(1_000), n, **RULES["support"])
    for client in range(n):
        server.submit(client, torch.ones(1_000), server.version)
    with tempfile.TemporaryDirectory() as folder, Watched(server, [], every=0) as watched:
        metrics, log, look = Prometheus(), JsonLog(Path(folder) / "log.jsonl"), watched.look()
        timed = {
            "Prometheus, a verdict": clock.ms(lambda: metrics.verdicts(verdicts)) / batch,
            "JsonLog, a verdict": clock.ms(lambda: log.verdicts(verdicts)) / batch,
            "Prometheus, a look": clock.ms(lambda: metrics.look(look)),
            "JsonLog, a look": clock.ms(lambda: log.look(look)),
            "a scrape": clock.ms(lambda: generate_latest(metrics.registry)),
        }
        log.close()
    return [(part, 1e3 * ms) for part, ms in timed.items()]


def main() -> None:
    chosen = options(__doc__.splitlines()[0], SIZES)
    sizes = SIZES[chosen.sizes]
    torch.manual_seed(SEED)
    n, rows, lines = sizes.clients, [], []
    for rule in RULES:
        for d in sizes.parameters:
            alone, watched, look = measure(chosen.device, rule, d, sizes)
            m = SecureAFL(torch.zeros(1), 1, **RULES[rule]).config.memory
            for how, several in (("alone", alone), ("watched", watched)):
                rows.append(Row(rule, how, n, d, m, 1e3 * statistics.median(block.whole for block in several)))
            lines.append((rule, n, d, *added(alone, watched, look)))
    text = [
        head("What observers cost", chosen.device),
        f"A server alone, and in `Watched` with `Prometheus` and `JsonLog`: blocks of {sizes.seconds:g} s in turn, "
        f"{sizes.repeats} of each, medians over the pairs. `submit`: the call on the host. `adds`: what `Watched` does "
        "in it before and after the server. `thread`: CPU time of the observers' thread per round. `look`: one, "
        f"every {EVERY:g} s. `all`: these three, of `submit` alone; at most {MUST:.0%} where that takes 10 ms or more. "
        "`whole`: how much longer a block takes, device and observers included; other programs count here too.",
        table(("rule", "n", "d", "submit, ms", "adds, us", "thread, us", "look, us", "all, %", "whole, %"), lines),
        f"The parts, {n} clients, on the host and alone:",
        table(("part", "us"), parts(n, sizes.calls)),
    ]
    write(chosen.out, "operate", "\n\n".join(text), rows, picture=False)


if __name__ == "__main__":
    main()
