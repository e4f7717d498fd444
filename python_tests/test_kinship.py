"""Who pulls together: averages against a slow twin, who is left out and who is not, and the rule in a server.

In float64 a round is composed of plain ops, in float32 and without corrections it is one op.
"""

import numpy as np
import pytest
import torch
from slow_server import SETTING_NAMES, SlowServer
from states import enqueued_like_submitted, identical, never_waits

from secureafl_ext import SecureAFL
from secureafl_ext.engines.kinship import FusedKinship
from secureafl_ext.rules.kinship import CROWD, KIN, KNOWN, NEAR, SHORT, SHORT_CENTERED, SHORT_SUM, SPAN, TURNED, Kinship

F64, F32 = torch.float64, torch.float32
SIZE, GROUPS, COLLUDERS = 60, 5, 6
HONEST = 2 * GROUPS
CLIENTS = HONEST + COLLUDERS + 1


def fleet(seed=0, colluders=COLLUDERS, turned=True):
    """(n, d): mean updates of honest clients, two by two alike, of colluders, and of one turned against them all."""
    random = np.random.default_rng(seed)
    axes = np.linalg.qr(random.normal(size=(SIZE, GROUPS + 2)))[0].T  # orthonormal
    honest = [axes[GROUPS] * 0.4 + axes[k % GROUPS] for k in range(HONEST)]
    against = [-np.sum(honest, 0) / np.linalg.norm(np.sum(honest, 0))] if turned else []
    return np.array(honest + [axes[GROUPS + 1]] * colluders + against)


def uploads(means, rounds, seed=1, noise=0.15, scale=1.0, order=None):
    """(client, update) of so many rounds; every update is its client's mean and noise of about the same length."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        client = int(random.integers(len(means)))
        update = scale * (means[client] + noise * random.normal(size=SIZE))
        yield (client if order is None else int(order[client])), update


@pytest.fixture(params=[F64, F32], ids=str)
def dtype(request):
    """The composed round and the one op. Both are the slow one's below, so not every long test needs both."""
    return request.param


def make(device="cpu", clients=CLIENTS, dtype=F64, **settings):
    start = torch.zeros(SIZE, dtype=dtype, device=device)
    settings = {"rule": "kinship", "memory": 0, "history_dtype": dtype, "lr": 0.01, **settings}
    server = SecureAFL(start, clients, **settings)
    one_op = dtype == F32 and settings["memory"] == 0 and settings["rule"] == "kinship"
    assert isinstance(server._engine, FusedKinship) == one_op
    return server


def drive(server, stream):
    for client, update in stream:
        server.submit(client, torch.from_numpy(update).to(server.model), server.version)
    return server


def left_out(server):
    """Clients whom the next round would leave out, of those seen."""
    kept = server._engine.kinship.kept(server.seen)
    return torch.nonzero(server.seen & ~kept)[:, 0].tolist()


class Twin:
    """The slow server with this rule, its averages kept client by client as the definition reads."""

    def __init__(self, server):
        self.config, n = server.config, server.clients
        settings = {name: getattr(self.config, name) for name in SETTING_NAMES}
        self.slow = SlowServer(np.zeros(SIZE), n, **settings)
        self.slow.combine = self.combine
        self.means, self.met, self.centre = np.zeros((n, n)), np.zeros(n, int), np.zeros(n)

    def submit(self, client, update, version):
        self.client, self.update, centre = client, update, self.centre
        accepted = self.slow.submit(client, update, version)
        if self.config.on_reject == "hold" and not accepted:
            self.centre = centre
        return accepted

    def combine(self, rows):
        last, i = self.slow.last, self.client
        senders = list(self.slow.senders)
        if len(rows) == 0:
            return np.zeros(SIZE)
        usual = np.median(np.linalg.norm(rows, axis=1))
        known = [k for k in senders if self.met[k] >= KNOWN]
        if 2 * len(known) >= len(senders):  # the others are on probation
            rows, senders = rows[[senders.index(k) for k in known]], known
        if i in last and self.slow.stored:
            for k, (g, _) in last.items():
                a, b = (x * min(1, usual / np.linalg.norm(x)) for x in (self.update, g))
                share = 1 / min(self.met[i] + 1, SPAN)
                self.means[i, k] = self.means[k, i] = (1 - share) * self.means[i, k] + share * (a @ b) / usual**2
            self.met[i] += 1
        chosen = self.chosen(senders)
        distance = np.sqrt(np.maximum(np.diag(self.apart()), 0))
        weights = (self.met >= KNOWN) / np.maximum(distance, NEAR)
        self.centre = weights / max(weights.sum(), 1e-300)
        rows = rows[[senders.index(k) for k in chosen]]
        lengths = np.linalg.norm(rows, axis=1)
        return (rows * np.minimum(1, usual / lengths)[:, None]).mean(0)

    def apart(self):
        """Products of differences to the centre, one by one."""
        clients, w = range(len(self.met)), self.centre
        common = sum(w[a] * w[b] * self.means[a, b] for a in clients for b in clients)
        along = [sum(w[a] * self.means[i, a] for a in clients) for i in clients]
        return np.array([[self.means[i, k] - along[i] - along[k] + common for k in clients] for i in clients])

    def chosen(self, senders):
        known = [k for k in senders if self.met[k] >= KNOWN]
        length = np.sqrt(np.maximum(np.diag(self.means), 0))

        def few_kin(products, short):
            long = np.sqrt(np.maximum(np.diag(products), 0))

            def kin(i):
                others = (k for k in known if i in known and k != i)
                return 1 + sum(products[i, k] > KIN * max(long[i] * long[k], short) for k in others)

            most = CROWD * np.median([kin(i) for i in senders])
            return [i for i in senders if kin(i) <= most]

        kept, apart = few_kin(self.means, SHORT), few_kin(self.apart(), SHORT_CENTERED)
        both = [i for i in kept if i in apart]
        kept = both if 2 * len(both) >= len(senders) else kept
        total = np.sqrt(max(self.means[np.ix_(kept, kept)].sum(), 0))
        turned = {i for i in known if self.means[i, kept].sum() < TURNED * max(length[i] * total, SHORT_SUM)}
        return [i for i in kept if i not in turned]


