"""The op sketch_step_: the same rounds as plain ops, on an emulated GPU too; what it refuses; repeats and threads."""

import pytest
import torch
from emulated import emulate
from kin_rounds import Arrivals, arguments_of_a_round, drive, refuses
from sketch_rounds import Emulated, agree, make
from states import identical, same_on_any_threads, stays_finite

from secureafl_ext import config
from secureafl_ext.engines import averaged

STEP = torch.ops.secureafl.sketch_step_.default
F64 = torch.float64
INF = float("inf")
SETTINGS = {
    "recommended": {},
    "no_filter": {"filter": False, "quorum": 0.0},
    "no_filter_last": {"filter": False, "keep_last": True, "quorum": 0.0},
    "probation": {"probation": 3, "expiry": 1, "quorum": 0.0},
    "never_expires": {"expiry": None, "probation": 0},
    "quorum": {"quorum": 0.7},
    "paper": {"store": "all", "on_reject": "step", "factors": "pooled", "quorum": 0.0},
    "uploads": {"averages": "uploads"},
    "uploads_paper": {"averages": "uploads", "store": "all", "on_reject": "step", "factors": "pooled", "quorum": 0.0},
    "short_clip": {"max_norm": 0.5, "window": 2, "quantile": 0.5, "quorum": 0.0},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_op_does_what_plain_ops_do(settings, device):
    """First contacts, steep, huge, tiny and zero updates, garbage, old versions; a refresh, a client that leaves."""
    n, d, settings = 14, 301, SETTINGS[settings]
    ours, theirs = make(device, n, d, **settings), make(device, n, d, fused=False, **settings)
    wide = make("cpu", n, d, fused=False, history_dtype=F64, **settings)
    servers, arrivals, reasons = (ours, theirs, wide), Arrivals(n, d), []
    for _ in range(3):
        reasons += drive(servers, arrivals, 50, bound=1e-3)
        for server in servers:
            server.forget(arrivals.active[1])
            server.leave(arrivals.active[2])
    agree(ours, theirs)
    agree(ours, wide)
    assert {"accepted: first contact", "rejected: not finite"} < {*reasons} and ours.model.any()
    assert ours.state_dict()["shift"].any()  # a refresh was among the rounds


@pytest.mark.parametrize(("n", "d"), [(1, 64), (2, 65), (3, 1000), (2500, 70)])
def test_any_number_of_clients_and_coordinates(n, d, device):
    ours, theirs = make(device, n, d), make(device, n, d, fused=False)
    drive((ours, theirs), Arrivals(n, d, strange=False), 60)
    agree(ours, theirs)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("others", [0, 1, 8, 9])
def test_the_median_norm_is_that_of_all_who_count(others, alike, device):
    """Norms that differ in the last bits only, or by orders of magnitude. The median shows in the client's mean."""
    n, d = 12, 64
    server = make(device, n, d, filter=False, quorum=0.0, expiry=None, probation=0)
    engine, random = server._engine, torch.Generator().manual_seed(1)
    order = torch.randperm(n, generator=random).to(F64)
    norms = 30.0 + 1e-14 * order if alike else 10.0 ** (order - 5)
    engine.support.norms[:-1] = norms[:-1].to(device)
    engine.seen[:others] = True
    update = torch.randn(d, generator=random).to(server.model)
    server.submit(n - 1, update, 0)
    norm = update.cpu().double().norm()
    median = torch.cat([norms[:others], norm[None]]).quantile(0.5)
    sketch = engine.sketch.of(update).cpu().double()
    wanted = sketch / torch.maximum(norm, median)
    torch.testing.assert_close(engine.support.means[n - 1].cpu().double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("n", "d", "k"), [(5, 33, 64), (40, 300, 64), (1500, 700, 70)])
@pytest.mark.parametrize("averages", ["steps", "uploads"])
def test_the_kernels_source_agrees_with_the_cpu(monkeypatch, n, d, k, averages):
    plain, ours = (make("cpu", n, d, sketch=k, averages=averages, quorum=0.0, expiry=2) for _ in range(2))
    emulate(monkeypatch, ours, Emulated(1), averaged)
    drive((plain, ours), Arrivals(n, d), 12)
    agree(ours, plain)


@pytest.mark.parametrize("kernels", [False, True], ids=["op", "kernels"])
def test_factors_that_are_counted(kernels, device, monkeypatch):
    """A pooled Q that is full counts later factors by key."""
    monkeypatch.setattr(config, "EXACT", 4)
    n, d, pooled = 5, 301, SETTINGS["paper"]
    ours, theirs = make(device, n, d, **pooled), make(device, n, d, fused=False, **pooled)
    if kernels:
        if device != "cpu":
            pytest.skip("on a GPU they run themselves")
        emulate(monkeypatch, ours, Emulated(3), averaged)
    reasons = drive((ours, theirs), Arrivals(n, d), 30 if kernels else 90, bound=1e-3)  # kernels on a CPU are slow
    agree(ours, theirs)
    counts = [server.state_dict()["factor_counts"].cpu() for server in (ours, theirs)]
    assert (
        torch.equal(*counts)
        and counts[0].sum() > 10
        and "rejected: factor above the quantile of all factors" in reasons
    )


def test_no_thread_of_the_kernels_runs_ahead(monkeypatch):
    """Warps in any order give the same bits: no barrier is missing."""
    n, d = 30, 200
    one, other = (make("cpu", n, d, quorum=0.0, factors="pooled") for _ in range(2))
    emulate(monkeypatch, one, Emulated(1), averaged), emulate(monkeypatch, other, Emulated(2), averaged)
    drive((one, other), Arrivals(n, d), 8)
    identical(one, other)


def test_schema_tells_what_is_written_to(device, monkeypatch):
    server = make(device, 20, 300)
    drive((server,), Arrivals(20, 300), 60)
    arguments = arguments_of_a_round(server, averaged, monkeypatch)
    checks = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(STEP, arguments, test_utils=checks).values()) == {"SUCCESS"}


