"""What row-wise rules make of huge, non-finite and missing updates, and which settings are refused."""

import pytest
import torch
from row_rounds import ROBUST, SIZE, make

from secureafl_ext import SecureAFL

F64 = torch.float64


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
    ({"iterations": 0}, "iterations must be a whole number 1 to 1000, got 0"),
    ({"rule": "krum", "history_dtype": torch.float16}, "history_dtype=float16 does not support rule='krum'"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError) as refusal:
        SecureAFL(torch.zeros(3), 3, **settings)
    assert str(refusal.value) == f"SecureAFL: {words}"
