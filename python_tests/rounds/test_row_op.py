"""The op row_step_: a round of a rule that weighs rows as one op, beside composed rounds in float64 and on an emulated
GPU."""

import pytest
import torch
from emulated import JUDGED, call_round, emulate, library
from kin_rounds import Arrivals, agree, arguments_of_a_round, drive, refuses
from row_rounds import ROBUST
from states import identical, same_on_any_threads, stays_finite

from secureafl_ext import SecureAFL
from secureafl_ext.engines import row_rules
from secureafl_ext.engines.composed import Composed

F64 = torch.float64
INF, NAN = float("inf"), float("nan")
SETTINGS = [
    {},
    {"store": "all", "on_reject": "step", "quantile": 0.5},
    {"receive": False},
    {"filter": False, "max_norm": 0.7},
    {"remove": 0.4, "radius": 0.8, "iterations": 3},
    {"remove": 0.0, "expiry": None, "probation": 0, "quorum": 0.6},
    {"factors": "pooled", "window": None},
]


def make(device, n, d, rule, **settings):
    settings = {"memory": 0, "lr": 0.1, "max_staleness": 4, **settings}
    server = SecureAFL(torch.zeros(d, device=device), n, rule=rule, **settings)
    assert type(server._engine) is row_rules.FusedRowRules and server.capturable
    return server


def oracle(n, d, rule, **settings):
    settings = {"memory": 0, "lr": 0.1, "max_staleness": 4, "history_dtype": F64, **settings}
    server = SecureAFL(torch.zeros(d, dtype=F64), n, rule=rule, **settings)
    assert type(server._engine) is Composed
    return server


class Emulated:
    """`row_step_` of a GPU, warps in the order of a seed."""

    def __init__(self, seed):
        self.run, self.seed = library("kin").row_step, seed

    def __call__(self, update, client, trained_on, now, new, models, *rest):
        state, (lr, quantile, max_norm, *others) = rest[:13], rest[13:]
        flags, (rule, *numbers) = others[:8], others[8:]
        tensors = update.contiguous(), client, trained_on.contiguous(), models[now], models[new], *state
        whole = [len(state[0]), models.shape[1], *state[-4].shape, *flags]
        real = [lr, quantile, max_norm, row_rules.RULES.index(rule), *numbers]
        return call_round(self.run, tensors, whole, real, self.seed, (*JUDGED, F64))


def same_centre(ours, theirs):
    mine, other = (server.state_dict()["centre"].cpu().double() for server in (ours, theirs))
    assert (mine - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rule", ROBUST)
def test_rounds_are_those_of_plain_ops_in_float64(device, rule, settings):
    ours, plain = make(device, 12, 75, rule, **settings), oracle(12, 75, rule, **settings)
    reasons = drive((plain, ours), Arrivals(12, 75), 90)
    assert len(set(reasons)) > 2
    agree(ours, plain)
    same_centre(ours, plain)
    assert torch.allclose(ours.weights().cpu(), plain.weights(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize(("n", "d"), [(1, 5), (2, 31), (3, 4), (33, 8), (70, 33)])
def test_any_number_of_clients(device, rule, n, d):
    ours, plain = make(device, n, d, rule, probation=1), oracle(n, d, rule, probation=1)
    drive((plain, ours), Arrivals(n, d), 60)
    agree(ours, plain)
    same_centre(ours, plain)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize(("n", "d", "rounds"), [(5, 33, 60), (40, 64, 30)])  # 60: all the strange uploads
def test_the_kernels_source_agrees_with_the_cpu(monkeypatch, rule, n, d, rounds):
    plain, ours = make("cpu", n, d, rule), emulate(monkeypatch, make("cpu", n, d, rule), Emulated(1), row_rules)
    drive((plain, ours), Arrivals(n, d), rounds)
    agree(ours, plain)
    same_centre(ours, plain)


@pytest.mark.parametrize("rule", ROBUST)
def test_no_thread_of_the_kernels_runs_ahead(monkeypatch, rule):
    """Warps in any order give the same bits: no barrier is missing."""
    one, other = (emulate(monkeypatch, make("cpu", 36, 24, rule), Emulated(seed), row_rules) for seed in (1, 2))
    drive((one, other), Arrivals(36, 24), 25)
    identical(one, other)


@pytest.mark.parametrize("rule", ROBUST)
def test_equal_updates_give_that_update(device, rule):
    server = make(device, 5, 6, rule, filter=False, radius=100.0, iterations=60, expiry=None, max_norm=INF)
    update = torch.arange(1.0, 7.0, device=device)
    for t in range(10):
        server.submit(t % 5, update, server.version)
    assert torch.allclose(server.model, -0.1 * 10 * update, rtol=1e-5)


def test_of_equally_good_rows_krum_takes_the_first(device):
    server = make(device, 4, 2, "krum", filter=False, remove=0.0, expiry=None)
    for client, update in enumerate(([0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0])):  # the corners of a square
        receipt = server.submit(client, torch.tensor(update, device=device), server.version)
    assert server.weights().tolist() == [1, 0, 0, 0] and float(receipt.weight) == 0


def test_huge_and_tiny_rows_leave_the_model_finite(device):
    for rule in ROBUST:
        stays_finite(make(device, 3, 5, rule, lr=1e30, filter=False, max_norm=INF))


@pytest.mark.parametrize("rule", ROBUST)
def test_threads_do_not_change_a_bit(rule):
    one, two = (make("cpu", 20, 9000, rule) for _ in range(2))
    same_on_any_threads(one, two, Arrivals(20, 9000), 30)


def test_schema_tells_what_is_written_to(device, monkeypatch):
    server = make(device, 20, 300, "centered_clip")
    drive((server,), Arrivals(20, 300), 40)
    arguments = arguments_of_a_round(server, row_rules, monkeypatch)
    checks = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(row_rules.step, arguments, test_utils=checks).values()) == {"SUCCESS"}


REFUSALS = {
    "models": (torch.zeros(6, 30, dtype=F64), "models must have dtype float32, got float64"),
    "last_updates": (torch.zeros(1025, 30), "last_updates must hold 1 to 1024 clients, got 1025"),
    "products": (torch.zeros(4, 4), "products must have dtype float64, got float32"),
    "centre": (torch.zeros(29), "centre must have shape (d,) = (30,), got (29,)"),
    "rule": ("mean", "rule must be krum, spectral, geometric_median or centered_clip, got 'mean'"),
    "remove": (1.0, "remove must be 0 or more and below 1, got 1"),
    "radius": (NAN, "radius must be a number, got nan"),
    "iterations": (0, f"iterations must lie in 1 to {2**31 - 1}, got 0"),
    "quorum": (5, "quorum must lie in 0 to 4, got 5"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_and_nothing_changes(name, monkeypatch):
    refuses(make("cpu", 4, 30, "centered_clip"), row_rules, monkeypatch, name, *REFUSALS[name])


@pytest.mark.parametrize(
    "settings", [{"buckets": 2}, {"memory": 1}, {"estimate": False}, {"history_dtype": F64}], ids=str
)
def test_the_rest_is_composed(settings):
    server = SecureAFL(torch.zeros(3), 4, rule="krum", **{"memory": 0, **settings})
    assert type(server._engine) is Composed
