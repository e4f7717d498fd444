"""The fused round without pairs, memory=0: the composed one's results, from the last updates alone."""

import pytest
import torch
from fused_rounds import Arrivals, composed, drive, make, pair
from states import identical, same_on_any_threads
from torch._subclasses import FakeTensorMode

from secureafl_ext import SecureAFL
from secureafl_ext.config import Config
from secureafl_ext.engines import fused
from secureafl_ext.engines.composed import Composed

RULES = [{}, {"rule": "trimmed_mean", "trim": 2}, {"rule": "mean"}]
SETTINGS = [
    {"filter": False},
    {"expiry": 1, "probation": 2},
    {"expiry": None, "probation": 0},
    {"store": "all", "on_reject": "step", "quantile": 0.5},
    {"store": "all", "on_reject": "step", "factors": "pooled"},
    {"on_reject": "step", "receive": False},
    {"factors": "pooled", "window": 5},
    {"window": 5},
    {"max_norm": 0.5},
    {"estimate": False},
    {"max_staleness": 0},
]


def agree(ours, plain):
    """Two servers, fused and composed: the same tensors. Of a direction all bits are the same; the step is rounded."""
    ours, plain = ours.state_dict(), plain.state_dict()
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        mine, value = torch.as_tensor(ours[name]).cpu(), torch.as_tensor(value)
        if value.is_floating_point():
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(mine, value), name


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_engine_is_the_fused_one(device, rule):
    model = torch.zeros(8, device=device)
    server = SecureAFL(model, 6, memory=0, **rule)
    assert type(server._engine) is fused.Fused and server.capturable
    for other in ({"pairs": "rounds"}, {"quorum": 0.5}, {"history_dtype": torch.float64}):
        assert type(SecureAFL(model, 6, memory=0, **rule, **other)._engine) is Composed


def test_what_is_not_fused_has_a_name():
    cuda = torch.device("cuda")
    assert fused.unsupported(Config(memory=6), 600, cuda) == "clients=600 (at most 512 with memory=6 on cuda)"
    assert fused.unsupported(Config(memory=0, quorum=0.5), 6, cuda) == "quorum=0.5"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_composed_round(device, rule, settings):
    plain, ours = pair(device, 12, 75, memory=0, **rule, **settings)
    drive((plain, ours), Arrivals(12, 75), 150)
    agree(ours, plain)
    assert ours.stats() == plain.stats() and ours.stats()["capped"] == ours.stats()["fallbacks"] == 0


# Around every edge of how rows are spread over threads, and of tiles
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("n", [5, 64, 65, 128, 129, 224, 225, 320, 321, 448, 449, 1024, 1025, 4096])
def test_any_number_of_clients(device, n, rule):
    """All of them count from the first round on."""
    plain, ours = pair(device, n, 70, memory=0, probation=0, **rule)
    arrivals = Arrivals(n, 70)
    arrivals.active = list(range(n))
    state = plain.state_dict()
    for name in ("clock", "last_epoch", "uploads"):  # as in an earlier version, where who was seen counted at once
        del state[name]
    state["seen"] = torch.ones(n, dtype=torch.bool)
    state["last_updates"], state["last_models"] = arrivals.centres, arrivals.curvature
    for server in (plain, ours):
        server.load_state_dict(state)
        assert server.stats()["present"] == n
    drive((plain, ours), arrivals, 30)
    agree(ours, plain)


@pytest.mark.parametrize("d", [1, 3, 4, 5, 63, 64, 65, 1000, 20_011])
def test_any_number_of_parameters(device, d):
    plain, ours = pair(device, 9, d, memory=0)
    drive((plain, ours), Arrivals(9, d), 60)
    agree(ours, plain)


