"""The op step_ itself: what it refuses, what it writes to, repeats and threads, and how much memory it takes."""

import pytest
import torch
from fused_rounds import HISTORIES, Arrivals, drive, make
from peaks import peak, start_peak
from states import identical, same_on_any_threads

from secureafl_ext import SecureAFL
from secureafl_ext.engines import fused

STEP = torch.ops.secureafl.step_.default


def test_schema_tells_what_is_written_to(device, monkeypatch):
    server = make(device, 20, 300)
    drive((server,), Arrivals(20, 300), 40)
    calls = []
    monkeypatch.setattr(fused, "step", lambda *arguments: calls.append(arguments) or STEP(*arguments))
    server.submit(3, torch.ones(300, device=device), server.version)
    checks = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(STEP, calls[0], test_utils=checks).values()) == {"SUCCESS"}


def test_state_that_does_not_fit_is_refused(device):
    server = make(device, 4, 30)
    engine, update = server._engine, torch.ones(30, device=device)
    slots, last, scales, gram, *rest = engine._past
    engine._past = slots, last, scales, gram.T.contiguous().T, *rest
    with pytest.raises(RuntimeError, match=r"step_: gram must be contiguous, got strides \(1, 4\)"):
        server.submit(0, update, 0)
    engine._past = slots.double(), last, scales, gram, *rest
    with pytest.raises(RuntimeError, match="step_: slots must have dtype float32, got float64"):
        server.submit(0, update, 0)


def test_more_than_a_round_holds_is_refused():
    server = make("cpu", 4, 30)
    engine = server._engine
    engine._past = torch.zeros(1, 6, 4097, 64), *engine._past[1:]
    words = "step_: slots must hold 1 to 4096 clients and 0 to 16 pairs of each, got 4097 and 3"
    with pytest.raises(RuntimeError, match=words):
        server.submit(0, torch.ones(30), 0)


def test_a_client_that_there_is_not_is_refused_by_the_op():
    server = make("cpu", 4, 30)
    for client in (-1, 4):
        with pytest.raises(RuntimeError, match=rf"step_: client must lie in 0..3, got {client}"):
            server.enqueue(torch.tensor([client]), torch.ones(30), torch.zeros(30))
    with pytest.raises(
        RuntimeError, match="step_: trained_on must not overlap another argument, got memory of the next row of models"
    ):
        server.enqueue(torch.tensor([1]), torch.ones(30), server.models[1])
    assert server.version == 0 and not server.seen.any()


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_two_runs_are_bit_equal(device, history):
    for n in (30, 300):
        one, two = (make(device, n, 3000, history_dtype=history) for _ in range(2))
        drive((one, two), Arrivals(n, 3000), 30)
        identical(one, two)


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_the_number_of_threads_changes_nothing(history):
    """d: several chunks of tiles, and a last tile that is not full."""
    one, two = (make("cpu", 20, 20_011, history_dtype=history) for _ in range(2))
    same_on_any_threads(one, two, Arrivals(20, 20_011), 30)


@pytest.mark.parametrize(("history", "most"), [(torch.float32, 0.30e9), (torch.float16, 0.19e9)], ids=str)
def test_memory_at_the_papers_size(device, history, most):
    """n = 50, d = 139,960: all that a server holds."""
    server = SecureAFL(torch.zeros(139_960, device=device), 50, history_dtype=history)
    held = [*vars(server._engine).values(), server._models]
    assert sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor)) <= most


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_a_round_makes_nothing_as_large_as_all_updates(device, history):
    """n x d is 36 MB here: beyond 32 MB an allocation is never served from memory that the process kept."""
    n, d = 64, 139_960
    server = SecureAFL(torch.zeros(d, device=device), n, history_dtype=history)
    update = torch.ones(d, device=device)
    server.submit(3, update, 0)
    before = start_peak(device)
    server.submit(3, update, 1)
    assert peak(device) - before < n * d * 4 / 4
