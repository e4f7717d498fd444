"""Time whole server rounds: beside the paper's two tables, and over clients, parameters and pairs per client.

python bench/scaling.py [--device cpu|cuda] [--quick] [--out DIR]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import peers
import torch
from report import SEED, Row, head, options, ratio, skipped, table, write
from state import filled, history_bytes
from timing import Clock, fits
from torch import Tensor
from torch_rounds import Straightforward, Tuned
from tqdm import tqdm

from secureafl_ext import SecureAFL, reference
from secureafl_ext.defenses import Server

# The paper's tables "Running time (in seconds)": on V100 GPUs, what they cover is not said.
PAPER_SIZES = ((50, 140_000), (100, 140_000), (300, 140_000), (50, 500_000), (50, 1_000_000))
PAPER = {
    "AsyncSGD": (0.02, 0.02, 0.04, 0.03, 0.04),
    "Zeno++": (0.02, 0.03, 0.05, 0.04, 0.06),
    "AFLGuard": (0.04, 0.06, 0.08, 0.05, 0.08),
    "SecureAFL": (0.03, 0.04, 0.06, 0.04, 0.06),
}
MEMORY = 3  # the paper's
WIDE = 0.3  # steps, in the checks, that show in all that is carried along
NARROW = 0.001  # steps after which a second upload is too steep for the filter


def sweeps(n: int, d: int, m: int, clients: tuple, parameters: tuple, memories: tuple) -> tuple:
    """(n, d, m) along three lines that cross in the given one."""
    lines = [(k, d, m) for k in clients] + [(n, k, m) for k in parameters] + [(n, d, k) for k in memories]
    return tuple(dict.fromkeys(lines))


@dataclass(frozen=True)
class Sizes:
    paper: tuple[tuple[int, int], ...]  # clients, parameters
    rounds: tuple[tuple[int, int, int], ...]  # clients, parameters, pairs
    repeats: int


SIZES = {
    "full": Sizes(
        PAPER_SIZES,
        (
            *sweeps(50, 140_000, MEMORY, (10, 50, 100, 300, 1000), (14_000, 140_000, 1_000_000), (1, 2, 3, 5)),
            (300, 1_000_000, MEMORY),
            (1000, 1_000_000, MEMORY),
        ),
        20,
    ),
    "cpu": Sizes(  # for `secureafl paper` on a machine without a GPU
        ((50, 140_000), (100, 140_000), (50, 500_000)),
        sweeps(50, 140_000, MEMORY, (10, 50, 100), (14_000, 140_000), (1, 3)),
        3,
    ),
    "quick": Sizes(((50, 140_000),), sweeps(50, 140_000, MEMORY, (10, 50), (14_000, 140_000), (MEMORY,)), 3),
    "tiny": Sizes(((4, 20_000),), sweeps(4, 1000, 2, (4, 6), (1000, 2000), (1, 2)), 1),
}

# The tables and methods, as the CSV names them.
SERVER, WHOLE, ROUND = "server", "server and gradient", "round"
OURS, EAGER, HALF, HOST = "SecureAFL", "SecureAFL, eager", "SecureAFL, float16 history", "host"
FLOOR, PLAIN, TUNED, TUNED_GRAPH = "floor", "torch", "tuned torch", "tuned torch in a CUDA graph"


def arrivals(n: int, d: int, device: str) -> Iterator[tuple[int, Tensor]]:
    """Client after client, each with another update than last time (unless n is a multiple of seven)."""
    random = torch.Generator(device).manual_seed(SEED + 1)
    updates = torch.empty(7, d, device=device).uniform_(-1, 1, generator=random)
    return zip(cycle(range(n)), cycle(updates), strict=True)


def check_server(device: str) -> None:
    """Every client uploads twice, to a server with wide and one with narrow steps; each round as the reference says."""
    verdicts = set()
    for lr in (WIDE, NARROW):
        paper = {"filter": True, "factors": "pooled", "on_reject": "step", "store": "all"}
        server, _ = filled(torch.zeros(1000, device=device), 9, MEMORY, lr=lr, **paper)
        for client, update in islice(arrivals(9, 1000, device), 18):
            before, model = server.state_dict(), server.model.clone()
            receipt = server.submit(client, update, server.version)
            factor = reference.lipschitz(update, before["last_updates"][client], model, before["last_models"][client])
            factors = torch.cat([before["factors"][0, : int(before["recorded"])], factor[None]])
            accepted = factor <= factors.quantile(server.config.quantile)
            past = (before[name] for name in ("last_updates", "last_models", "dw", "dg", "pairs", "seen"))
            direction = reference.aggregate(model, update, client, accepted, *past)
            torch.testing.assert_close(receipt.factor, factor)
            torch.testing.assert_close(receipt.accepted, accepted)
            torch.testing.assert_close(server.model, model - lr * direction, rtol=1e-4, atol=1e-4 * lr)
            verdicts.add(bool(accepted))
    assert verdicts == {True, False}, "the filter was not put to the test"


def check_torch_rounds(device: str) -> None:
    """Nine accepted updates, an odd number of rows: there the two medians are the same."""
    for peer in (Straightforward, Tuned):
        server, state = filled(torch.zeros(1000, device=device), 9, MEMORY, lr=WIDE)
        other = peer(server.config, state)
        for client, update in islice(arrivals(9, 1000, device), 9):
            receipt = server.submit(client, update, server.version)
            other.submit(client, update)
            assert receipt.accepted, receipt.reason
            torch.testing.assert_close(other.memory.model, server.model, rtol=1e-4, atol=1e-4)


def check_peers() -> None:
    """Who steps where: along the trusted gradient all do, against it only AsyncSGD."""
    trusted = torch.tensor([3.0, -4.0])
    moves = {"AsyncSGD": (2.0, -2.0), "Zeno++": (1.0, 0.0), "AFLGuard": (2.0, 0.0)}
    for name, expected in moves.items():
        for times, moved in zip((2.0, -2.0), expected, strict=True):
            server = peers.server(name, torch.zeros(2), 1, lambda _: trusted)
            server.submit(0, times * trusted, 0)
            torch.testing.assert_close(server.model, -peers.LR * moved * trusted)


def time_paper(n: int, d: int, clock: Clock) -> list[Row]:
    """Each method's part of a round, and the same with the gradient of the client that uploads."""
    task, rows = peers.Task(d, clock.device, SEED), []
    ours, _ = filled(task.model, n, MEMORY)
    others = {name: peers.server(name, task.model, n, task.trusted_gradient) for name in peers.PEERS}
    for name, server in {**others, OURS: ours}.items():
        for kind, ms in zip((SERVER, WHOLE), time_server(server, n, task, clock), strict=True):
            rows.append(Row(kind, name, n, len(task.model), MEMORY, ms))
    return rows