SETTINGS = {
    "remembered updates": {},
    "rejected ones remembered": {"store": "all", "on_reject": "step", "quantile": 0.6},
    "no filter, short first ones": {"filter": False, "max_norm": 0.5},
    "corrections": {"memory": 2, "trust": 0.3},
}


CASES = [(name, F64) for name in SETTINGS] + [(name, F32) for name in SETTINGS if name != "corrections"]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_server_follows_the_slow_one_round_by_round(name, dtype, device):
    server = make(device, dtype=dtype, **SETTINGS[name])
    close = {F64: {"rtol": 1e-6, "atol": 1e-9}, F32: {"rtol": 1e-5, "atol": 1e-6}}[dtype]
    twin, verdicts, random = Twin(server), [], np.random.default_rng(5)
    for t, (client, update) in enumerate(uploads(fleet(), 260)):
        if t % 37 == 30:
            update = np.full(SIZE, np.nan)
        if t % 17 == 9:
            update = 9 * update
        update = update.astype(np.float32).astype(float)  # alike for all that take it
        version = max(0, server.version - int(random.integers(4)))
        expected = twin.submit(client, update, version)
        assert bool(server.submit(client, torch.from_numpy(update).to(server.model), version).accepted) == expected
        assert np.allclose(server.model.cpu().numpy(), twin.slow.model, **close)
        verdicts.append(expected)
    assert np.allclose(server.kinship.cpu().numpy(), twin.means, **close)
    assert len(set(verdicts)) == 2 and set(left_out(server)) >= set(range(HONEST, CLIENTS))


def test_averages_tend_to_the_products_of_the_mean_updates():
    """Also on the diagonal, where the square of one update would have its noise in it."""
    means = fleet()
    server = drive(make(dtype=F32, filter=False), uploads(means, 2000))
    expected = means @ means.T
    usual = np.median(np.linalg.norm([update for _, update in uploads(means, 500)], axis=1))
    squares = np.diag(expected) + 0.15**2 * SIZE
    cut = np.minimum(1, usual / np.sqrt(squares))
    expected = expected * cut[:, None] * cut / usual**2
    assert np.abs(server.kinship.numpy() - expected).max() < 0.08
    assert np.diag(expected).max() < 0.6 < (squares * cut**2 / usual**2).min()


def test_colluders_and_the_turned_are_left_out_and_honest_groups_are_not(device, dtype):
    assert left_out(drive(make(device, dtype=dtype), uploads(fleet(), 700))) == [*range(HONEST, CLIENTS)]


def test_colluders_stand_out_among_clients_that_are_all_alike(device, dtype):
    """Who are kin of each other, in a group larger than theirs."""
    means = np.concatenate([np.tile(fleet()[0], (HONEST, 1)), fleet()[HONEST : HONEST + COLLUDERS]])
    server = drive(make(device, clients=len(means), dtype=dtype), uploads(means, 700))
    assert left_out(server) == [*range(HONEST, len(means))]


