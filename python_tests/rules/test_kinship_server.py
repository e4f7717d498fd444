"""rule="kinship" in a server: saved and resumed, enqueued, without waiting, with huge updates, and what it refuses."""

import pytest
import torch
from kinship_fleet import drive, fleet, left_out, make, uploads
from states import enqueued_like_submitted, identical, never_waits

from secureafl_ext import SecureAFL

F64, F32 = torch.float64, torch.float32


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


def test_words_for_what_there_is_not():
    with pytest.raises(ValueError, match="buckets must be 1 with rule='kinship', got 2"):
        make(buckets=2)
    with pytest.raises(ValueError, match="state must have kin_centre, kinship, met, got none"):
        make().load_state_dict(make(rule="krum").state_dict())
    assert make(rule="krum").kinship is None and SecureAFL(torch.zeros(3), 2).kinship is None
