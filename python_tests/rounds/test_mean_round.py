"""averages="steps" as one op against plain ops: same arrivals, verdicts, means and models; and the op itself."""

import pytest
import torch
from emulated import emulate
from kin_rounds import (
    Arrivals,
    EmulatedMeans,
    agree,
    arguments_of_a_round,
    drive,
    newest_only,
    refuses,
    resumed_crosswise,
    take_turns,
    with_dtypes,
)
from states import enqueued_like_submitted, identical, never_waits, same_on_any_threads
from support_oracle import shifts

from secureafl_ext import SecureAFL
from secureafl_ext.engines import fused_averages
from secureafl_ext.engines.fused_averages import FusedAverages
from secureafl_ext.rules.mean_steps import LEAST

STEP = torch.ops.secureafl.mean_step_.default
F32, F64 = torch.float32, torch.float64
SETTINGS = {"rule": "support", "memory": 0, "step": "received", "averages": "steps", "lr": 0.1, "max_staleness": 4}
VARIED = [
    {},
    {"filter": False, "quorum": 0.5},
    {"filter": False, "keep_last": True, "on_reject": "step"},
    {"quantile": 0.5, "max_norm": 0.5},
    {"store": "all", "on_reject": "step"},
    {"factors": "pooled", "window": 7},
    {"expiry": 4, "probation": 2},
    {"expiry": None, "probation": 0, "lr": -0.1},
]


def make(device, n, d, **settings):
    server = SecureAFL(torch.zeros(d, device=device), n, **{**SETTINGS, **settings})
    assert isinstance(server._engine, FusedAverages)
    return server


