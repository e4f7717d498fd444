"""The kinship rule's round as one op against the composed one: same arrivals, same verdicts, averages and models."""

import pytest
import torch
from emulated import call_round, emulate, library
from peaks import peak, start_peak
from states import identical, same_on_any_threads

from secureafl_ext import SecureAFL
from secureafl_ext.engines import kinship
from secureafl_ext.engines.kinship import FusedKinship
from secureafl_ext.rules.kinship import KNOWN, SPAN

STEP = torch.ops.secureafl.kin_step_.default
F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


def make(device, n, d, **settings):
    server = SecureAFL(torch.zeros(d, device=device), n, **{**SETTINGS, **settings})
    assert isinstance(server._engine, FusedKinship)
    return server


AVERAGED = {"kinship", "kin_centre", "similarity", "shift"}
SETTINGS = {"rule": "kinship", "memory": 0, "lr": 0.1, "max_staleness": 4}


def composed(create):
    """The server that `create` makes, its rounds of plain ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinship, "fits", lambda *_: False)
        return create()


def oracle(n, d, dtype=F64, **settings):
    settings = {**SETTINGS, "history_dtype": dtype, **settings}
    return composed(lambda: SecureAFL(torch.zeros(d, dtype=dtype), n, **settings))


class Arrivals:
    """(client, update, version): two by two alike, every third a colluder, one against all; now and then a strange one.

    However many clients there are, a dozen do the talking, the first and the last among them. What they send does not
    depend on the model, so that rounding does not grow.
    """

    def __init__(self, n, d, seed=0, strange=True, pull=1.0):
        self.random = torch.Generator().manual_seed(seed)
        self.active = sorted({0, n - 1, *torch.randperm(n, generator=self.random)[:10].tolist()})
        axes = torch.randn(len(self.active) + 2, d, generator=self.random)
        self.means = {}
        for i, client in enumerate(self.active):
            self.means[client] = pull * (axes[-1] if i % 3 == 2 else axes[i // 3] + 0.4 * axes[-2])
        self.means[self.active[-1]] = -sum(self.means.values()) / len(self.active)
        self.d, self.strange, self.count, self.sent = d, strange, 0, {}

    def draw(self, high):
        return int(torch.randint(high, (), generator=self.random))

    def next(self, server):
        client = self.active[self.draw(len(self.active))]
        version = max(0, server.version - self.draw(server.config.max_staleness + 2))  # one too old among them
        update = self.means[client] + 0.3 * torch.randn(self.d, generator=self.random)
        self.count += 1
        last = self.sent.get(client)
        match self.count % 61 if self.strange else 0:
            case 7 | 33:
                update[self.draw(self.d)] = (NAN, INF, -INF)[self.draw(3)]
            case 11 | 44:
                update = torch.zeros(self.d)
            case 17:
                update = 1e20 * update
            case 23 | 50:
                update = 30 * update
            case 29 | 37 if last:
                version = last[1]  # the model of last time, another update
            case 41 | 47 if last:
                update, version = last  # the same once more
            case 53:
                update = 1e-30 * update
        self.sent[client] = update, version
        return client, update, version


def drive(servers, arrivals, rounds, bound=1e-5):
    """Every server takes the same; they agree on each verdict and model. What the verdicts were."""
    reasons = []
    for _ in range(rounds):
        client, update, version = arrivals.next(servers[0])
        receipts = [server.submit(client, update.to(server.model), version) for server in servers]
        assert len({receipt.reason for receipt in receipts}) == 1
        factors = [float(receipt.factor) for receipt in receipts]
        assert factors == pytest.approx([factors[0]] * len(factors), rel=1e-3, nan_ok=True)
        first = servers[0].model.cpu().double()
        for server in servers[1:]:
            assert (server.model.cpu().double() - first).norm() <= bound * first.norm()
        reasons.append(receipts[0].reason)
    return reasons


def agree(ours, theirs, bound=1e-5):
    """Two servers of any kind."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for name in ("seen", "met", "pairs", "recorded", "counts", "rounds"):
        assert torch.equal(mine[name].cpu(), other[name].cpu()), name
    seen = other["seen"].cpu()
    for name, rows in (("models", ...), ("last_updates", seen), ("last_models", seen)):
        a, b = (state[name].cpu().double()[rows] for state in (mine, other))
        assert ((a - b).norm(dim=1) <= bound * b.norm(dim=1)).all(), name
    a, b = (state["products"].cpu()[seen][:, seen] for state in (mine, other))
    lengths = b.diagonal().sqrt()
    assert ((a - b).abs() <= bound * lengths[:, None] * lengths).all()
    for name in AVERAGED & mine.keys():
        assert torch.allclose(mine[name].cpu(), other[name].cpu(), rtol=bound, atol=bound), name
    assert torch.allclose(mine["factors"].cpu(), other["factors"].cpu(), rtol=1e-3)
    assert ours.stats() == theirs.stats()


