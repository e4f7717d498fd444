"""Time whole simulated rounds, gradient, attack and server, and what the loop adds to their parts.

python bench/simulator.py [--device cpu|cuda] [--quick] [--out DIR]
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from report import SEED, Row, head, options, ratio, table, write
from timing import Clock
from tqdm import tqdm

from secureafl_ext.attacks import ATTACKS
from secureafl_ext.defenses import DEFENSES
from secureafl_ext.sim import loop, runner
from secureafl_ext.sim.settings import Settings

MUST = {"async-sgd": 0.120, "secureafl": 0.200}  # ms a round on an H200 with 50 clients
GRADIENT, SERVER = "gradient", "server"


@dataclass(frozen=True)
class Sizes:
    rounds: int  # timed
    clients: int
    defenses: tuple[str, ...]  # each without an attack
    attacks: tuple[str, ...]  # each against SecureAFL
    together: tuple[int, ...]  # runs side by side
    repeats: int


ALL = (*(name for name in DEFENSES if not name.startswith("secureafl-")), "secureafl-kin", "secureafl-support")
SIZES = {
    "full": Sizes(2_000, 50, ALL, tuple(ATTACKS), (1, 2, 4, 8, 16), 20),
    "quick": Sizes(10, 50, ("async-sgd", "secureafl"), ("gaussian",), (1, 2), 3),
    "tiny": Sizes(4, 5, ("async-sgd", "secureafl"), ("sign-flip",), (1, 2), 1),
}
ON_CPU = 200  # rounds: a hundredth of a GPU's speed


def settings(device: str, sizes: Sizes, rounds: int, **changed: object) -> Settings:
    """Two stretches: the first for all that is captured, allocated and loaded once, the second for the clock."""
    fixed = {"clients": sizes.clients, "seed": SEED, "device": device, "rounds": 2 * rounds, "evaluations": 2}
    return Settings(**fixed, **changed).resolve()


def round_ms(chosen: Settings) -> tuple[float, dict[str, float]]:
    """A round, on average over the second half of a run; on a CPU also what of it is gradient and server."""
    with loop.side_stream(chosen.device), loop.exact():
        rounds = loop.Rounds(chosen)
        half = advance_half(rounds)
        inside = {GRADIENT: 0.0, SERVER: 0.0}
        if chosen.device == "cpu":
            rounds.net.gradient = stopwatch(rounds.net.gradient, inside, GRADIENT)
            rounds.server.enqueue = stopwatch(rounds.server.enqueue, inside, SERVER)
        start = time.perf_counter()
        advance_half(rounds)
        whole = time.perf_counter() - start
        return 1e3 * whole / half, {part: 1e3 * seconds / half for part, seconds in inside.items()}


def advance_half(rounds: loop.Rounds) -> int:
    """How many rounds that was; they are done when this returns."""
    half = len(rounds.plan)
    rounds.advance(half)
    rounds.at.item()
    return half


def stopwatch(call: Callable[..., object], spent: dict[str, float], name: str) -> Callable[..., object]:
    def timed(*arguments: object) -> object:
        start = time.perf_counter()
        result = call(*arguments)
        spent[name] += time.perf_counter() - start
        return result

    return timed


def graph_ms(chosen: Settings, clock: Clock) -> dict[str, float]:
    """Gradient and server of a round alone, on a GPU, in graphs of several."""
    with loop.side_stream(chosen.device), loop.exact():
        rounds = loop.Rounds(chosen)
        rounds.advance(min(len(rounds.plan), 3 * chosen.clients))
        server, model = rounds.server, rounds.federation.start
        x, y = rounds.data.train(rounds.federation.draw(torch.tensor(0), "look").to(chosen.device))
        who = torch.zeros(1, dtype=torch.int64, device=chosen.device)
        stale = torch.zeros((), dtype=torch.float64, device=chosen.device)
        update = rounds.net.gradient(model, x, y)
        return {
            GRADIENT: clock.graph_ms(lambda: rounds.net.gradient(model, x, y)),
            SERVER: clock.graph_ms(lambda: server.enqueue(who, update, model, stale)),
        }


def rounds_per_second(chosen: Settings, together: int) -> float:
    """Of all of so many runs, each on a thread and a stream of its own, over the second half of each."""
    ready = threading.Barrier(together + 1)

    def one() -> None:
        try:
            with loop.side_stream(chosen.device), loop.exact():
                rounds = loop.Rounds(chosen)
                advance_half(rounds)
                ready.wait()
                advance_half(rounds)
        except BaseException:
            ready.abort()
            raise

    with loop.exact(), ThreadPoolExecutor(together) as pool:
        futures = [pool.submit(one) for _ in range(together)]
        with suppress(threading.BrokenBarrierError):  # one of them will tell why
            ready.wait()
        start = time.perf_counter()
        for future in futures:
            future.result()
        return together * chosen.rounds / 2 / (time.perf_counter() - start)


def main() -> None:
    chosen = options(__doc__.splitlines()[0], SIZES)
    sizes, device = SIZES[chosen.sizes], chosen.device
    count = min(sizes.rounds, ON_CPU) if device == "cpu" else sizes.rounds
    clock = Clock(device, sizes.repeats)
    rows, lines = [], {"defense": [], "attack": [], "together": []}
    cases = [("defense", name, {"defense": name, "attack": "none"}) for name in sizes.defenses]
    cases += [("attack", name, {"defense": "secureafl", "attack": name}) for name in sizes.attacks]
    for kind, name, changed in tqdm(cases, unit="case", leave=False):
        one = settings(device, sizes, count, **changed)
        whole, parts = round_ms(one)
        d, m = loop.Federation(one).net.size, one.memory
        rows.append(Row(kind, name, sizes.clients, d, m, whole))
        if kind == "attack":
            lines[kind].append((name, f"{whole:.3f}", f"{1e3 / whole:,.0f}"))
            continue
        parts = graph_ms(one, clock) if device == "cuda" else parts
        rows += [Row(part, name, sizes.clients, d, m, ms) for part, ms in parts.items()]
        must = MUST.get(name) if device == "cuda" and sizes.clients == 50 else None
        both = sum(parts.values())
        cells = [f"{ms:.3f}" for ms in (*parts.values(), whole)]
        lines[kind].append((name, *cells, ratio(whole, both), f"{1e3 / whole:,.0f}", must))
        rates = {k: 1e3 / whole if k == 1 else rounds_per_second(one, k) for k in sizes.together}
        rows += [Row(f"{k} at a time", name, sizes.clients, d, m, 1e3 / rate) for k, rate in rates.items()]
        lines["together"].append((name, *(f"{rate:,.0f}" for rate in rates.values())))
    parts = [
        head("The simulator", device),
        f"The paper's CNN on {one.dataset}, batch {one.batch}, {sizes.clients} clients; mean over {count:,} rounds "
        f"after as many to warm up. On a GPU every round is a CUDA graph, its parts are timed alone, also in graphs. "
        "On a CPU they are timed within the same rounds.",
        "## Rounds without an attack",
        table(
            ("defense", "gradient ms", "server ms", "round ms", "x parts", "rounds/s", "must ms"),
            lines["defense"],
        ),
        "## Rounds of SecureAFL, a fifth of the clients malicious",
        table(("attack", "round ms", "rounds/s"), lines["attack"]),
        "## Runs side by side",
        f"Rounds a second in all, without an attack; `secureafl` has {runner.SIDE_BY_SIDE} at a time on a GPU.",
        table(("defense", *(f"{together} at a time" for together in sizes.together)), lines["together"]),
    ]
    write(chosen.out, "simulator", "\n\n".join(parts), rows, picture=False)


if __name__ == "__main__":
    main()
