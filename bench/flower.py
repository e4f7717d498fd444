"""Updates per second of the Flower loop, SecureAFL in it, against the same loop with an empty aggregator.

python bench/flower.py [--device cpu|cuda] [--quick] [--out DIR]
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from report import SEED, Row, head, options, table, write

from secureafl_ext.defenses import make
from secureafl_ext.flower import Layout, Loop

LR, MEMORY = 0.05, 3
EMPTY, MUST = "empty", 0.9


@dataclass(frozen=True)
class Sizes:
    clients: int
    parameters: tuple[int, ...]
    servers: tuple[str, ...]
    updates: int  # timed at a time
    repeats: int  # of every server in turn, so that a busy machine is busy for all


SIZES = {
    "full": Sizes(20, (100_000, 1_000_000), (EMPTY, "async-sgd", "secureafl"), 200, 3),
    "quick": Sizes(20, (100_000,), (EMPTY, "secureafl"), 100, 3),
    "tiny": Sizes(4, (1_000,), (EMPTY, "secureafl"), 10, 1),
}


class Empty:
    """Takes every update and does nothing: what is left is Flower's own limit."""

    def __init__(self, model: torch.Tensor, clients: int):
        self.model, self.clients, self.lr, self.version = model, clients, LR, 0

    def submit(self, client: int, update: torch.Tensor, version: int) -> "Taken":
        self.version += 1
        return Taken(self.version - 1 - version)


@dataclass(frozen=True)
class Taken:
    staleness: int
    accepted = True
    factor = 1.0
    reason = "accepted"


def client() -> ClientApp:
    """A quadratic client, so that every pair counts: one step towards a centre of its own. It costs next to nothing."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        given = message.content["arrays"]["w"].numpy()
        centre = np.float32(context.node_config["partition-id"])
        given += np.float32(message.content["config"]["lr"]) * (centre - given)
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(given)})}), reply_to=message)

    return app


def rate(grid: Grid, make_server: Callable[[torch.Tensor], object], size: int, device: str, sizes: Sizes) -> float:
    """Updates per second, once every client has all its pairs."""
    state = {"w": torch.zeros(size)}
    layout = Layout(state)
    loop = Loop(grid, make_server(layout.flatten(state).to(device)), layout)
    warm = sizes.clients * (MEMORY + 3)
    loop.run(warm)
    began = time.perf_counter()
    loop.run(warm + sizes.updates)
    took = time.perf_counter() - began
    while loop.open:  # the next loop starts on a quiet grid
        for reply in grid.pull_messages(list(loop.open)):
            loop.open.pop(reply.metadata.reply_to_message_id, None)
        time.sleep(0.01)
    return sizes.updates / took


def measure(device: str, sizes: Sizes) -> dict[tuple[int, str], list[float]]:
    """All in one simulation: Ray starts once."""
    rates: dict[tuple[int, str], list[float]] = {(d, name): [] for d in sizes.parameters for name in sizes.servers}
    app = ServerApp()

    def maker(name: str) -> Callable[[torch.Tensor], object]:
        if name == EMPTY:
            return lambda model: Empty(model, sizes.clients)
        return lambda model: make(name, model, sizes.clients, LR, 4 * sizes.clients)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        rate(grid, maker(EMPTY), min(sizes.parameters), device, sizes)  # Ray's workers start meanwhile
        for _ in range(sizes.repeats):
            for d, name in rates:
                rates[d, name].append(rate(grid, maker(name), d, device, sizes))

    run_simulation(app, client(), sizes.clients)
    return rates


def main() -> None:
    chosen = options(__doc__.splitlines()[0], SIZES)
    sizes = SIZES[chosen.sizes]
    torch.manual_seed(SEED)
    rates = measure(chosen.device, sizes)
    rows, lines = [], []
    for (d, name), several in rates.items():
        middle = statistics.median(several)
        limit = statistics.median(rates[d, EMPTY])
        rows.append(Row("flower", name, sizes.clients, d, MEMORY, 1e3 / middle))
        spread = f"{min(several):.3g} to {max(several):.3g}"
        lines.append((name, sizes.clients, d, middle, spread, 1e3 / middle, middle / limit))
    text = [
        head("The Flower loop", chosen.device),
        f"Simulation runtime (Ray) on {os.cpu_count()} cores, which clients and server share; {sizes.clients} clients "
        f"with quadratic losses, {sizes.updates} updates at a time, median of {sizes.repeats}. `{EMPTY}` takes every "
        f"update and does nothing: Flower's own limit. A server must reach {MUST:.0%} of it.",
        table(("server", "n", "d", "updates/s", "from to", "ms/update", "of the limit"), lines),
    ]
    write(chosen.out, "flower", "\n\n".join(text), rows, picture=False)


if __name__ == "__main__":
    main()
