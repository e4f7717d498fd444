"""The op kin_step_ itself: what it refuses, what it writes to, repeats and threads, and how much memory it takes."""

import pytest
import torch
from kin_rounds import Arrivals, arguments_of_a_round, drive, make, refuses
from peaks import peak, start_peak
from states import identical, same_on_any_threads, stays_finite

from secureafl_ext.engines import kinship

STEP = torch.ops.secureafl.kin_step_.default
F64 = torch.float64
INF = float("inf")


def test_schema_tells_what_is_written_to(device, monkeypatch):
    server = make(device, 20, 300)
    drive((server,), Arrivals(20, 300), 60)
    arguments = arguments_of_a_round(server, kinship, monkeypatch)
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
    refuses(make("cpu", 4, 30), kinship, monkeypatch, name, *REFUSALS[name])


def test_a_client_that_there_is_not_is_refused():
    server = make("cpu", 4, 30)
    for client in (4, -1):
        words = f"secureafl::kin_step_: client must lie in 0..3, got {client}"
        with pytest.raises(RuntimeError, match=words):
            server.enqueue(torch.tensor([client]), *torch.ones(2, 30))
    assert not server.seen.any() and server.version == 0


def test_a_coordinate_never_leaves_the_floats(device):
    stays_finite(make(device, 3, 5, lr=1e30, filter=False, max_norm=INF))


def test_two_runs_are_bit_equal(device):
    for n, d in ((30, 3001), (300, 1000)):
        one, two = (make(device, n, d) for _ in range(2))
        drive((one, two), Arrivals(n, d), 60)
        identical(one, two)


def test_the_number_of_threads_changes_nothing():
    """d: several chunks of tiles, and a last tile that is not full."""
    one, two = (make("cpu", 20, 20_011) for _ in range(2))
    same_on_any_threads(one, two, Arrivals(20, 20_011), 60)


def test_a_round_makes_nothing_as_large_as_all_updates(device):
    """n x d is 36 MB here: beyond 32 MB an allocation is never served from memory that the process kept."""
    n, d = 64, 139_960
    server = make(device, n, d)
    update = torch.ones(d, device=device)
    server.submit(3, update, 0)
    before = start_peak(device)
    server.submit(3, update, 1)
    assert peak(device) - before < n * d * 4 / 4
