"""Time one server round: in a CUDA graph, and as an eager call; against the floor of reading the history once.

python bench/server.py [--device cuda|cpu] [--quick]
"""

import argparse
import time

import torch
from timing import describe, seconds

import secureafl_ext
from secureafl_ext import SecureAFL

SIZES = [(50, 140_000), (100, 140_000), (300, 140_000), (50, 1_000_000), (300, 1_000_000)]


def filled(n: int, d: int, device: str) -> SecureAFL:
    """A server every client of which has all its pairs."""
    server = SecureAFL(torch.zeros(d, device=device), n, lr=1e-3)
    memory = server.config.memory
    random = torch.Generator(device).manual_seed(0)
    state = server.state_dict()
    for name in ("models", "last_updates", "last_models", "dw"):
        state[name].normal_(generator=random)
    state["dg"] = 1.5 * state["dw"]
    state["dg"].add_(state["dw"].roll(1, 2), alpha=0.1)
    state["pairs"].fill_(memory)
    state["seen"].fill_(True)
    for name in ("gram", "along", "oldest", "weights", "status"):
        state.pop(name, None)  # taken afresh
    server.load_state_dict(state)
    return server


def graphed(server: SecureAFL, update: torch.Tensor, rounds: int) -> float:
    """Seconds per round, `rounds` of them in one graph."""
    server.submit(0, update, server.version)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds):
            server.submit(i % server.clients, update, server.version)
    return seconds(graph.replay, "cuda") / rounds


def measure(n: int, d: int, device: str) -> tuple[float, float, float, float]:
    """Seconds: a round, a copy that moves the history's bytes, an eager call, the host's part of that."""
    halves = torch.empty(2, 4 * n * d, device=device)  # half the history each: a copy reads and writes
    copy = seconds(lambda: halves[0].copy_(halves[1]), device)
    halves.resize_(0)
    server, update = filled(n, d, device), torch.randn(d, device=device)
    eager = seconds(lambda: server.submit(1, update, server.version), device, repeats=5)
    start = time.perf_counter()
    for _ in range(5):
        server.submit(2, update, server.version)
    host = (time.perf_counter() - start) / 5
    return graphed(server, update, 11) if device == "cuda" else eager, copy, eager, host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="the first two sizes only")
    options = parser.parse_args()
    device = options.device
    print(f"{describe(device)}, torch {torch.__version__}, secureafl_ext {secureafl_ext.__version__}, float32, m = 3\n")
    print("| n | d | round ms | copy of the history ms | x | eager ms | host us |")
    print("|---|---|---|---|---|---|---|")
    for n, d in SIZES[: 2 if options.quick or device == "cpu" else None]:
        each, copy, eager, host = measure(n, d, device)
        cells = f"{1e3 * each:.4f} | {1e3 * copy:.4f} | {each / copy:.2f} | {1e3 * eager:.3f} | {1e6 * host:.0f}"
        print(f"| {n} | {d} | {cells} |")


if __name__ == "__main__":
    main()
