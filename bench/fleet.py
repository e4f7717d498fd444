"""Rounds of the recommended rule for many clients and large models: whole updates beside sketches.

    python bench/fleet.py                          # d = 140,000, up to 100,000 clients
    python bench/fleet.py --device cuda --sizes 140000 100000000 --clients 100 1000
    python bench/fleet.py --device cuda --sizes 100000000 --clients 100 --history-device cpu

A round of `submit`, the same in a CUDA graph, a refresh of the weights (once in 2 n rounds), and the memory of the
history. "Copy" is the time to copy as many bytes as a round must move: the update, the model and the next one, the
client's mean in and out, or the places of a sketch; with --keep-last also the model it was trained on, and the last
update and model in and out. With --history-device cpu it is the copy of what crosses the bus, both ways at once: these
two rows in and out.
"""

import argparse
from typing import NamedTuple

import torch
from report import SEED, head
from timing import Clock, fits, free_memory

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.engines.host_memory import history_zeros

WARM = 5  # different updates, and uploads before the clock runs: the first ones allocate


def fill(server: SecureAFL, random: torch.Generator) -> None:
    """As if every client had uploaded until its part of Q was full."""
    engine = server._engine
    engine.seen.fill_(True)
    engine.presence.uploads[:, 0] = engine.recorded.fill_(engine.factors.shape[1])
    engine.factors.copy_(torch.rand(engine.factors.shape, generator=random, device=random.device))
    engine.support.norms.copy_(torch.rand(server.clients, generator=random, device=random.device))


def bus_ms(clock: Clock, size: int) -> tuple[float, float]:
    """Time to copy `size` bytes from the host and as many back: (both ways at once, one after the other)"""
    device = torch.device(clock.device, 0)
    there = history_zeros("cpu", 2, size // 4, dtype=torch.float32, device=device)
    here = torch.zeros(2, size // 4, device=device)
    other = torch.cuda.Stream()

    def both() -> None:
        other.wait_stream(torch.cuda.current_stream())
        here[0].copy_(there[0])
        with torch.cuda.stream(other):
            there[1].copy_(here[1])
        torch.cuda.current_stream().wait_stream(other)

    def in_turn() -> None:
        here[0].copy_(there[0])
        there[1].copy_(here[1])

    return clock.ms(both), clock.ms(in_turn)


class Times(NamedTuple):
    """Milliseconds; and the bytes of the history."""

    round: float
    in_graph: float | None
    refresh: float
    history: int


def measured(clock: Clock, clients: int, size: int, **settings: object) -> Times:
    random = torch.Generator(clock.device).manual_seed(SEED)
    updates = torch.randn(WARM, size, generator=random, device=clock.device)
    server = SecureAFL(torch.zeros(size, device=clock.device), clients, **RECOMMENDED, **settings)
    engine = server._engine

    def submit() -> None:
        server.submit(server.version % clients, updates[server.version % WARM], server.version)

    for _ in range(WARM if server.config.sketch else max(WARM, clients)):  # then every client has a whole update
        submit()
    if server.config.sketch:
        fill(server, random)
    round_ms = clock.ms(submit)
    history = sum(tensor.numel() * tensor.element_size() for tensor in engine._tensors().values())
    if server.config.sketch:
        engine.support.means.normal_(0, size**-0.5, generator=random)
        engine.support.noise.fill_(0.1)
        everyone = torch.ones(clients, dtype=torch.bool, device=clock.device)
        return Times(round_ms, None, Clock(clock.device, 1).ms(lambda: engine.support.refresh(everyone)), history)

    def with_refresh() -> None:
        engine._rounds.fill_(engine.every - 1)  # the refresh is inside the op
        submit()

    refresh_ms = clock.ms(with_refresh) - round_ms
    client = torch.zeros(1, dtype=torch.int64, device=clock.device)

    def enqueue() -> None:
        server.enqueue(client, updates[0], server.model)

    return Times(round_ms, clock.graph_ms(enqueue), refresh_ms, history)


def kept(options: argparse.Namespace, sketch: int) -> tuple[int, int]:
    """Bytes per coordinate of a client's mean, and of its last update and model."""
    return 2 if options.two_bytes and not sketch else 4, 8 * options.keep_last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[140_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--sketch", type=int, default=2048)
    parser.add_argument("--history-device", default="model", choices=("model", "cpu"))
    parser.add_argument("--keep-last", action="store_true", help="keep each client's last update and model too")
    parser.add_argument("--two-bytes", action="store_true", help="keep whole means in bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    options.keep_last |= options.history_device == "cpu"  # nothing else would be there
    clock = Clock(options.device, options.repeats)
    on_host = options.history_device == "cpu"
    print(head("fleet", options.device))
    print("| clients | d | kept of a client | round, ms | in a graph, ms | refresh, ms | history, GB | copy, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for size in options.sizes:
        in_turn = None
        for clients in options.clients:
            for sketch in (0,) if on_host else (0, options.sketch):
                mean, last = kept(options, sketch)
                there, rows = last if on_host else 0, clients * (sketch or size)
                if not fits((mean + last - there) * rows, options.device) or (not sketch and clients > 1024):
                    continue
                if there * rows > 0.9 * free_memory("cpu"):
                    continue
                if on_host:
                    copy, in_turn = bus_ms(clock, there * size)
                else:
                    copy = clock.copy_ms(size * (16 if sketch else 12 + 2 * mean) + 20 * size * options.keep_last)
                settings = {"history_device": options.history_device, "keep_last": options.keep_last}
                if sketch:
                    settings |= {"sketch": sketch, "sketch_seed": SEED}
                elif options.two_bytes:
                    settings["history_dtype"] = torch.bfloat16
                found = measured(clock, clients, size, **settings)
                graph = "" if found.in_graph is None else f"{found.in_graph:.4f}"
                what = f"{sketch:,} numbers" if sketch else "mean in two bytes" if mean == 2 else "mean"
                what += ", last update, model" * options.keep_last
                row = f"{clients:,} | {size:,} | {what} | {found.round:.4f} | {graph} | {found.refresh:.2f}"
                print(f"| {row} | {found.history / 1e9:.3g} | {copy:.4f} |", flush=True)
        if in_turn:
            print(f"\nd = {size:,}: the same bytes over the bus one way after the other: {in_turn:.3f} ms")


if __name__ == "__main__":
    main()