def left_out(server):
    return server.seen & ~server._engine.kinship.kept(server.seen)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantile": 0.5},
        {"filter": False},
        {"receive": False},
        {"window": 7},
        {"max_norm": 0.5},
        {"max_norm": INF},
        {"max_staleness": 0},
        {"quantile": 0.0, "store": "all", "on_reject": "step"},
        {"factors": "pooled", "store": "all", "on_reject": "step"},
        {"on_reject": "step"},
        {"pairs": "rounds"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_every_setting_over_hundreds_of_rounds(device, settings, dtype):
    plain, ours = oracle(16, 60, dtype, **settings), make(device, 16, 60, **settings)
    arrivals = Arrivals(16, 60)
    reasons = drive((plain, ours), arrivals, 300)
    agree(ours, plain)
    assert left_out(ours).any() and (ours.state_dict()["met"] > KNOWN).any()
    assert len({reason.split(",")[0] for reason in reasons}) >= (3 if settings.get("filter") is False else 4)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 50, 127, 1000, 1024])
def test_any_number_of_clients(device, n):
    plain, ours = oracle(n, 40), make(device, n, 40)
    drive((plain, ours), Arrivals(n, 40), 80)
    agree(ours, plain)


def test_first_updates_are_clipped_with_their_products(device):
    servers = oracle(6, 30, max_norm=0.5), make(device, 6, 30, max_norm=0.5)
    for client, update in enumerate(torch.randn(6, 30, generator=torch.Generator().manual_seed(3))):
        for server in servers:
            server.submit(client, update.to(server.model), server.version)
        agree(servers[1], servers[0])
    assert torch.allclose(servers[1].state_dict()["products"].diagonal().cpu(), torch.full((6,), 0.25, dtype=F64))


def test_averages_that_reach_back_no_further_than_said(device):
    plain, ours = oracle(3, 20), make(device, 3, 20)
    drive((plain, ours), Arrivals(3, 20, strange=False), 60 + 5 * SPAN)
    agree(ours, plain)
    assert (ours.state_dict()["met"] > SPAN).all()


def test_nobody_pulls_anywhere(device):
    """Mean updates of no length: what noise makes of their cosines must not count."""
    plain, ours = oracle(12, 400), make(device, 12, 400)
    drive((plain, ours), Arrivals(12, 400, strange=False, pull=0.0), 200)
    agree(ours, plain)
    assert not left_out(ours).any()


@pytest.mark.parametrize("n", [50, 130])
def test_everybody_talks(device, n):
    """Averages of all with all, several meetings each."""
    plain, ours = oracle(n, 24), make(device, n, 24)
    arrivals = Arrivals(n, 24, strange=False)
    base = torch.randn(n // 5, 24, generator=arrivals.random)
    for t in range(5 * n):
        client = t % n
        noise = 0.2 * torch.randn(24, generator=arrivals.random)
        update = noise + (base[0] if client < n // 3 else base[client % len(base)])
        receipts = [
            server.submit(client, update.to(server.model), max(0, server.version - 1)) for server in (plain, ours)
        ]
        assert receipts[0].reason == receipts[1].reason
    agree(ours, plain)
    assert left_out(ours).sum() > n // 6 and torch.equal(left_out(ours).cpu(), left_out(plain))


@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 127, 128, 129, 511, 512, 513, 1000, 4099, 20_012, 300_000])
def test_any_number_of_parameters(device, d):
    plain, ours = oracle(9, d), make(device, 9, d)
    drive((plain, ours), Arrivals(9, d), 70)
    agree(ours, plain)


def test_memory_that_is_not_aligned(device):
    """d allows vectors of four; where update and model begin does not, and must not change a bit."""
    one, other = make(device, 6, 64), make(device, 6, 64)
    arrivals = Arrivals(6, 64)
    for _ in range(40):
        client, update, version = arrivals.next(one)
        if one.version - version > 4:
            continue
        odd = torch.zeros(2, 65, device=device)
        odd[0, 1:], odd[1, 1:] = update.to(device), other.model_at(version)
        one.submit(client, update.to(device), version)
        other.enqueue(torch.tensor([client], device=device), odd[0, 1:], odd[1, 1:])
    identical(one, other)


