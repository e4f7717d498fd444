"""The fused round against the composed one: same arrivals, same verdicts, same models but for rounding."""

import pytest
import torch
from fused_rounds import HISTORIES, Arrivals, close, drive, make, pair
from oracles import relative_error


# n: around every edge of how rows are spread over threads (kShapes in csrc/round/tiles.h)
@pytest.mark.parametrize(
    "n", [1, 2, 7, 50, 64, 65, 128, 129, 224, 225, 300, 320, 321, 448, 449, 1000, 1024, 1025, 2049, 4096]
)
def test_any_number_of_clients(device, n):
    servers = pair(device, n, 70)
    drive(servers, Arrivals(n, 70), 30)
    close(servers[1].state_dict(), servers[0].state_dict())


@pytest.mark.parametrize("d", [1, 31, 32, 33, 63, 64, 65, 1000, 20_011, 300_000])
def test_any_number_of_parameters(device, d):
    servers = pair(device, 9, d)
    drive(servers, Arrivals(9, d), 40)
    close(servers[1].state_dict(), servers[0].state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {"memory": 1},
        {"memory": 2},
        {"memory": 4},
        {"memory": 5},
        {"memory": 9},
        {"rule": "mean"},
        {"rule": "trimmed_mean", "trim": 2},
        {"store": "all", "on_reject": "step", "quantile": 0.5},
        {"factors": "pooled", "store": "all", "on_reject": "step"},
        {"window": 5},
        {"trust": 0.2},
        {"trust": float("inf")},
        {"max_norm": 0.5},
        {"estimate": False},
        {"estimate": False, "rule": "trimmed_mean", "trim": 2},
        {"filter": False},
        {"receive": False},
        {"max_staleness": 0},
    ],
    ids=str,
)
def test_every_setting(device, settings):
    for n in (12, 300):
        servers = pair(device, n, 64, **settings)
        drive(servers, Arrivals(n, 64), 40)
        close(servers[1].state_dict(), servers[0].state_dict())
        ours, theirs = servers[1].stats(), servers[0].stats()
        assert {**ours, "capped": 0, "fallbacks": 0} == {**theirs, "capped": 0, "fallbacks": 0}
        assert abs(ours["capped"] - theirs["capped"]) <= 2 and abs(ours["fallbacks"] - theirs["fallbacks"]) <= 2


def test_a_long_memory(device):
    """Two clients, so that all pairs come together."""
    servers = pair(device, 2, 200, memory=16, filter=False)
    drive(servers, Arrivals(2, 200), 48)
    assert servers[1].state_dict()["pairs"].tolist() == [16, 16]
    close(servers[1].state_dict(), servers[0].state_dict())


@pytest.mark.parametrize("settings", [{}, {"memory": 5}, {"rule": "mean"}, {"trust": float("inf")}], ids=str)
def test_pairs_in_float16_change_little(device, settings):
    """Measured: 1e-4 to 2e-4 after 40 rounds, and differences grow some tenfold in 20."""
    full, _ = pair(device, 12, 300, **settings)
    half = make(device, 12, 300, history_dtype=torch.float16, **settings)
    drive((full, half), Arrivals(12, 300), 40)
    assert 0 < relative_error(half.model.cpu(), full.model) < 1e-3
    state = half.state_dict()
    assert state["dw"].dtype == state["dg"].dtype == torch.float16
    assert state["last_models"].dtype == state["last_updates"].dtype == torch.float32


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_carried_products_do_not_drift(device, history):
    """After 300 rounds, among them long silences, the sums still are what a fresh computation gives."""
    server = make(device, 40, 500, lr=0.05, history_dtype=history)
    arrivals = Arrivals(40, 500)
    for _ in range(300):
        client, update, version = arrivals.next(server)
        server.submit(client, update.to(device), version)
    engine, seen = server._engine, server.state_dict()["seen"]
    slots = torch.stack([engine._rows(engine.slots, plane).double() for plane in range(6)], 1)
    pairs = slots * engine.scales[:40, :, None]  # (n, 2m, d)
    w, g = (engine._rows(engine.last, plane).double()[..., None] for plane in (0, 1))  # (n, d, 1)
    x = server.model.double()[:, None] - w
    along = torch.cat([pairs @ x, x.mT @ x, g.mT @ g], 1)[..., 0]
    lower = torch.tril_indices(6, 6)
    gram = (pairs @ pairs.mT)[:, lower[0], lower[1]]
    assert relative_error(engine.along[:40][seen], along[seen]) < 1e-5
    assert relative_error(engine.gram[:40][seen], gram[seen]) < 1e-5


