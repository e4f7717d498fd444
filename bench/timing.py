"""The one timer of the benchmarks: warm-up, then the median of repeats."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch


def seconds(call: Callable[[], object], device: str, repeats: int = 20, warmup: int = 3) -> float:
    """Median time of one call, back to back on a warm device."""
    for _ in range(warmup):
        call()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3


def describe(device: str) -> str:
    """The hardware a table was made on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads"