def test_huge_and_non_finite_updates(device):
    plain, ours = pair(device, 6, 40, memory=0, lr=10.0, max_norm=1e38, filter=False)
    for step in range(60):
        update = torch.full((40,), 3e38 * (-1) ** (step // 7))
        if step % 4 == 3:
            update[step % 40] = (torch.nan, torch.inf, -torch.inf)[step % 3]
        version = max(0, plain.version - step % 4)
        receipts = [server.submit(step % 6, update.to(server.model.device), version) for server in (plain, ours)]
        assert receipts[0].reason == receipts[1].reason
    assert ours.stats()["non_finite"] == 15 and ours.models.isfinite().all()
    agree(ours, plain)


def test_only_the_last_updates_are_read(device):
    """Not the models of other clients, nor what a round with pairs carries. The client's own model: for its factor."""
    ours, twin = (make(device, 12, 75, memory=0, filter=False) for _ in range(2))
    arrivals = Arrivals(12, 75)
    drive((twin, ours), arrivals, 60)
    before = twin.model
    client, update, version = arrivals.next(twin)
    others = [k for k in range(12) if k != client]
    engine = ours._engine
    engine.last[:, 0, others] = torch.nan
    for tensor in (engine.along, engine.weights):
        tensor.fill_(torch.nan)
    engine.status.fill_(3)
    for server in (twin, ours):
        server.submit(client, update.to(device), version)
    assert (twin.model != before).all()
    assert torch.equal(ours.model, twin.model) and ours.stats() == twin.stats()
    assert engine.along.isnan().all() and engine.weights.isnan().all() and (engine.status == 3).all()


def test_estimates_are_the_last_updates(device):
    server = make(device, 12, 75, memory=0)
    drive((server,), Arrivals(12, 75), 60)
    state = server.state_dict()
    assert torch.equal(server.estimates(), state["last_updates"] * state["seen"][:, None])


def test_a_forgotten_client_is_a_new_one(device):
    servers = pair(device, 12, 80, memory=0)
    arrivals = Arrivals(12, 80)
    drive(servers, arrivals, 90)
    for server in servers:
        server.forget(arrivals.active[0])
        assert not server.seen[arrivals.active[0]]
    drive(servers, arrivals, 90)
    assert servers[1].seen[arrivals.active[0]]
    agree(servers[1], servers[0])


def test_saved_by_one_engine_resumed_by_the_other(device, tmp_path):
    plain, ours = pair(device, 20, 80, memory=0)
    arrivals = Arrivals(20, 80)
    drive((plain, ours), arrivals, 60)
    plain.save(tmp_path / "plain"), ours.save(tmp_path / "ours")
    there = SecureAFL.load(tmp_path / "plain", device=device)
    back = composed(lambda: SecureAFL.load(tmp_path / "ours", device=device))
    assert isinstance(there._engine, fused.Fused) and type(back._engine) is Composed
    identical(there, plain)
    identical(back, ours)
    drive((plain, ours, there, back), arrivals, 60)
    for server in (ours, there, back):
        agree(server, plain)


def test_the_number_of_threads_changes_nothing():
    one, two = (make("cpu", 20, 20_011, memory=0) for _ in range(2))
    same_on_any_threads(one, two, Arrivals(20, 20_011), 30)


def test_phases_refuse_sums_of_pairs():
    server = make("cpu", 4, 30, memory=0)
    engine, op, update = server._engine, torch.ops.secureafl, torch.ones(30)
    judged = engine.factors, engine.recorded, engine.factor_counts, engine.counts, engine._arrived
    arguments = update, engine.number_of(1), server.model, 0, 1, server.models, *engine._past, *judged
    sums = op.update_sums(update, engine.number_of(1), server.model, engine.last)
    changes, verdict = torch.zeros(6, dtype=torch.float64), torch.zeros(fused._C.VERDICT_BYTES, dtype=torch.uint8)
    words = r"changes must have shape \(0,\) = \(0,\), got \(6,\)"
    with pytest.raises(RuntimeError, match=f"apply_: {words}"):
        op.apply_(sums, verdict, changes, *arguments, engine.lr, *engine._settings)
    with pytest.raises(RuntimeError, match=f"renew_: {words}"):
        op.renew_(verdict, changes, *engine._per_client, 1.0)
    assert not server.seen.any() and server.stats()["accepted"] == 0


@pytest.mark.parametrize("columns", [0, 3, 6])
def test_sums_need_tiles_of_a_power_of_two_columns(columns, device):
    """A kernel finds the tile of a coordinate by shifts."""
    update, client = torch.ones(12, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    last = torch.zeros(4, 2, 3, columns, device=device)
    with pytest.raises(RuntimeError, match=f"a power of two of columns, got 3 and {columns}"):
        torch.ops.secureafl.update_sums(update, client, update, last)


def test_a_trace_knows_that_without_pairs_there_are_no_sums_of_pairs():
    with FakeTensorMode():
        like = torch.empty(1)
        assert [torch.ops.secureafl.pass_blocks(like, 4, pairs, False, 2) for pairs in (0, 3)] == [0, 1]
    assert torch.ops.secureafl.pass_blocks(torch.empty(1), 4, 0, False, 2) == 0


def test_it_holds_no_more_than_the_composed_server(device):
    """The last updates and models, and as many models as may be asked for."""
    n, d = 48, 20_000
    server = SecureAFL(torch.zeros(d, device=device), n, memory=0)
    held = [*vars(server._engine).values(), server._models]
    large = 4 * d * (2 * n + server.config.max_staleness + 2)
    assert sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor)) < 1.02 * large