@pytest.mark.parametrize("history", HISTORIES, ids=str)
@pytest.mark.parametrize("n", [9, 70, 300])
def test_estimates_are_those_that_a_round_takes(device, n, history):
    """Without receiving, the mean of the other clients' estimates is the step."""
    settings = {"rule": "mean", "receive": False, "on_reject": "step", "probation": 0}  # all who are seen count
    server = make(device, n, 500, history_dtype=history, **settings)
    drive((server,), Arrivals(n, 500), 60)
    estimates, seen, model = server.estimates(), server.seen.clone(), server.model.clone()
    assert int(seen.sum()) > 3 and not estimates[~seen].any()
    client = int(seen.nonzero()[0])
    others = seen.clone()
    others[client] = False
    server.submit(client, torch.zeros(500, device=device), server.version)
    expected = (model - server.model) / server.config.lr
    assert relative_error(estimates[others].mean(0), expected) < 1e-4


def test_what_an_onlooker_sees_is_the_same_of_both_kinds(device):
    plain, ours = pair(device, 12, 300)
    drive((plain, ours), Arrivals(12, 300), 50)
    assert relative_error(ours.estimates(), plain.estimates()) < 5e-3
    assert torch.equal(ours.seen.cpu(), plain.seen)
    assert float(ours.threshold()) == pytest.approx(float(plain.threshold()), rel=1e-3)
    for client in (0, 11):
        ours_last, plain_last = (s.last(torch.tensor([client], device=s.model.device)) for s in (ours, plain))
        for mine, theirs in zip(ours_last, plain_last, strict=True):
            assert relative_error(mine, theirs) < 5e-3


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.8, 1.0])
def test_a_factor_at_the_threshold_is_accepted_and_one_above_is_not(device, window, quantile):
    for above in (False, True):
        server = make(device, 6, 40, window=window, quantile=quantile)
        assert server.threshold() == torch.inf
        drive((server,), Arrivals(6, 40), 30)
        client = torch.tensor([int(server.seen.nonzero()[0])], device=device)
        threshold, (update, model) = float(server.threshold()), server.last(client)
        if quantile == 1.0:
            assert threshold == torch.inf
            continue
        direction = torch.ones(40, device=device) / 40**0.5
        length = threshold * float((server.model - model).norm()) * (1.001 if above else 0.999)
        receipt = server.submit(int(client), update + length * direction, server.version)
        assert bool(receipt.accepted) != above
        assert float(receipt.factor) == pytest.approx(threshold, rel=2e-3)


def test_a_forgotten_client_is_a_new_one(device):
    """Forgotten when its slots have gone round, so that the next pair must not land where the oldest one was."""
    servers = pair(device, 12, 80)
    arrivals = Arrivals(12, 80)
    drive(servers, arrivals, 90)
    forgotten = [int(k) for k in servers[1]._engine.oldest.nonzero()[:3, 0]]
    assert forgotten
    for server in servers:
        for client in forgotten:
            server.forget(client)
        assert not server.seen[forgotten].any()
    drive(servers, arrivals, 90)
    plain, ours = (server.state_dict() for server in servers)
    assert ours["seen"][forgotten].all() and torch.equal(ours["pairs"].cpu(), plain["pairs"])
    assert relative_error(servers[1].model, servers[0].model) < 5e-3
