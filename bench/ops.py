"""Time each op against what other libraries take for the same, and against a copy of the bytes that it must read.

python bench/ops.py [--device cpu|cuda] [--quick] [--out DIR]
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from column_peers import TRIMMED_MEANS, medians
from report import Row, head, options, ratio, skipped, table, write
from state import fill, history_bytes
from timing import Clock, fits
from torch import Tensor
from torch_rounds import batched_estimate
from tqdm import tqdm

import secureafl_ext
from secureafl_ext import reference

MEMORY = 3
OURS, GRAPH, FLOOR = "secureafl_ext", "secureafl_ext in a CUDA graph", "floor"
CHECKED = 2000  # parameters, in the checks


@dataclass(frozen=True)
class Sizes:
    stacks: tuple[tuple[int, int], ...]  # clients, parameters
    repeats: int
    gpu_only: tuple[tuple[int, int], ...] = ()


SIZES = {
    "full": Sizes(
        ((50, 140_000), (100, 140_000), (300, 140_000), (50, 1_000_000)),
        20,
        ((300, 1_000_000), (1000, 1_000_000)),
    ),
    "quick": Sizes(((50, 140_000),), 3),
    "tiny": Sizes(((4, 1000), (5, 1000), (4, 2000)), 1),
}


@dataclass(frozen=True)
class Case:
    """One op at one size: what it should give, who computes that how, and the bytes that must be read for it."""

    op: str
    m: int
    size: int
    expected: Callable[[], Tensor]
    calls: dict[str, Callable[[], Tensor] | None]  # None: not installed


OPS = 5


def cases(n: int, d: int, device: str) -> Iterator[Case]:
    """The ops on one history, all of whose pairs are filled."""
    model, accepted = torch.zeros(d, device=device), torch.tensor(True, device=device)
    history = {name: torch.empty(n, d, device=device) for name in ("last_updates", "last_models")}
    history |= {name: torch.empty(n, MEMORY, d, device=device) for name in ("dw", "dg")}
    history["pairs"] = torch.empty(n, dtype=torch.int64, device=device)
    history["seen"] = torch.empty(n, dtype=torch.bool, device=device)
    fill(history, model)
    stack, plane, whole = history["last_updates"], 4 * n * d, history_bytes(n, d, MEMORY)
    *past, seen = history.values()

    def case(op: str, m: int, size: int, peers: dict[str, Callable | None], *arguments: object) -> Case:
        ours, expected = (partial(getattr(home, op), *arguments) for home in (secureafl_ext, reference))
        others = {name: peer and partial(peer, *arguments) for name, peer in peers.items()}
        return Case(op, m, size, expected, {OURS: ours, **others})

    yield case("median", 0, plane, medians(device), stack)
    yield case("trimmed_mean", 0, plane, TRIMMED_MEANS, stack, n // 5)
    yield case("lipschitz", 0, 16 * d, {"torch": torch_lipschitz}, *stack[:2], *history["last_models"][:2])
    yield case("estimate", MEMORY, whole, {"torch": torch_estimate}, model, *past)
    yield case("aggregate", MEMORY, whole, {"torch": torch_aggregate}, model, stack[1], 0, accepted, *past, seen)


def torch_lipschitz(update: Tensor, last_update: Tensor, model: Tensor, last_model: Tensor) -> Tensor:
    return (update - last_update).norm() / (model - last_model).norm()


def torch_estimate(model: Tensor, *past: Tensor) -> Tensor:
    *rows, _ = past  # all pairs are filled
    return batched_estimate(model, *rows)


def torch_aggregate(model: Tensor, update: Tensor, client: int, accepted: Tensor, *past: Tensor) -> Tensor:
    *rows, _ = past  # all clients are seen, and the update is accepted
    estimates = torch_estimate(model, *rows)
    estimates[client] = update
    return estimates.median(0).values


def check(n: int, device: str) -> None:
    """With an odd number of clients all agree on what the median is."""
    for case in cases(n | 1, CHECKED, device):
        expected = case.expected()
        for name, call in case.calls.items():
            if call:
                words = f"{case.op} by {name} is not what the reference gives:\n{{}}".format
                torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4, check_dtype=False, msg=words)


NOTE = """\
Floor: a copy that moves as many bytes as the op must read, half of them read and half written. "x ours" says how many
times our op fits into that. torch.median, torch.kthvalue and the Triton kernel give the lower middle value of an even
number of rows, the others the mean of both. Calls are eager, one behind the other: below some 40 us on a GPU it is the
host that is timed, not the op, hence the row of ours in a CUDA graph. torch: batched einsum, linalg.solve,
torch.median."""


def main() -> None:
    chosen = options(__doc__.splitlines()[0], SIZES)
    sizes, device = SIZES[chosen.sizes], chosen.device
    clock, rows, lines = Clock(device, sizes.repeats), [], []
    stacks = sizes.stacks + (sizes.gpu_only if device == "cuda" else ())
    for n in {n for n, _ in stacks}:
        check(n, device)

    room = {(n, d): fits(2 * history_bytes(n, d, MEMORY), device) for n, d in stacks}  # the torch peers need as much
    timed = ((n, d, case) for (n, d), fit in room.items() if fit for case in cases(n, d, device))
    for n, d, case in tqdm(timed, "ops", total=OPS * sum(room.values()), disable=None):
        floor = clock.copy_ms(case.size)
        times = {FLOOR: floor} | {name: call and clock.ms(call) for name, call in case.calls.items()}
        if device == "cuda":
            times[GRAPH] = clock.graph_ms(case.calls[OURS])
        for name, ms in times.items():
            ratios = ratio(ms, floor), ratio(ms, times[OURS])
            lines.append([case.op, n, d, name, "not installed" if ms is None else ms, *ratios])
        rows += [Row(case.op, name, n, d, case.m, ms) for name, ms in times.items() if ms is not None]

    parts = [
        head("Ops", device),
        f"Checked before any timing: every result against the reference. {MEMORY} pairs per client.",
        table(["op", "n", "d", "how", "ms", "x floor", "x ours"], lines),
        NOTE,
        skipped([size for size, fit in room.items() if not fit]),
    ]
    write(chosen.out, "ops", "\n\n".join(parts), rows)


if __name__ == "__main__":
    main()
