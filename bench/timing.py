"""The one timer of the benchmarks, and what they ask the machine."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from secureafl_ext.engines import host_memory

LONGEST = 2.0  # seconds for one figure, beyond three repeats
SLOW = 0.1  # seconds: in a call that takes longer, the loading and allocating of the first call does not matter
QUICK = 3  # with so few repeats a slow call is timed once
# Calls in one CUDA graph: so many that its own launch does not show, and as many as a server of the default staleness
# keeps models, so that a replay goes on from where the last one ended.
IN_GRAPH = 12


@dataclass(frozen=True)
class Clock:
    """Times a call back to back on a warm device: the median of the repeats, or of fewer if a call takes long."""

    device: str
    repeats: int

    def ms(self, call: Callable[[], object]) -> float:
        once = self._once(call)
        if once < SLOW:
            once = self._once(call)
        elif self.repeats <= QUICK:
            return 1e3 * once
        repeats = min(self.repeats, max(3, int(LONGEST / max(once, 1e-9))))
        times = self._on_gpu(call, repeats) if self.device == "cuda" else self._on_cpu(call, repeats)
        return 1e3 * statistics.median(times)

    def graph_ms(self, call: Callable[[], object]) -> float | None:
        """Per call, several of them in one CUDA graph; None on a CPU."""
        if self.device == "cpu":
            return None
        return self.ms(self._captured(call).replay) / IN_GRAPH

    def together_ms(self, call: Callable[[], object], streams: int) -> float | None:
        """Per call with so many of them side by side, each in graphs on a stream of its own; None on a CPU."""
        if self.device == "cpu":
            return None
        here = torch.cuda.current_stream()
        graphs = {stream: self._captured(call, stream) for stream in [torch.cuda.Stream() for _ in range(streams)]}

        def replay() -> None:
            for stream, graph in graphs.items():
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    graph.replay()
            for stream in graphs:
                here.wait_stream(stream)

        return self.ms(replay) / IN_GRAPH / streams

    def host_ms(self, call: Callable[[], object], calls: int = 5) -> float | None:
        """How long a call keeps the host; None on a CPU, where that is the call itself."""
        if self.device == "cpu":
            return None
        start = self._now()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - start) / calls

    def copy_ms(self, size: int) -> float:
        """The floor of whatever must move `size` bytes: a copy that reads one half of them and writes the other."""
        source = torch.ones(size // 8, device=self.device)  # ones: pages never written would be read from cache
        target = torch.empty_like(source)
        return self.ms(lambda: target.copy_(source))

    def _captured(self, call: Callable[[], object], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
        """IN_GRAPH calls, on that stream or torch's own for graphs; one before them sets up what is set up once."""
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(IN_GRAPH):
                call()
        return graph

    def _once(self, call: Callable[[], object]) -> float:
        start = self._now()
        call()
        return self._now() - start

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _on_cpu(self, call: Callable[[], object], repeats: int) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(repeats):
            call()
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    def _on_gpu(self, call: Callable[[], object], repeats: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def fits(size: int, device: str) -> bool:
    """Whether `size` bytes are at most 60 % of the memory that is free now."""
    return size <= 0.6 * free_memory(device)


def free_memory(device: str) -> int:
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return host_memory.free_memory()


def hardware(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return f"{torch.get_num_threads()} CPU threads, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
