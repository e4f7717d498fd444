"""The end of a round with pairs, which a GPU leaves to the next one (`settle_`), on an emulated GPU."""

import pytest
import torch
from emulated_rounds import F16, F32, Emulated, Strange, agree, on_gpu
from fused_rounds import drive, make
from fuzz.rounds import VERDICT
from states import identical

N, D = 12, 75
CASES = [(12, 75, {}), (50, 30, {"history_dtype": F16, "memory": 1}), (130, 11, {"store": "all", "on_reject": "step"})]


class Twice(Strange):
    """Every other upload comes from the client of the one before."""

    client = None

    def next(self, server):
        client, update, version = super().next(server)
        if server.version % 2 and self.client is not None:
            client = self.client
        self.client = client
        return client, update, version


def pending(server):
    return VERDICT.unpack(server._engine._verdict.numpy().tobytes())[8] != 0


@pytest.mark.parametrize("seed", [1, 2])  # bulk copies that are late; cp.async
@pytest.mark.parametrize(("n", "d", "settings"), CASES, ids=str)
def test_whoever_looks_between_rounds_changes_nothing(monkeypatch, n, d, settings, seed):
    """Left to the next round, done after every round, and in phases, where it is never left: the same bits."""
    plain = make("cpu", n, d, **settings)
    steps = Emulated(seed), Emulated(seed), Emulated(seed, phases=True)
    left, looked, phases = servers = [on_gpu(monkeypatch, n, d, step, **settings) for step in steps]
    arrivals = Twice(n, d)
    for _ in range(30):
        drive((plain, *servers), arrivals, 1)
        assert pending(left) and pending(looked) and not pending(phases)
        looked.estimates()
        assert not pending(looked)
    for server in (looked, phases):
        identical(server, left)
    agree(left, plain)


@pytest.mark.parametrize("history", [F32, F16], ids=str)
def test_estimates_between_rounds_are_those_of_a_cpu(monkeypatch, history):
    plain = make("cpu", N, D, history_dtype=history)
    ours = on_gpu(monkeypatch, N, D, Emulated(1), history_dtype=history)
    arrivals, moved = Twice(N, D), 0
    for _ in range(40):
        before = ours.estimates()
        drive((plain, ours), arrivals, 1)
        theirs = plain.estimates()
        assert (ours.estimates() - theirs).norm() <= 1e-4 * theirs.norm()
        moved += not torch.equal(before, theirs)
    assert moved > 20


@pytest.mark.parametrize("seed", [0, 3])
def test_saved_between_rounds_and_resumed_is_bit_identical(monkeypatch, seed):
    whole, half, resumed = (on_gpu(monkeypatch, N, D, Emulated(seed)) for _ in range(3))
    arrivals = Twice(N, D)
    drive((whole, half), arrivals, 41)
    drive((resumed,), Twice(N, D, seed=1), 7)  # what it has left itself must not come on top
    assert pending(half) and pending(resumed)
    resumed.load_state_dict(half.state_dict())
    assert not pending(half) and not pending(resumed)
    drive((whole, half, resumed), arrivals, 20)
    identical(half, whole)
    identical(resumed, whole)


@pytest.mark.parametrize("again", [True, False])
def test_forgotten_between_rounds(monkeypatch, again):
    """The client that has just uploaded, whose sums are still to be used; it comes again, or another one does."""
    plain, left = make("cpu", N, D), on_gpu(monkeypatch, N, D, Emulated(2))
    phases = on_gpu(monkeypatch, N, D, Emulated(2, phases=True))
    arrivals = Strange(N, D)
    drive((plain, left, phases), arrivals, 60)
    for _ in range(4):
        client, update, version = arrivals.next(plain)
        for server in (plain, left, phases):
            server.submit(client, update.nan_to_num(0, 0, 0), version)
            server.forget(client)
        assert not pending(left) and not left._engine._changes.any()
        assert not any(tensor[client].any() for tensor in (left._engine.gram, left._engine.along, left._engine.weights))
        arrivals.active = [client] if again else [k for k in range(N) if k != client]
        drive((plain, left, phases), arrivals, 3)
    identical(phases, left)
    agree(left, plain)


def test_counts_and_seen_do_not_wait_for_the_end(monkeypatch):
    """Whoever reads them does not settle."""
    settings = {"trust": 0.2, "store": "all", "on_reject": "step"}
    plain, ours = make("cpu", N, D, **settings), on_gpu(monkeypatch, N, D, Emulated(0), **settings)
    arrivals = Twice(N, D)
    for _ in range(60):
        drive((plain, ours), arrivals, 1)
        assert ours.stats() == plain.stats() and torch.equal(ours.seen, plain.seen) and pending(ours)
        for name in ("pairs", "oldest"):
            assert torch.equal(getattr(ours._engine, name), getattr(plain._engine, name))
    assert ours.stats()["capped"] > 0


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_pending_verdict_may_be_anything(monkeypatch, byte):
    """A kernel clamps what would lead elsewhere: the clients around are renewed as if it were not theirs."""
    for look in (True, False):
        ours = on_gpu(monkeypatch, N, D, Emulated(0))
        arrivals = Twice(N, D)
        drive((ours,), arrivals, 40)
        ours._engine._verdict.fill_(byte)
        ours._engine._changes.zero_()
        if look:
            ours.estimates()
        ours.submit(*arrivals.next(ours))
        assert ours.model.isfinite().all() and pending(ours)


def test_a_cpu_does_the_end_of_a_round_that_a_gpu_has_left(monkeypatch):
    """The ops agree about the two tensors between them."""
    ours, theirs = (on_gpu(monkeypatch, N, D, Emulated(0)) for _ in range(2))
    drive((ours, theirs), Twice(N, D), 40)
    assert pending(ours) and pending(theirs)
    ours.estimates()
    engine = theirs._engine
    torch.ops.secureafl.settle_(engine._verdict, engine._changes, *engine._per_client, theirs.config.trust)
    assert not pending(theirs)
    agree(theirs, ours)
    for name in ("gram", "along", "weights"):
        torch.testing.assert_close(getattr(engine, name), getattr(ours._engine, name), rtol=1e-5, atol=1e-7)