def test_strided_updates_are_taken(device):
    one, other = make(device, 6, 30), make(device, 6, 30)
    arrivals = Arrivals(6, 30)
    for _ in range(20):
        client, update, version = arrivals.next(one)
        one.submit(client, update.to(device), version)
        other.submit(client, update.to(device)[:, None].expand(30, 3)[:, 1], version)
    identical(one, other)


def test_without_estimates_the_round_is_composed():
    server = SecureAFL(torch.zeros(5), 3, **SETTINGS, estimate=False)
    assert not isinstance(server._engine, FusedKinship)
    server.submit(0, torch.ones(5), 0)
    assert torch.allclose(server.model, torch.full((5,), -0.1))


@pytest.mark.parametrize("store", ["all", "accepted"])
def test_forgotten_clients_start_anew(device, store):
    settings = {"store": store, "on_reject": "step"}
    servers = oracle(16, 60, **settings), make(device, 16, 60, **settings)
    arrivals = Arrivals(16, 60)
    for client in (*arrivals.active[:3], arrivals.active[-1]):
        drive(servers, arrivals, 60)
        for server in servers:
            server.forget(client)
    agree(servers[1], servers[0])
    drive(servers, arrivals, 100)
    agree(servers[1], servers[0])


def test_saved_by_one_engine_resumed_by_the_other(device, tmp_path):
    plain, ours = oracle(16, 60, F32), make(device, 16, 60)
    arrivals = Arrivals(16, 60)
    drive((plain, ours), arrivals, 100)
    plain.save(tmp_path / "plain")
    ours.save(tmp_path / "ours")
    there = SecureAFL.load(tmp_path / "plain", device=device)
    back = composed(lambda: SecureAFL.load(tmp_path / "ours"))
    assert isinstance(there._engine, FusedKinship) and not isinstance(back._engine, FusedKinship)
    drive((plain, ours, there, back), arrivals, 100)
    for server in (ours, there, back):
        agree(server, plain)


def test_two_runs_are_bit_equal(device):
    for n, d in ((30, 3001), (300, 1000)):
        one, two = (make(device, n, d) for _ in range(2))
        drive((one, two), Arrivals(n, d), 60)
        identical(one, two)


def test_the_number_of_threads_changes_nothing():
    """d: several chunks of tiles, and a last tile that is not full."""
    one, two = (make("cpu", 20, 20_011) for _ in range(2))
    same_on_any_threads(one, two, Arrivals(20, 20_011), 60)


def test_a_coordinate_never_leaves_the_floats(device):
    server = make(device, 3, 5, lr=1e30, filter=False, max_norm=INF)
    for t in range(12):
        update = torch.tensor([1.0, 1e20, -1e20, 0.0, 3e38], device=device)
        server.submit(t % 3, update if t % 2 else -update, server.version)
        assert server.model.isfinite().all()
    assert server.model[0] != 0 and server.model[3] == 0


def test_a_client_that_there_is_not_is_refused():
    server = make("cpu", 4, 30)
    for client in (4, -1):
        words = f"secureafl::kin_step_: client must lie in 0..3, got {client}"
        with pytest.raises(RuntimeError, match=words):
            server.enqueue(torch.tensor([client]), *torch.ones(2, 30))
    assert not server.seen.any() and server.version == 0


def call(server, monkeypatch):
    """The arguments of one round."""
    calls = []
    monkeypatch.setattr(kinship, "step", lambda *arguments: calls.append(arguments) or STEP(*arguments))
    server.submit(1, torch.ones_like(server.model), server.version)
    return calls[0]


def test_schema_tells_what_is_written_to(device, monkeypatch):
    server = make(device, 20, 300)
    drive((server,), Arrivals(20, 300), 60)
    arguments = call(server, monkeypatch)
    checks = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(STEP, arguments, test_utils=checks).values()) == {"SUCCESS"}