def test_without_attackers_nobody_is_left_out():
    honest = fleet(colluders=0, turned=False)
    assert left_out(drive(make(clients=HONEST, dtype=F32), uploads(honest, 700))) == []
    alike = np.tile(honest.sum(0), (HONEST, 1))
    assert left_out(drive(make(clients=HONEST, dtype=F32), uploads(alike, 700))) == []
    nothing = np.zeros((HONEST, SIZE))  # all noise: cosines of what is no length must not count
    assert left_out(drive(make(clients=HONEST, dtype=F32), uploads(nothing, 700))) == []


def test_a_group_no_larger_than_others_is_not_told_from_them():
    """What the rule cannot see: colluders as many as honest clients that are alike."""
    means = fleet(colluders=2, turned=False)
    assert left_out(drive(make(clients=len(means), dtype=F32), uploads(means, 700))) == []


def test_the_model_goes_where_honest_clients_pull():
    honest = fleet(colluders=0, turned=False)
    there = drive(make(clients=HONEST, dtype=F32), uploads(honest, 700)).model
    robust = drive(make(dtype=F32), uploads(fleet(), 700)).model
    plain = drive(make(dtype=F32, rule="mean", buckets=2), uploads(fleet(), 700)).model

    def cosine(a):
        return float(torch.nn.functional.cosine_similarity(a, there, dim=0))

    assert cosine(robust) > 0.97 and cosine(plain) < 0.7


def test_long_noise_is_cut_though_most_of_those_left_send_it(device, dtype):
    """Three of six honest clients are alike and left out; four send noise a hundred times as long as an update."""
    alike, honest, clients = 3, 6, 10
    means = np.zeros((clients, SIZE))
    means[range(honest), [0] * alike + [1, 2, 3]] = 1
    server = make(device, clients=clients, dtype=dtype, filter=False)
    longest, steps = 0, []
    for client, update in uploads(means, 400):
        longest = max(longest, np.linalg.norm(update))
        before = server.model.clone()
        drive(server, [(client, 100 * update if client >= honest else update)])
        steps.append(float((server.model - before).norm()) / server.lr)
    assert left_out(server) == [*range(alike)]
    assert 0.1 * longest < max(steps[200:]) < longest


def test_names_and_units_of_clients_do_not_matter(dtype):
    one = drive(make(dtype=dtype, filter=False, max_norm=1e9), uploads(fleet(), 400))
    order = np.random.default_rng(2).permutation(CLIENTS)
    other = drive(make(dtype=dtype, filter=False, max_norm=1e9), uploads(fleet(), 400, scale=1000.0, order=order))
    assert sorted(order[left_out(one)]) == left_out(other)
    rtol, atol = {F64: (1e-6, 1e-9), F32: (1e-4, 1e-6)}[dtype]
    assert torch.allclose(other.model, 1000 * one.model, rtol=rtol, atol=1000 * atol)
    assert torch.allclose(other.kinship[order][:, order], one.kinship, rtol=rtol, atol=atol)


def test_one_long_update_hardly_moves_an_average():
    server = drive(make(dtype=F32, filter=False), uploads(fleet(), 1000))
    before = server.kinship.clone()
    server.submit(3, 1e6 * torch.ones(SIZE, dtype=F32), server.version)
    moved = (server.kinship - before).abs()
    assert 0 < moved.max() <= 2 / SPAN
    moved[3] = moved[:, 3] = 0
    assert not moved.any()


def met(device, means, count=KNOWN):
    kinship = Kinship(len(means), torch.device(device))
    kinship.means.copy_(torch.as_tensor(means, dtype=F64))
    kinship.met.fill_(count)
    return kinship


def everyone(n, device="cpu"):
    return torch.ones(n, dtype=torch.bool, device=device)


def test_the_bounds_are_as_said(device):
    """Seven clients and a group of three: kin 3 against a median of 1 is a crowd, against 2 it is none."""
    group = np.eye(7)
    group[:3, :3] += (KIN + 1e-6) * (1 - np.eye(3))
    pairs = group.copy()
    pairs[3, 4] = pairs[4, 3] = KIN + 1e-6
    all_kept = [True] * 7
    assert met(device, group).kept(everyone(7, device)).tolist() == [False] * 3 + [True] * 4
    assert met(device, pairs).kept(everyone(7, device)).tolist() == all_kept
    assert met(device, group - 2e-6 * (group < 1)).kept(everyone(7, device)).tolist() == all_kept  # just no kin
    assert met(device, group, KNOWN - 1).kept(everyone(7, device)).tolist() == all_kept  # not known yet
    few = torch.tensor([True, True, False, True, True, True, True], device=device)
    assert met(device, group).kept(few).tolist() == [False, False, False, True, True, True, True]
    few[1] = False
    assert met(device, group).kept(few).tolist() == few.tolist()  # who is away is nobody's kin