def composed(create):
    """The server that `create` makes, its rounds of plain ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_averages, "unsupported", lambda *_: "a test")
        server = create()
    assert not isinstance(server._engine, FusedAverages)
    return server


def oracle(n, d, dtype=F64, **settings):
    settings = {**SETTINGS, "history_dtype": dtype, **settings}
    return composed(lambda: SecureAFL(torch.zeros(d, dtype=dtype), n, **settings))


def shift_of(server):
    return server.state_dict()["shift"].cpu()


@pytest.mark.parametrize(("settings", "dtype"), with_dtypes(VARIED), ids=str)
def test_every_setting_over_hundreds_of_rounds(device, settings, dtype):
    plain, ours = oracle(16, 60, dtype, **settings), make(device, 16, 60, **settings)
    drive((plain, ours), Arrivals(16, 60), 200)
    agree(ours, plain)
    assert shift_of(ours).abs().max() > 0.01


@pytest.mark.parametrize(("n", "d"), [(1, 3), (9, 60), (70, 129)])
def test_means_in_two_bytes_are_rounded_as_plain_ops_round_them(device, n, d):
    """Now and then to the neighbour, where the sums before differ in their last bits."""
    settings = {"filter": False, "quorum": 0.0, "history_dtype": torch.bfloat16}
    plain = composed(lambda: SecureAFL(torch.zeros(d), n, **{**SETTINGS, **settings}))
    ours = make(device, n, d, **settings)
    arrivals = Arrivals(n, d)
    drive((plain, ours), arrivals, 2 * n - 1)  # before the first refresh no weight depends on a mean
    mine, other = (server.state_dict()["mean_updates"].cpu().float() for server in (ours, plain))
    assert other.any() and ((mine - other).abs() <= 2**-7 * other.abs()).all()
    assert (mine == other).float().mean() > 0.99
    drive((plain, ours), arrivals, 4 * n, bound=1e-3)
    assert torch.allclose(shift_of(ours), shift_of(plain), rtol=0, atol=1e-3 / n)


def test_without_a_learning_rate_nothing_counts_as_a_step(device):
    """Each upload enters the mean with the least share."""
    plain, ours = oracle(4, 30, lr=0.0, filter=False), make(device, 4, 30, lr=0.0, filter=False)
    drive((plain, ours), Arrivals(4, 30, strange=False), 30)
    agree(ours, plain)
    assert torch.allclose(ours.state_dict()["total"].cpu(), LEAST * ours.state_dict()["uploads"][:, 0].cpu().double())


@pytest.mark.parametrize(("n", "d"), [(1, 40), (2, 40), (5, 0), (5, 1), (32, 33), (64, 40), (65, 129), (130, 70)])
def test_any_shape(device, n, d):
    """n = 64 fills a tile of products, n = 65 needs three, n = 130 six."""
    plain, ours = oracle(n, d), make(device, n, d)
    drive((plain, ours), Arrivals(n, d, strange=d > 1), max(80, 4 * n))
    agree(ours, plain)
    assert n < 8 or shift_of(ours).any()


def test_everybody_talks(device):
    """All take turns. The last refresh is that of the oracle in NumPy, from the means as they are."""
    n, d = 70, 2500
    plain, ours = oracle(n, d, filter=False), make(device, n, d, filter=False)
    take_turns(n, d, plain, ours)
    agree(ours, plain)
    assert ours.present.all() and int(ours.state_dict()["rounds"]) % (2 * n) == 0
    expected = torch.from_numpy(shifts(ours.similarity.cpu().numpy()))
    assert torch.allclose(shift_of(ours), expected, rtol=0, atol=1e-9) and expected.abs().max() > 0.3 / n


def test_forgotten_and_left_clients(device):
    servers = oracle(16, 60), make(device, 16, 60)
    arrivals = Arrivals(16, 60)
    for i, client in enumerate((*arrivals.active[:3], arrivals.active[-1])):
        drive(servers, arrivals, 60)
        for server in servers:
            server.leave(client) if i % 2 else server.forget(client)
    agree(servers[1], servers[0])
    drive(servers, arrivals, 60)
    agree(servers[1], servers[0])


def test_saved_by_one_engine_resumed_by_the_other(device, tmp_path):
    resumed_crosswise(oracle(16, 60, F32), make(device, 16, 60), composed, tmp_path, device)


def test_enqueued_rounds_are_submitted_ones(device):
    """On a GPU they are replayed from a captured graph, the refresh too."""
    one, twin = (make(device, 9, 40, filter=False) for _ in range(2))
    enqueued_like_submitted(one, twin, newest_only(Arrivals(9, 40, strange=False), twin, 120))
    assert shift_of(one).any()


def test_two_runs_are_bit_equal_on_any_threads():
    one, two = (make("cpu", 20, 20_011) for _ in range(2))
    same_on_any_threads(one, two, Arrivals(20, 20_011), 60)


def test_a_round_never_waits_for_the_device():
    engine = (server := make("cpu", 5, 30))._engine
    never_waits(server, engine, engine.history, engine.support)


def test_schema_tells_what_is_written_to(device, monkeypatch):
    server = make(device, 10, 300)
    drive((server,), Arrivals(10, 300, strange=False), 60)
    arguments = arguments_of_a_round(server, fused_averages, monkeypatch)
    names = [argument.name for argument in STEP._schema.arguments]
    arguments[names.index("rounds")].fill_(2 * 10 - 1)  # a refresh writes to basis and shift
    checks = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(STEP, arguments, test_utils=checks).values()) == {"SUCCESS"}


REFUSALS = {
    "means": (torch.zeros(4, 29), "means must have shape (n, d) = (4, 30), got (4, 29)"),
    "total": (torch.zeros(4), "total must have dtype float64, got float32"),
    "noise": (torch.zeros(3, dtype=F64), "noise must have shape (n,) = (4,), got (3,)"),
    "norms": (torch.full((4,), -1.0, dtype=F64), "norms must be 0 or more, got -1"),
    "last_updates": (torch.zeros(1025, 30), "last_updates must hold 1 to 1024 clients, got 1025"),
    "last_models": (torch.zeros(0, 30), "last_models must have shape (n, d) = (4, 30), got (0, 30)"),
}
# Of a server that keeps no last updates.
REFUSALS_WITHOUT = {
    "seen": (torch.zeros(1025, dtype=torch.bool), "seen must hold 1 to 1024 clients, got 1025"),
    "last_models": (torch.zeros(4, 30), "last_models must have shape (n, d) = (0, 30), got (4, 30)"),
    "filter": (True, "filter must be false without last_updates, got true"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_and_nothing_changes(name, monkeypatch):
    refuses(make("cpu", 4, 30), fused_averages, monkeypatch, name, *REFUSALS[name])


@pytest.mark.parametrize("name", REFUSALS_WITHOUT)
def test_without_last_updates_too(name, monkeypatch):
    refuses(make("cpu", 4, 30, filter=False), fused_averages, monkeypatch, name, *REFUSALS_WITHOUT[name])


KEPT = {"last": {"keep_last": True}, "means": {}, "two_bytes": {"history_dtype": torch.bfloat16}}


@pytest.mark.parametrize(
    ("n", "d", "kept"),
    [(1, 8, "last"), (5, 33, "last"), (16, 64, "last"), (5, 33, "means"), (66, 40, "two_bytes")],
)
def test_the_kernels_source_agrees_with_the_cpu_in_any_order_of_warps(monkeypatch, n, d, kept):
    """The same bits for two orders: no barrier is missing."""
    plain, one, other = (make("cpu", n, d, filter=False, **KEPT[kept]) for _ in range(3))
    emulate(monkeypatch, one, EmulatedMeans(1), fused_averages)
    emulate(monkeypatch, other, EmulatedMeans(2), fused_averages)
    drive((plain, one, other), Arrivals(n, d, strange=False), max(40, 3 * n))
    identical(one, other)
    agree(one, plain)
    assert n < 5 or shift_of(one).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("n", "d"), [(1, 8), (20, 4096), (50, 4099), (100, 256), (300, 1000)])
def test_cpu_and_gpu_agree(n, d):
    cpu, gpu = make("cpu", n, d), make("cuda", n, d)
    drive((cpu, gpu), Arrivals(n, d), max(150, 4 * n))
    agree(gpu, cpu)
    assert n == 1 or shift_of(gpu).any()
