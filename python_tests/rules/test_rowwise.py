"""Rules that weigh whole rows in a server, against a slow one."""

import numpy as np
import pytest
import torch
from oracles import relative_error
from row_rounds import CLIENTS, SIZE, World, arrivals, make
from slow_rows import TWINS
from slow_server import SETTING_NAMES, SlowServer

from secureafl_ext import SecureAFL
from secureafl_ext.config import Config
from secureafl_ext.engines import row_wise
from secureafl_ext.engines.history import History
from secureafl_ext.rules import sums
from secureafl_ext.rules.row_rules import bucketed

F64 = torch.float64


class SlowRows:
    """The slow server with a row-wise rule: only how it combines rows is another, and who sent them is told."""

    def __init__(self, config):
        self.config, self.centre, self.rounds = config, np.zeros(SIZE), 0
        settings = {name: getattr(config, name) for name in SETTING_NAMES}
        self.server = SlowServer(np.zeros(SIZE), CLIENTS, **settings)
        self.server.combine = self.combine

    def submit(self, client, update, version):
        self.client, centre = client, self.centre
        accepted = self.server.submit(client, update, version)
        if self.config.on_reject == "hold" and not accepted:
            self.centre = centre
        return accepted

    def combine(self, rows):
        c = self.config
        draw, self.rounds = self.rounds, self.rounds + 1
        if len(rows) == 0:
            return np.zeros(SIZE)
        if not c.estimate:
            return rows[0]
        senders = self.server.senders
        rows = rows[np.argsort(senders)]  # of two equally good ones krum takes that of the first client
        if c.buckets > 1:
            mask = torch.from_numpy(np.isin(np.arange(CLIENTS), senders))
            deal = bucketed(mask, torch.tensor(draw), c.buckets)[:, mask].numpy()
            rows = deal[deal.any(1)] @ rows
        self.centre = TWINS[c.rule](rows, self.centre, c)
        return self.centre


SETTINGS = {
    "remembered updates": {},
    "rejected ones remembered": {"store": "all", "on_reject": "step", "quantile": 0.5},
    "received ones ignored": {"receive": False},
    "no estimates": {"estimate": False},
    "no filter, short first": {"filter": False, "max_norm": 0.7},
    "corrections": {"memory": 2, "trust": 0.5},
    "corrections that may not be": {"memory": 2, "trust": 0.0},
    "pairs as printed": {"memory": 2, "trust": 0.5, "pairs": "rounds"},
    "buckets": {"buckets": 2},
    "buckets of corrections": {"buckets": 3, "memory": 1},
    "own options": {"remove": 0.4, "radius": 0.8, "iterations": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rule", TWINS)
def test_a_server_follows_the_slow_one_round_by_round(rule, name, device):
    server = make(device, rule=rule, **SETTINGS[name])
    slow, verdicts = SlowRows(server.config), []
    for client, update, version in arrivals(server, 36, World()):
        expected = slow.submit(client, update.cpu().numpy(), version)
        assert bool(server.submit(client, update, version).accepted) == expected
        assert np.allclose(server.model.cpu().numpy(), slow.server.model, rtol=1e-6, atol=1e-8)
        verdicts.append(expected)
    assert len(set(verdicts)) == 2 and server.stats()["non_finite"] > 0


@pytest.mark.parametrize("store", ["all", "accepted"])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_kept_inner_products_are_those_of_the_history(store, dtype, device):
    server = SecureAFL(torch.zeros(SIZE, dtype=dtype, device=device), CLIENTS, memory=0, rule="spectral", store=store,
                       on_reject="step", quantile=0.5, history_dtype=dtype, lr=0.1)  # fmt: skip
    for arrival in arrivals(server, 60, World()):
        server.submit(*arrival)
    stats, state = server.stats(), server.state_dict()
    assert stats["non_finite"] > 0 and stats["rejected"] > stats["non_finite"] and state["seen"].all()
    rows = state["last_updates"].double()
    assert state["products"].dtype == F64
    assert torch.allclose(state["products"], rows @ rows.T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("trust", [0.05, 0.3, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_clipping_at_infinity_is_the_mean_with_the_same_account_of_corrections(trust, dtype):
    start, shared = torch.zeros(SIZE, dtype=dtype), {"memory": 2, "trust": trust, "lr": 0.1, "history_dtype": dtype}
    mean = SecureAFL(start, CLIENTS, rule="mean", **shared)
    clip = SecureAFL(start, CLIENTS, rule="centered_clip", radius=float("inf"), iterations=1, **shared)
    for arrival in arrivals(mean, 60, World()):
        mean.submit(*arrival)
        clip.submit(*arrival)
    assert relative_error(clip.model, mean.model) < (1e-12 if dtype == F64 else 1e-4)
    assert clip.stats() == mean.stats() and (clip.stats()["capped"] > 0) == (trust < 1)


def known(device, dtype=F64, memory=2):
    """Four clients: no pairs, a correction that trust=1 allows, one that it caps, one from pairs that are inf."""
    config = Config(memory=memory, history_dtype=dtype)
    history = History(config, 4, SIZE, torch.device(device))
    random = torch.Generator().manual_seed(2)
    steps = torch.randn(4, memory, SIZE, generator=random, dtype=F64)
    history.last_updates.copy_(torch.randn(4, SIZE, generator=random, dtype=F64))
    history.last_models.copy_(0.1 * torch.randn(4, SIZE, generator=random, dtype=F64))
    history.dw.copy_(steps)
    history.dg.copy_(steps * torch.tensor([1.0, 1.0, 50.0, torch.inf], dtype=F64)[:, None, None])
    history.pairs.copy_(torch.tensor([0, memory, memory, memory]))
    history.seen.fill_(True)
    return history


def accepted(client, update, history):
    products, square = sums.inner(history.last_updates, update), sums.inner(update[None], update)[0]
    yes = torch.tensor(True, device=update.device)
    return row_wise.Arrival(torch.tensor([client], device=update.device), update, products, square, yes, yes, yes)


@pytest.mark.parametrize("client", range(4))
def test_the_account_of_corrections_is_that_of_the_op(client, device):
    history, update = known(device), torch.ones(SIZE, dtype=F64, device=device)
    model, taken = torch.zeros_like(update), torch.tensor(True, device=device)
    rows = row_wise.RowWise(Config(rule="krum", memory=2), 4, SIZE, torch.device(device))
    _, ours, _ = rows.aggregate(accepted(client, update, history), model, history, history.seen)
    past = history.tensors().values()
    _, theirs = torch.ops.secureafl.aggregate_status(model, update, client, taken, *past, 1.0, "mean", 0)
    assert ours.tolist() == theirs.tolist() and len(set(ours.tolist())) == 4


def test_an_estimate_that_leaves_the_floats_is_the_last_update(device):
    history = known(device, torch.float32)
    for tensor in (history.last_updates, history.dg):
        tensor.fill_(3e38)
    history.dw.fill_(1.0)
    update = torch.full((SIZE,), 3e38, device=device)
    rows = row_wise.RowWise(Config(rule="krum", memory=2), 4, SIZE, torch.device(device))
    direction, _, _ = rows.aggregate(accepted(0, update, history), update / 1e37, history, history.seen)
    assert torch.allclose(direction, update)


def test_inner_products_by_stretches_are_exact_float64_sums(monkeypatch, device):
    rows = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).to(device)
    monkeypatch.setattr(sums, "CHUNK", 20)
    for others in (rows[0], rows[:3]):
        expected = rows.double() @ others.double().movedim(-1, 0)
        assert torch.allclose(sums.inner(rows, others), expected, rtol=0, atol=1e-13)
