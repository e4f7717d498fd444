"""Time rounds of a server that is split over ranks, and the message of a round alone, against the whole server.

torchrun --standalone --nproc-per-node=2 bench/sharded.py
"""

import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from report import SEED
from state import filled
from timing import hardware

from secureafl_ext import SecureAFL, shard
from secureafl_ext.engines.ranks import SLICED

SIZES = ((50, 140_000), (50, 1_000_000), (300, 140_000), (1000, 14_000))  # clients, parameters
KINDS = ({"rule": "median", "memory": 3}, {"rule": "support", "memory": 0})
REPEATS = 30  # fewer than the rounds between two refreshes of rule="support"


def median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[3:])


def times(kind: dict, n: int, d: int, ranks: dist.ProcessGroup) -> tuple[float | None, float, int, float]:
    """(the whole server's round on one rank, the split one's, numbers in its message, the message alone), in ms"""
    update = torch.empty(d).uniform_(-1, 1, generator=torch.Generator().manual_seed(SEED))
    whole, state = filled(torch.zeros(d), n, kind["memory"], rule=kind["rule"])
    alone = None
    if dist.get_rank(ranks) == 0:  # the others wait meanwhile: at once they would share the memory's bandwidth
        alone = median_ms(lambda: whole.submit(0, update, whole.version))
    dist.barrier(ranks)
    update = shard(update, ranks).clone()
    split = SecureAFL(torch.zeros_like(update), n, **kind, process_group=ranks)
    split.load_state_dict({name: shard(value, ranks) if name in SLICED else value for name, value in state.items()})
    together = median_ms(lambda: split.submit(0, update, split.version))
    numbers = 4 * dist.get_world_size(ranks) + split._engine.notify_peers.width
    message = torch.zeros(numbers, dtype=torch.float64)
    return alone, together, numbers, median_ms(lambda: dist.all_reduce(message, group=ranks))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    ranks = dist.group.WORLD
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(f"{dist.get_world_size()} ranks, gloo; each {hardware('cpu')}; torch {torch.__version__}\n")
    say("| rule | m | n | d | whole server, 1 thread, ms | split, ms | numbers in the message | message alone, ms |")
    say("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in KINDS:
        for n, d in SIZES:
            alone, together, numbers, message = times(kind, n, d, ranks)
            row = f"{n} | {d:,} | {alone or 0:.2f} | {together:.2f} | {numbers:,} | {message:.3f}"
            say(f"| {kind['rule']} | {kind['memory']} | {row} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
