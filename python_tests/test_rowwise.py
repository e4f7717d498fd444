"""Rules that weigh whole rows in a server, against a slow one."""

import numpy as np
import pytest
import torch
from oracles import relative_error
from slow_rows import TWINS
from slow_server import SETTING_NAMES, SlowServer
from states import enqueued_like_submitted, identical, never_waits

from secureafl_ext import SecureAFL
from secureafl_ext.config import Config
from secureafl_ext.engines import row_wise, sums
from secureafl_ext.engines.history import History
from secureafl_ext.rules.row_rules import bucketed

SIZE, CLIENTS = 12, 7
F64 = torch.float64
ROBUST = ("centered_clip", "spectral", "krum", "geometric_median")


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


class World:
    """Quadratic clients, one of which sends noise, one from time to time no numbers, one late."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.centres = self.random.normal(size=(CLIENTS, SIZE))
        self.rounds = 0

    def next(self, model_at, newest, max_staleness):
        self.rounds += 1
        client = int(self.random.integers(CLIENTS if self.rounds > 25 else CLIENTS - 1))
        version = max(0, newest - int(self.random.integers(max_staleness + 1)))
        update = model_at(version) - self.centres[client] + 0.05 * self.random.normal(size=SIZE)
        if client == 0:
            update = 3 * self.random.normal(size=SIZE)
        if client == 1 and self.rounds % 3 == 0:
            update[self.rounds % SIZE] = np.nan
        return client, update, version


def make(device="cpu", **settings):
    start = torch.zeros(SIZE, dtype=F64, device=device)
    return SecureAFL(start, CLIENTS, **{"lr": 0.1, "memory": 0, "history_dtype": F64, "max_staleness": 4, **settings})


def arrivals(server, rounds, world):
    """(client, update, version) of so many rounds, each made after the one before was taken."""
    for _ in range(rounds):
        client, update, version = world.next(
            lambda version: server.model_at(version).cpu().numpy(), server.version, server.config.max_staleness
        )
        yield client, torch.from_numpy(update).to(server.model), version


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
    history = History(4, memory, SIZE, dtype, torch.device(device))
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
    _, ours = rows.aggregate(accepted(client, update, history), model, history, history.seen)
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
    direction, _ = rows.aggregate(accepted(0, update, history), update / 1e37, history, history.seen)
    assert torch.allclose(direction, update)


def test_inner_products_by_stretches_are_exact_float64_sums(monkeypatch, device):
    rows = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).to(device)
    monkeypatch.setattr(sums, "CHUNK", 20)
    for others in (rows[0], rows[:3]):
        expected = rows.double() @ others.double().movedim(-1, 0)
        assert torch.allclose(sums.inner(rows, others), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("settings", [{}, {"memory": 2, "buckets": 2}, {"estimate": False}], ids=str)
@pytest.mark.parametrize("rule", TWINS)
def test_enqueued_rounds_are_submitted_ones(rule, settings, device):
    settings = {"buckets": 2, **settings} if rule == "mean" else settings
    one, twin = make(device, rule=rule, **settings), make(device, rule=rule, **settings)
    enqueued_like_submitted(one, twin, arrivals(twin, 24, World()))


def test_a_float32_model_with_a_float64_history_is_enqueued_to():
    server, update = SecureAFL(torch.zeros(3), 2, rule="krum", history_dtype=F64, lr=0.5), torch.ones(3)
    server.enqueue(torch.tensor([1]), update.requires_grad_(), torch.zeros(3))
    assert torch.equal(server.model, torch.full((3,), -0.5)) and not server.model.requires_grad


@pytest.mark.parametrize("settings", [{}, {"memory": 2}, {"buckets": 2}], ids=str)
@pytest.mark.parametrize("rule", ROBUST)
def test_saved_and_resumed_is_bit_identical(rule, settings, device, tmp_path):
    server = make(device, rule=rule, radius=0.9, remove=0.3, iterations=3, **settings)
    for arrival in arrivals(server, 23, world := World()):
        server.submit(*arrival)
    server.save(tmp_path / "server")
    resumed = SecureAFL.load(tmp_path / "server", device=device)
    assert resumed.config == server.config
    for arrival in arrivals(server, 23, world):
        assert server.submit(*arrival).reason == resumed.submit(*arrival).reason
    identical(resumed, server)


@pytest.mark.parametrize("settings", [{}, {"memory": 2, "buckets": 2}], ids=str)
@pytest.mark.parametrize("rule", TWINS)
def test_a_round_never_waits_for_the_device(rule, settings):
    server = make(rule=rule, **{"buckets": 2, **settings} if rule == "mean" else settings)
    never_waits(server, server._engine, server._engine.history, server._engine.rows)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, torch.finfo(torch.float32).max), (F64, 1e308)], ids=str)
@pytest.mark.parametrize("settings", [{"memory": 0, "buckets": 2}, {"memory": 2, "trust": float("inf")}], ids=str)
@pytest.mark.parametrize("rule", ROBUST)
def test_huge_updates_leave_model_and_history_finite(rule, settings, dtype, most, device):
    start = torch.zeros(4, dtype=dtype, device=device)
    server = SecureAFL(start, 3, lr=10.0, max_norm=most, filter=False, rule=rule, history_dtype=dtype, **settings)
    for t in range(24):
        update = torch.full((4,), most * (-1) ** (t // 5), dtype=dtype, device=device)
        server.submit(t % 3, update, max(0, server.version - t % 4))
    state = server.state_dict()
    names = ("models", "last_updates", "last_models", "dw", "dg", "centre")
    assert all(state[name].isfinite().all() for name in names)


def test_a_centre_that_would_leave_the_floats_stays(device):
    """Ten times a tenth of the largest float is, rounded, more than it."""
    update = torch.full((4,), torch.finfo(torch.float32).max, device=device)
    server = SecureAFL(torch.zeros(4, device=device), 10, lr=0.1, memory=0, max_norm=float("inf"), filter=False,
                       rule="centered_clip", radius=float("inf"), iterations=1)  # fmt: skip
    for t in range(12):
        server.submit(t % 10, update, t)
    centre = server.state_dict()["centre"]
    assert centre.isfinite().all() and (centre > 3e38).all() and server.models.isfinite().all()


@pytest.mark.parametrize("rule", ROBUST)
def test_a_row_whose_square_is_no_number_takes_no_part(rule, device):
    server = make(device, rule=rule, filter=False, lr=1.0)
    for client in range(3):
        server.submit(client, torch.ones(SIZE, dtype=F64, device=device), client)
    server.submit(0, torch.full((SIZE,), 1e200, dtype=F64, device=device), 3)
    before = server.model.clone()
    server.submit(1, torch.ones(SIZE, dtype=F64, device=device), 4)
    assert torch.allclose(server.model, before - 1, atol=1e-9)


@pytest.mark.parametrize("rule", ROBUST)
def test_without_a_row_the_model_stays(rule, device):
    server = make(device, rule=rule)
    server.submit(2, torch.full((SIZE,), torch.nan, dtype=F64, device=device), 0)
    assert not server.model.any() and not server.seen.any() and server.version == 1
    server.submit(2, torch.ones(SIZE, dtype=F64, device=device), 1)
    before = server.model.clone()
    assert not server.submit(2, 5 * torch.ones(SIZE, dtype=F64, device=device), 1).accepted
    assert before.any() and torch.equal(server.model, before)
    assert server.state_dict()["centre"].any() == (rule == "centered_clip")  # the last one stays


REFUSED = [
    ({"rule": "crum"}, "rule must be one of median, trimmed_mean, mean, centered_clip, spectral, krum, "
                       "geometric_median, kinship, support, got 'crum'"),
    ({"buckets": 0}, "buckets must be a whole number, 1 or more, got 0"),
    ({"buckets": 2}, "buckets must be 1 with rule='median', got 2"),
    ({"buckets": 3, "rule": "trimmed_mean"}, "buckets must be 1 with rule='trimmed_mean', got 3"),
    ({"remove": 1.0}, "remove must be a number, 0 or more, below 1, got 1.0"),
    ({"remove": -0.1}, "remove must be a number, 0 or more, below 1, got -0.1"),
    ({"radius": 0.0}, "radius must be None or a positive number, got 0.0"),
    ({"iterations": 0}, "iterations must be a whole number, 1 or more, got 0"),
    ({"rule": "krum", "history_dtype": torch.float16}, "history_dtype=float16 does not support rule='krum'"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError) as refusal:
        SecureAFL(torch.zeros(3), 3, **settings)
    assert str(refusal.value) == f"SecureAFL: {words}"


def test_a_state_without_inner_products_is_refused():
    server = make(rule="krum")
    with pytest.raises(ValueError, match="state must have centre, products, rounds, got none"):
        server.load_state_dict(make(rule="median").state_dict())


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"rule": "median"}, "history_dtype=float64"), ({"rule": "krum", "spacing": 1}, "spacing=1")],
)
def test_enqueue_names_the_setting_that_it_does_not_support(settings, named):
    server = make(**settings)
    with pytest.raises(ValueError, match=f"SecureAFL.enqueue: not supported with {named}; use submit"):
        server.enqueue(torch.tensor([0]), torch.ones(SIZE), torch.zeros(SIZE))
    assert not server.capturable


@pytest.mark.parametrize("rule", ["centered_clip", "spectral", "krum", "geometric_median"])
def test_a_forgotten_client_leaves_no_trace_in_the_products(rule):
    """Against a server whose state never had its row."""
    random = torch.Generator().manual_seed(1)
    ours, clean = (SecureAFL(torch.zeros(9), 5, rule=rule, memory=0, max_staleness=40) for _ in range(2))
    for k in range(20):
        ours.submit(k % 5, torch.randn(9, generator=random), ours.version)
    ours.forget(2)
    state = ours.state_dict()
    for name in ("last_updates", "last_models"):
        state[name][2] = 0
    state["products"][2], state["products"][:, 2] = 0, 0
    clean.load_state_dict(state)
    for k in (0, 1, 3, 2, 4, 2):
        update = torch.randn(9, generator=random)
        for server in (ours, clean):
            server.submit(k, update, server.version)
        assert torch.equal(ours.model, clean.model)