REFUSALS = {
    "models": (torch.zeros(6, 30, dtype=F64), "models must have dtype float32, got float64"),
    "last_updates": (torch.zeros(1025, 30), "last_updates must hold 1 to 1024 clients, got 1025"),
    "last_models": (torch.zeros(4, 31), "last_models must have shape (n, d) = (4, 30), got (4, 31)"),
    "update": (torch.zeros(29), "update must have shape (d,) = (30,), got (29,)"),
    "trained_on": (torch.zeros(30, dtype=F64), "trained_on must have dtype float32 like models, got float64"),
    "client": (torch.zeros(1), "client must have dtype int64, got float32"),
    "seen": (torch.zeros(3, dtype=torch.bool), "seen must have shape (n,) = (4,), got (3,)"),
    "products": (torch.zeros(8, 8, dtype=F64)[::2, ::2], "products must be contiguous, got strides (16, 2)"),
    "kinship": (torch.zeros(4, 4), "kinship must have dtype float64, got float32"),
    "met": (torch.zeros(4), "met must have dtype int64, got float32"),
    "centre": (torch.zeros(3, dtype=F64), "centre must have shape (n,) = (4,), got (3,)"),
    "rounds": (torch.zeros(1, dtype=torch.int64), "rounds must have shape (), got (1,)"),
    "counts": (torch.zeros(4, dtype=torch.int64), "counts must have shape (5,) = (5,), got (4,)"),
    "next_row": (0, "next_row must differ from now_row, got 0"),
    "now_row": (6, "now_row must lie in 0..5, got 6"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_and_nothing_changes(name, monkeypatch):
    server = make("cpu", 4, 30)
    names = [argument.name for argument in STEP._schema.arguments]
    arguments = list(call(server, monkeypatch))
    before = server.state_dict()
    arguments[names.index("now_row")], arguments[names.index("next_row")] = 0, 1
    arguments[names.index(name)], words = REFUSALS[name]
    with pytest.raises(RuntimeError) as refusal:
        STEP(*arguments)
    assert str(refusal.value) == f"secureafl::kin_step_: {words}"
    after = server.state_dict()
    assert all(torch.equal(torch.as_tensor(after[key]), torch.as_tensor(value)) for key, value in before.items())


def test_a_round_makes_nothing_as_large_as_all_updates(device):
    """n x d is 36 MB here: beyond 32 MB an allocation is never served from memory that the process kept."""
    n, d = 64, 139_960
    server = make(device, n, d)
    update = torch.ones(d, device=device)
    server.submit(3, update, 0)
    before = start_peak(device)
    server.submit(3, update, 1)
    assert peak(device) - before < n * d * 4 / 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("n", "d"), [(50, 4096), (50, 4099), (1024, 256)])
def test_cpu_and_gpu_agree(n, d):
    cpu, gpu = make("cpu", n, d), make("cuda", n, d)
    drive((cpu, gpu), Arrivals(n, d), 150)
    agree(gpu, cpu)


# The GPU's kernels on a CPU


class Emulated:
    """`kin_step_` of a GPU or another round with so many tensors of state, warps in the order of a seed."""

    def __init__(self, seed, op="kin_step", tensors=14):
        self.run, self.seed, self.tensors = getattr(library("kin"), op), seed, tensors

    def __call__(self, update, client, trained_on, now, new, models, *rest):
        state, (lr, quantile, max_norm, *others) = rest[: self.tensors], rest[self.tensors :]
        flags, bounds = others[:6], others[6:]
        tensors = update.contiguous(), client, trained_on.contiguous(), models[now], models[new], *state
        whole = [len(state[0]), models.shape[1], *state[-3].shape, *flags]
        return call_round(self.run, tensors, whole, [lr, quantile, max_norm, *bounds], self.seed)


@pytest.mark.parametrize(("n", "d"), [(5, 33), (16, 64), (40, 300)])
def test_the_kernels_source_agrees_with_the_cpu(monkeypatch, n, d):
    plain, ours = make("cpu", n, d), emulate(monkeypatch, make("cpu", n, d), Emulated(1), kinship)
    drive((plain, ours), Arrivals(n, d), 100)
    agree(ours, plain)


def alike_and_colluding(servers, n, d, rounds):
    """All take turns; two thirds are alike, the others too: kin that only show without the centre."""
    random = torch.Generator().manual_seed(4)
    honest, other = torch.randn(2, d, generator=random)
    for t in range(rounds):
        client = t * 5 % n
        update = (honest if client % 3 else other) + 0.3 * torch.randn(d, generator=random)
        reasons = {server.submit(client, update, server.version).reason for server in servers}
        assert len(reasons) == 1


def test_no_thread_of_the_kernels_runs_ahead(monkeypatch):
    """Warps in any order give the same bits: no barrier is missing."""
    n, d = 36, 24
    plain, one, other = (make("cpu", n, d, filter=False) for _ in range(3))
    emulate(monkeypatch, one, Emulated(1), kinship), emulate(monkeypatch, other, Emulated(2), kinship)
    alike_and_colluding((plain, one, other), n, d, 6 * n)
    identical(one, other)
    agree(one, plain)
    assert left_out(one).tolist() == [k % 3 == 0 for k in range(n)]