LONG = {"dtype": torch.int64}
REFUSALS = {
    "models": (torch.zeros(6, 100, dtype=F64), "models must have dtype float32, got float64"),
    "update": (torch.zeros(99), "update must have shape (d,) = (100,), got (99,)"),
    "trained_on": (torch.zeros(100, dtype=F64), "trained_on must have dtype float32 like models, got float64"),
    "client": (torch.tensor([4]), "client must lie in 0..3, got 4"),
    "places": (torch.full((128,), 100, dtype=torch.int32), "places must lie in -100 to 99, got 100"),
    "update_sketches": (torch.zeros(3, 64), "update_sketches must have shape (n, k) = (4, 64), got (3, 64)"),
    "model_sketches": (torch.zeros(4, 63), "model_sketches must have shape (n, k) = (4, 64), got (4, 63)"),
    "seen": (torch.zeros(3, dtype=torch.bool), "seen must have shape (n,) = (4,), got (3,)"),
    "means": (torch.zeros(8, 128)[::2, ::2], "means must be contiguous, got strides (256, 2)"),
    "squares": (torch.zeros(4), "squares must have dtype float64, got float32"),
    "met": (torch.full((4,), -1), "met must lie in 0 to 9223372036854775806, got -1"),
    "total": (torch.full((4,), 16.0, dtype=F64), "total must lie in 0 to span, got 16"),
    "noise": (torch.zeros(0, dtype=F64), "noise must have shape (n,), or (0,) without total = (4,), got (0,)"),
    "norms": (torch.full((4,), torch.nan, dtype=F64), "norms must be 0 or more, got nan"),
    "shift": (torch.zeros(3, dtype=F64), "shift must have shape (n,) = (4,), got (3,)"),
    "clock": (torch.tensor([0, -1, 0]), "clock must lie in 0 to 9223372036854775806, got -1"),
    "last_epoch": (torch.zeros(3, **LONG), "last_epoch must have shape (n,) = (4,), got (3,)"),
    "uploads": (torch.zeros(4, 2, **LONG), "uploads must have shape (n, 3) = (4, 3), got (4, 2)"),
    "recorded": (torch.full((4,), -1), "recorded must lie in 0 to 9223372036854775806, got -1"),
    "counts": (torch.zeros(4, **LONG), "counts must have shape (5,) = (5,), got (4,)"),
    "lr": (INF, "lr must be finite, got inf"),
    "quantile": (1.5, "quantile must lie in 0 to 1, got 1.5"),
    "max_norm": (0.0, "max_norm must be positive, got 0"),
    "expiry": (0, "expiry must lie in 1 to 9223372036854775807, got 0"),
    "probation": (-1, "probation must lie in 0 to 9223372036854775807, got -1"),
    "quorum": (5, "quorum must lie in 0 to 4, got 5"),
    "span": (0, "span must lie in 1 to 2147483647, got 0"),
    "next_row": (0, "next_row must differ from now_row, got 0"),
    "now_row": (6, "now_row must lie in 0..5, got 6"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_and_nothing_changes(name, monkeypatch):
    refuses(
        make("cpu", 4, 100, averages="uploads" if name in ("squares", "met") else "steps"),
        averaged,
        monkeypatch,
        name,
        *REFUSALS[name],
    )


def test_a_filter_needs_sketches_of_last_updates(monkeypatch):
    words = "filter must be false without update_sketches, got true"
    refuses(make("cpu", 4, 100, filter=False), averaged, monkeypatch, "filter", True, words)


SHARED = {
    ("update_sketches", "model_sketches"), ("update_sketches", "means"), ("squares", "norms"), ("norms", "shift"),
    ("met", "recorded"), ("met", "last_epoch"),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), sorted(SHARED))
def test_state_that_shares_memory_is_refused(one, other, monkeypatch):
    names = [argument.name for argument in STEP._schema.arguments]
    server = make("cpu", 4, 100, averages="uploads" if one in ("squares", "met") else "steps")
    arguments = list(arguments_of_a_round(server, averaged, monkeypatch))
    arguments[names.index(other)] = arguments[names.index(one)].zero_()
    with pytest.raises(RuntimeError, match=f"{other} must not overlap another argument, got memory of {one}"):
        STEP(*arguments)


def test_a_coordinate_never_leaves_the_floats(device):
    stays_finite(make(device, 3, 70, lr=1e30, filter=False, max_norm=INF, quorum=0.0))


def test_two_runs_are_bit_equal(device):
    for n, d in ((30, 3001), (3000, 1000)):
        one, two = (make(device, n, d) for _ in range(2))
        drive((one, two), Arrivals(n, d), 60)
        identical(one, two)


def test_the_number_of_threads_changes_nothing():
    """d: several chunks of rows, and a last row that is not full."""
    one, two = (make("cpu", 20, 20_011) for _ in range(2))
    same_on_any_threads(one, two, Arrivals(20, 20_011), 60)