@pytest.mark.parametrize(("cosine", "stays"), [(1.01 * TURNED, False), (0.99 * TURNED, True)])
def test_who_is_turned_against_the_sum_by_more_than_said_is_left_out(cosine, stays, device):
    """Four clients across each other, and a fifth of the same length: x with each makes its cosine to the sum this."""
    low, high = -0.5, 0.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if (1 + 4 * x) / np.sqrt(5 + 8 * x) < cosine else (low, x)
    means = np.eye(5)
    means[4, :4] = means[:4, 4] = x
    assert met(device, means).kept(everyone(5, device)).tolist() == [True] * 4 + [stays]
    assert met(device, means, KNOWN - 1).kept(everyone(5, device)).all()


def test_nobody_known_keeps_everyone(device):
    assert Kinship(4, torch.device(device)).kept(everyone(4, device)).all()


@pytest.mark.parametrize("settings", [{}, {"memory": 2}, {"dtype": F32}], ids=str)
def test_saved_and_resumed_is_bit_identical(settings, device, tmp_path):
    stream = uploads(fleet(), 400)
    server = make(device, **settings)
    drive(server, (next(stream) for _ in range(200)))
    server.save(tmp_path / "server")
    resumed = SecureAFL.load(tmp_path / "server", device=device)
    assert left_out(resumed) == left_out(server) != []
    for client, update in stream:
        update = torch.from_numpy(update).to(server.model)
        receipts = [each.submit(client, update, each.version) for each in (server, resumed)]
        assert receipts[0].reason == receipts[1].reason
    identical(resumed, server)
    assert torch.equal(resumed.kinship, server.kinship)


@pytest.mark.parametrize("settings", [{}, {"memory": 2}, {"dtype": F32}], ids=str)
def test_enqueued_rounds_are_submitted_ones(settings, device):
    one, twin = make(device, **settings), make(device, **settings)
    updates = ((who, torch.from_numpy(update).to(twin.model), twin.version) for who, update in uploads(fleet(), 120))
    enqueued_like_submitted(one, twin, updates)
    assert torch.equal(one.kinship, twin.kinship) and left_out(one) != []


@pytest.mark.parametrize("settings", [{}, {"memory": 2}, {"dtype": F32}], ids=str)
def test_a_round_never_waits_for_the_device(settings):
    engine = (server := make(**settings))._engine
    never_waits(server, engine, engine.history, engine.rows, engine.kinship)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, torch.finfo(torch.float32).max), (F64, 1e308)], ids=str)
def test_huge_and_zero_updates_leave_model_and_averages_finite(dtype, most, device):
    start = torch.zeros(4, dtype=dtype, device=device)
    server = SecureAFL(start, 3, lr=10.0, max_norm=most, filter=False, rule="kinship", memory=0, history_dtype=dtype)
    for t in range(36):
        update = torch.full((4,), (0.0 if t % 7 == 3 else most) * (-1) ** (t // 5), dtype=dtype, device=device)
        server.submit(t % 3, update, max(0, server.version - t % 4))
    state = server.state_dict()
    assert all(state[name].isfinite().all() for name in ("models", "last_updates", "kinship"))
    for t in range(12):  # the same and nothing but zeros
        server.submit(t % 3, torch.zeros(4, dtype=dtype, device=device), server.version)
    assert server.model.isfinite().all() and server.kinship.isfinite().all()


def test_a_forgotten_client_is_nobodys_kin_and_starts_anew(device, dtype):
    server, honest, spy = drive(make(device, dtype=dtype), uploads(fleet(), 500)), fleet()[0], HONEST + 1
    assert spy in left_out(server)
    before = server.kinship.clone()
    server.forget(spy)
    assert not server.kinship[spy].any() and not server.kinship[:, spy].any() and spy not in left_out(server)
    others = torch.arange(CLIENTS, device=device) != spy
    assert torch.equal(server.kinship[others][:, others], before[others][:, others])
    drive(server, [(0, fleet()[0])])
    assert not server.kinship[spy].any()
    means = fleet()
    means[spy] = honest  # another client has the number now
    drive(server, uploads(means, 500, seed=2))
    assert spy not in left_out(server) and HONEST in left_out(server)


def test_words_for_what_there_is_not():
    with pytest.raises(ValueError, match="buckets must be 1 with rule='kinship', got 2"):
        make(buckets=2)
    with pytest.raises(ValueError, match="state must have kin_centre, kinship, met, got none"):
        make().load_state_dict(make(rule="krum").state_dict())
    assert make(rule="krum").kinship is None and SecureAFL(torch.zeros(3), 2).kinship is None