def time_server(server: Server, n: int, task: peers.Task, clock: Clock) -> tuple[float, float]:
    clients, update = cycle(range(n)), task.client_gradient(task.model)

    def submit(update: Tensor) -> None:
        server.submit(next(clients), update, server.version)

    return clock.ms(lambda: submit(update)), clock.ms(lambda: submit(task.client_gradient(server.model)))


def time_round(n: int, d: int, m: int, clock: Clock) -> list[Row]:
    """Our round, its floor, and the same round in torch."""
    model, coming = torch.zeros(d, device=clock.device), arrivals(n, d, clock.device)
    server, state = filled(model, n, m)
    config, ours = server.config, time_ours(server, coming, clock)
    del server  # the others need its room
    times = {**ours, FLOOR: clock.copy_ms(history_bytes(n, d, m))}
    times[PLAIN], _ = time_torch(Straightforward(config, state), coming, clock)
    times[TUNED], times[TUNED_GRAPH] = time_torch(Tuned(config, state), coming, clock)
    del state
    server, _ = filled(model, n, m, history_dtype=torch.float16)
    times[HALF] = time_ours(server, coming, clock)[OURS]
    return [Row(HOST if name == HOST else ROUND, name, n, d, m, ms) for name, ms in times.items() if ms is not None]


def time_ours(server: SecureAFL, coming: Iterator, clock: Clock) -> dict[str, float | None]:
    def submit() -> None:
        server.submit(*next(coming), server.version)

    eager, host, graph = clock.ms(submit), clock.host_ms(submit), clock.graph_ms(submit)
    return {OURS: graph, EAGER: eager, HOST: host} if graph else {OURS: eager}


