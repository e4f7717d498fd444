"""The op support_step_ itself: what it refuses, what it writes to, threads, and the GPU's kernels on a CPU."""

import pytest
import torch
from emulated import emulate
from kin_rounds import Arrivals, Emulated, agree, arguments_of_a_round, drive, refuses
from states import identical, never_waits, same_on_any_threads
from test_support_round import make, shift_of, with_shift

from secureafl_ext.engines import support

STEP = torch.ops.secureafl.support_step_.default
F64 = torch.float64


def test_two_runs_are_bit_equal_on_any_threads():
    one, two = (make("cpu", 20, 20_011) for _ in range(2))
    same_on_any_threads(one, two, Arrivals(20, 20_011), 60)


def test_a_round_never_waits_for_the_device():
    engine = (server := make("cpu", 5, 30))._engine
    never_waits(server, engine, engine.history, engine.rows, engine.rows.similarity)


def test_schema_tells_what_is_written_to(device, monkeypatch):
    server = make(device, 10, 300)
    drive((server,), Arrivals(10, 300, strange=False), 60)
    with_shift(server, 0.01)  # the op writes to basis and shift too
    arguments = arguments_of_a_round(server, support, monkeypatch)
    arguments[12 + 2].fill_(2 * 10 - 1)
    checks = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(STEP, arguments, test_utils=checks).values()) == {"SUCCESS"}


REFUSALS = {
    "similarity": (torch.zeros(4, 4), "similarity must have dtype float64, got float32"),
    "met": (torch.zeros(4), "met must have dtype int64, got float32"),
    "basis": (torch.zeros(3, 4, 5, dtype=F64), "basis must have shape (3, n, n) = (3, 4, 4), got (3, 4, 5)"),
    "shift": (torch.zeros(3, dtype=F64), "shift must have shape (n,) = (4,), got (3,)"),
    "rounds": (torch.zeros(1, dtype=torch.int64), "rounds must have shape (), got (1,)"),
    "last_updates": (torch.zeros(1025, 30), "last_updates must hold 1 to 1024 clients, got 1025"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_and_nothing_changes(name, monkeypatch):
    refuses(make("cpu", 4, 30), support, monkeypatch, name, *REFUSALS[name])


# The GPU's kernels on a CPU


def emulated(monkeypatch, server, seed):
    return emulate(monkeypatch, server, Emulated(seed, "support_step", tensors=16), support)


@pytest.mark.parametrize(("n", "d"), [(1, 8), (2, 5), (5, 33), (16, 64), (33, 24)])
def test_the_kernels_source_agrees_with_the_cpu_in_any_order_of_warps(monkeypatch, n, d):
    """The same bits for two orders: no barrier is missing."""
    plain, one, other = (make("cpu", n, d, filter=False) for _ in range(3))
    emulated(monkeypatch, one, 1), emulated(monkeypatch, other, 2)
    drive((plain, one, other), Arrivals(n, d, strange=False), max(40, 4 * n))
    identical(one, other)
    agree(one, plain)
    assert n < 5 or shift_of(one).any()
