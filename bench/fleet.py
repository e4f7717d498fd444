"""Rounds of the recommended rule for many clients: whole updates beside sketches.

    python bench/fleet.py                          # d = 140,000, up to 100,000 clients
    python bench/fleet.py --device cuda --sizes 140000 100000000 --clients 100 1000
    python bench/fleet.py --device cuda --sizes 100000000 --clients 100 --history-device cpu

A round of `submit`, a refresh of the weights (once in 2 n rounds), and the memory of the history. The floor is a copy
of the bytes that every server must move: the update, the model it was trained on, the current and the next model. With
the history on the host it is the copy of what crosses the bus, both ways at once: two rows of one client in, two out.
"""

import argparse

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
    """Time to copy two rows from the host and two back: (both ways at once, one after the other)"""
    device = torch.device(clock.device, 0)
    there = history_zeros("cpu", 4, size, dtype=torch.float32, device=device)
    here = torch.zeros(4, size, device=device)
    other = torch.cuda.Stream()

    def both() -> None:
        other.wait_stream(torch.cuda.current_stream())
        here[:2].copy_(there[:2])
        with torch.cuda.stream(other):
            there[2:].copy_(here[2:])
        torch.cuda.current_stream().wait_stream(other)

    def in_turn() -> None:
        here[:2].copy_(there[:2])
        there[2:].copy_(here[2:])

    return clock.ms(both), clock.ms(in_turn)


def measured(clock: Clock, clients: int, size: int, sketch: int, place: str) -> tuple[float, float | None, float]:
    """(ms of a round, ms of a refresh or None, bytes of the history)"""
    random = torch.Generator(clock.device).manual_seed(SEED)
    updates = torch.randn(WARM, size, generator=random, device=clock.device)
    start = torch.zeros(size, device=clock.device)
    server = SecureAFL(
        start, clients, **RECOMMENDED, sketch=sketch, sketch_seed=SEED if sketch else None, history_device=place
    )

    def submit() -> None:
        server.submit(server.version % clients, updates[server.version % WARM], server.version)

    if sketch:
        fill(server, random)
    for _ in range(WARM if sketch else max(WARM, clients)):  # whole updates are read of the clients that have one
        submit()
    round_ms = clock.ms(submit)
    kept = sum(tensor.numel() * tensor.element_size() for name, tensor in server._engine._tensors().items())
    if not sketch:  # the refresh is inside the op
        return round_ms, None, kept
    support = server._engine.support
    support.means.normal_(0, size**-0.5, generator=random)
    support.noise.fill_(0.1)
    everyone = torch.ones(clients, dtype=torch.bool, device=clock.device)
    return round_ms, Clock(clock.device, 1).ms(lambda: support.refresh(everyone)), kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[140_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--sketch", type=int, default=2048)
    parser.add_argument("--history-device", default="model", choices=("model", "cpu"))
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    clock = Clock(options.device, options.repeats)
    print(head("fleet", options.device))
    print("| clients | d | kept of an update | round, ms | refresh, ms per round | history, GB | floor, ms |")
    print("|---|---|---|---|---|---|---|")
    place, on_host = options.history_device, options.history_device == "cpu"
    for size in options.sizes:
        floor, in_turn = bus_ms(clock, size) if on_host else (clock.copy_ms(16 * size), None)
        for clients in options.clients:
            for sketch in (0,) if on_host else (0, options.sketch):
                of_device = (4 if on_host else 12) * clients * (sketch or size)
                if not fits(of_device, options.device) or (not sketch and clients > 1024):
                    continue
                if on_host and 8 * clients * size > 0.9 * free_memory("cpu"):
                    continue
                round_ms, refresh_ms, kept = measured(clock, clients, size, sketch, place)
                refresh = "in the round" if refresh_ms is None else f"{refresh_ms / (2 * clients):.4f}"
                what = f"{sketch:,} numbers" if sketch else "all, two thirds on the host" if on_host else "all"
                row = f"{clients:,} | {size:,} | {what} | {round_ms:.3f} | {refresh} | {kept / 1e9:.3f} | {floor:.3f}"
                print(f"| {row} |", flush=True)
        if in_turn:
            print(f"\nd = {size:,}: the same bytes over the bus one way after the other: {in_turn:.3f} ms")


if __name__ == "__main__":
    main()