def time_torch(peer: Straightforward | Tuned, coming: Iterator, clock: Clock) -> tuple[float, float | None]:
    """Eager, and in a CUDA graph if nothing in the peer waits for the device."""

    def submit() -> None:
        peer.submit(*next(coming))

    eager = clock.ms(submit)
    return eager, clock.graph_ms(submit) if peer.capturable else None


def paper_table(cells: dict[tuple[int, int], list[Row]]) -> str:
    """One line per size and method, `cells` by the paper's sizes."""
    lines = []
    for size, rows in cells.items():
        for row, whole in zip(rows[::2], rows[1::2], strict=True):
            printed = PAPER[row.how][PAPER_SIZES.index(size)] if size in PAPER_SIZES else None
            lines.append([row.n, row.d, row.how, row.ms, whole.ms, printed])
    return table(["n", "d", "method", "server ms", "server and a client's gradient ms", "paper s"], lines)


def round_table(rows: list[Row]) -> str:
    lines = []
    for size in dict.fromkeys((row.n, row.d, row.m) for row in rows):
        ms = {row.how: row.ms for row in rows if (row.n, row.d, row.m) == size}
        ours, host = ms[OURS], 1e3 * ms[HOST] if HOST in ms else None
        others = (cell for name in (PLAIN, TUNED, TUNED_GRAPH) for cell in (ms.get(name), ratio(ms.get(name), ours)))
        lines.append([*size, ours, ms[FLOOR], ratio(ours, ms[FLOOR]), ms.get(EAGER), host, ms.get(HALF), *others])
    ours = ["round ms", "floor ms", "x floor", "eager ms", "host us", "float16 history ms"]
    others = ["torch ms", "x round", "tuned torch ms", "x round", "tuned torch in a graph ms", "x round"]
    return table(["n", "d", "m", *ours, *others], lines)


PAPER_NOTE = f"""\
The paper's CNN with its hidden layer as wide as d asks for, on random 28 x 28 images; a client's gradient is that of
{peers.CLIENT_BATCH} of them. The server's part of Zeno++ and AFLGuard has in it the gradient on {peers.TRUSTED_BATCH}
trusted samples that they take in every round. All calls are eager. Only SecureAFL keeps anything per client: with the
others, n makes no difference but noise. The paper's figures are of V100 GPUs; what they cover it does not say."""

ROUND_NOTE = """\
Every client has all its m pairs. Floor: a copy that moves as many bytes as the history has, (2m + 2) n d values, half
of them read and half written. Round: on CUDA in a CUDA graph, on a CPU eager. Host: how long an eager call keeps it.
Torch: the same round with batched einsum, linalg.solve and torch.median; tuned torch: with cached factors and carried
inner products. "x round" says how many times our round fits into theirs."""


def main() -> None:
    chosen = options(__doc__.splitlines()[0], SIZES)
    sizes, device = SIZES[chosen.sizes], chosen.device
    check_server(device)
    check_torch_rounds(device)
    check_peers()

    clock = Clock(device, sizes.repeats)
    wanted = dict.fromkeys([*((n, d, MEMORY) for n, d in sizes.paper), *sizes.rounds])
    room = {size: fits(2 * history_bytes(*size), device) for size in wanted}  # a server, and a copy of its state
    paper = [(n, d) for n, d in sizes.paper if room[n, d, MEMORY]]
    cells = {size: time_paper(*size, clock) for size in tqdm(paper, "paper's tables", disable=None)}
    rounds = [size for size in sizes.rounds if room[size]]
    rows = []
    for size in tqdm(rounds, "rounds", disable=None):
        try:
            rows += time_round(*size, clock)
        except torch.OutOfMemoryError:  # a peer's temporaries
            room[size] = False

    first_n, first_d = sizes.paper[0]
    parts = [
        head("Server rounds", device),
        "Checked before any timing: the server against the reference, the torch rounds against the server.",
        "## A. The paper's table over clients",
        paper_table({size: rows for size, rows in cells.items() if size[1] == first_d}),
        "## B. The paper's table over parameters",
        paper_table({size: rows for size, rows in cells.items() if size[0] == first_n}),
        PAPER_NOTE,
        "## C. Over clients, parameters and pairs",
        round_table(rows),
        ROUND_NOTE,
        skipped(size for size, fit in room.items() if not fit),
    ]
    write(chosen.out, "scaling", "\n\n".join(parts), [row for cell in cells.values() for row in cell] + rows)


if __name__ == "__main__":
    main()
