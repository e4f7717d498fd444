"""The GPU's kernels of the fused round (csrc/round) on an emulated GPU: the same rounds as the op on a CPU."""

import pytest
import torch
from emulated import call
from emulated_rounds import F16, F32, RULES, SEEDS, Emulated, Strange, agree, kernels, on_gpu
from fused_rounds import drive, make
from states import identical

from secureafl_ext.config import REASONS


def uploaded(n, d, rounds, **settings):
    """(a server's state after so many rounds, and the clients)"""
    server, arrivals = make("cpu", n, d, **settings), Strange(n, d)
    if n > 1024 or server.config.memory > 5:  # too long to wait for the pairs of all: half of the uploads are of some
        some = [k for k in range(n) if k % 512 in (0, 1, 300, 511) or k >= n - 2]
        arrivals.active += len(arrivals.active) // len(some) * some
    for _ in range(rounds):
        server.submit(*arrivals.next(server))
    return server.state_dict(), arrivals


# Every shape of the pass (kShapes in csrc/round/tiles.h), with a last tile that is not full
@pytest.mark.parametrize(
    ("memory", "n", "d", "history"),
    [
        (3, 1, 30, F32),
        (3, 16, 77, F16),
        (3, 17, 75, F32),
        (3, 50, 75, F32),
        (3, 66, 37, F16),
        (3, 129, 21, F16),
        (3, 226, 21, F32),
        (3, 321, 21, F16),
        (3, 449, 11, F32),
        *((3, 1025, 7, F32), (3, 2048, 5, F16), (3, 2049, 7, F16), (3, 4096, 5, F32)),
        (1, 12, 75, F16),
        (1, 32, 75, F32),
        (1, 50, 75, F16),
        (1, 67, 21, F32),
        (1, 451, 11, F16),
        *((2, 12, 75, F16), (2, 67, 21, F32), (2, 451, 11, F16), (4, 50, 75, F32), (4, 451, 11, F16)),
        (5, 14, 75, F32),
        (5, 50, 75, F32),
        (5, 67, 21, F16),
        (5, 451, 11, F32),
        *((6, 1, 30, F32), (6, 50, 21, F16), (7, 512, 5, F32), (16, 37, 21, F32), (16, 509, 5, F16)),
        *((0, 1, 30, F32), (0, 20, 151, F32), (0, 50, 301, F32), (0, 66, 151, F32), (0, 129, 75, F32)),
        *((0, 226, 21, F32), (0, 321, 21, F32), (0, 449, 11, F32), (0, 1025, 7, F32), (0, 4093, 5, F32)),
    ],
    ids=str,
)
def test_every_shape_and_rule(monkeypatch, memory, n, d, history):
    settings = {"memory": memory, "history_dtype": history, "trim": min(2, (n - 1) // 2)}
    state, arrivals = uploaded(n, d, min(8 * n, 600), **settings)
    assert n == 1 or state["pairs"].max() == memory
    for seed, rule in enumerate(RULES):
        plain = make("cpu", n, d, rule=rule, **settings)
        ours = on_gpu(monkeypatch, n, d, Emulated((seed + n) % len(SEEDS)), rule=rule, **settings)
        plain.load_state_dict(state), ours.load_state_dict(state)
        drive((plain, ours), arrivals, 2)
        agree(ours, plain)


def test_every_shape_fits_the_shared_memory_of_a_large_gpu():
    """227 KiB of a block. A GPU with 99 KiB has the rounds up to 448 clients, and is too small for more than 1,024."""
    needs = kernels().min_shared_bytes
    for half in (False, True):
        assert all(needs(n, 3, half) <= 227 * 2**10 for n in (*range(4, 4096, 100), 1024, 2048, 2052, 4096))
        assert all(needs(n, 3, half) <= 99 * 2**10 for n in (4, 64, 128, 320, 448))
        assert all(needs(n, 3, half) > 99 * 2**10 for n in (1028, 2048, 2052, 4096))
        assert all(needs(n, m, half) <= 227 * 2**10 for n in (1, 4, 100, 512) for m in range(1, 17))


@pytest.mark.parametrize("memory", [3, 0])
def test_every_verdict(monkeypatch, memory):
    """From the first upload on. Clients fall silent until they count no more."""
    n, d, settings = 12, 300, {"expiry": 1, "probation": 2, "window": 4, "memory": memory}  # d: several blocks judge
    plain, ours = make("cpu", n, d, **settings), on_gpu(monkeypatch, n, d, Emulated(1), **settings)
    seen, arrivals = set(), Strange(n, d, silent=60)
    for _ in range(90):
        client, update, version = arrivals.next(plain)
        reasons = {server.submit(client, update, version).reason for server in (plain, ours)}
        assert len(reasons) == 1
        seen |= reasons
    agree(ours, plain)
    assert seen == set(REASONS)
    assert 0 < int(ours._engine.presence.mask(ours.seen).sum()) < int(ours.seen.sum()) - 2


# A tile at a time; any number of pairs. Rejected updates, whose tiles are only waited for, and full rings among them
@pytest.mark.parametrize(("n", "memory", "seed"), [(2052, 3, 3), (100, 6, 0), (100, 6, 3)])
def test_every_verdict_of_large_shapes(monkeypatch, n, memory, seed):
    d, settings = 7, {"memory": memory, "history_dtype": F16}
    plain = make("cpu", n, d, window=4, **settings)
    left, phases = (on_gpu(monkeypatch, n, d, Emulated(seed, p), window=4, **settings) for p in (False, True))
    arrivals, seen = Strange(n, d), set()
    arrivals.active = [0, n // 2, n - 1]
    for _ in range(10 + 5 * memory):  # until the rings of three clients are full
        drive((plain, left, phases), arrivals, 1)
        seen.add(plain.stats()["rejected"])
    identical(phases, left)
    agree(left, plain)
    assert len(seen) > 5 and left.state_dict()["pairs"].max() == plain.config.memory


@pytest.mark.parametrize(
    "settings",
    [
        {"store": "all", "on_reject": "step", "quantile": 0.5, "factors": "pooled", "trust": 0.2},
        {"estimate": False, "rule": "trimmed_mean", "trim": 2},
        {"filter": False, "max_norm": 0.5, "trust": float("inf")},
        {"receive": False, "on_reject": "step", "history_dtype": F16},
        {"memory": 0, "store": "all", "on_reject": "step", "quantile": 0.5, "factors": "pooled"},
        {"memory": 0, "estimate": False, "rule": "trimmed_mean", "trim": 2},
        {"memory": 0, "filter": False, "max_norm": 0.5},
        {"memory": 0, "receive": False, "on_reject": "step"},
    ],
    ids=str,
)
def test_other_settings(monkeypatch, settings):
    plain, ours = make("cpu", 12, 33, **settings), on_gpu(monkeypatch, 12, 33, Emulated(3), **settings)
    drive((plain, ours), Strange(12, 33), 30)
    agree(ours, plain)


@pytest.mark.parametrize(
    ("n", "d", "settings"),
    [
        (3, 9, {}),
        (20, 75, {}),
        (50, 75, {"history_dtype": F16}),
        (130, 21, {}),
        (130, 21, {"memory": 4}),
        (449, 7, {"history_dtype": F16}),
        (1100, 7, {}),
        (4000, 7, {}),
        (40, 21, {"memory": 9}),
        (50, 301, {"memory": 0}),
        (449, 11, {"memory": 0}),
    ],
    ids=str,
)
def test_no_thread_runs_ahead(monkeypatch, n, d, settings):
    """Any order of warps and either way to copy give the same bits, and so does one rank of a sharded server."""
    state, arrivals = uploaded(n, d, min(8 * n, 600), **settings)
    plain, steps = make("cpu", n, d, **settings), [*map(Emulated, SEEDS), Emulated(1, phases=True)]
    servers = [on_gpu(monkeypatch, n, d, step, **settings) for step in steps]
    for server in (plain, *servers):
        server.load_state_dict(state)
    drive((plain, *servers), arrivals, 2)
    agree(servers[0], plain)
    for server in servers[1:]:
        identical(server, servers[0])


def test_without_pairs_other_clients_models_are_not_read(monkeypatch):
    settings = {"memory": 0, "filter": False}
    plain, ours = make("cpu", 12, 33, **settings), on_gpu(monkeypatch, 12, 33, Emulated(0), **settings)
    arrivals = Strange(12, 33)
    drive((plain, ours), arrivals, 30)
    client, update, version = arrivals.next(plain)
    others = [k for k in range(12) if k != client]
    ours._engine.last[:, 0, others] = torch.nan
    before = plain.model
    plain.submit(client, update, version), ours.submit(client, update, version)
    assert (plain.model != before).all()
    torch.testing.assert_close(ours.model, plain.model)


@pytest.mark.parametrize("memory", [1, 3, 5, 16])
def test_refresh(memory):
    server = make("cpu", 9, 40, memory=memory)
    drive((server,), Strange(9, 40), 60)
    clients, trust = server._engine._per_client, server.config.trust
    ours = [tensor.clone() for tensor in clients]
    for rewritten in (3, 4):  # weights, status
        ours[rewritten].zero_()
    call(kernels().refresh, ours, [9, memory], [trust], 0)
    torch.ops.secureafl.refresh_(*clients, trust)
    for mine, theirs in zip(ours, clients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
