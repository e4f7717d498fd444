"""The state of a fused server: saved, loaded by either engine, resumed."""

import pytest
import torch
from fused_rounds import HISTORIES, Arrivals, close, composed, drive, make, pair
from oracles import relative_error
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext.engines import fused


def test_saved_by_one_engine_resumed_by_the_other(device, tmp_path):
    plain, ours = pair(device, 20, 80)
    arrivals = Arrivals(20, 80)
    drive((plain, ours), arrivals, 60)
    plain.save(tmp_path / "plain")
    ours.save(tmp_path / "ours")
    there = SecureAFL.load(tmp_path / "plain", device=device)
    back = composed(lambda: SecureAFL.load(tmp_path / "ours"))
    assert isinstance(there._engine, fused.Fused) and not isinstance(back._engine, fused.Fused)
    drive((plain, ours, there, back), arrivals, 20)
    for server in (ours, there, back):
        close(server.state_dict(), plain.state_dict(), 2e-2)


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_a_state_without_products_takes_them_from_the_history(device, history):
    """Slots start anew then, and whatever belongs to a slot must move with it."""
    server, fresh = (make(device, 12, 80, history_dtype=history) for _ in range(2))
    drive((server,), Arrivals(12, 80), 90)
    state = server.state_dict()
    assert state["oldest"].any()
    fresh.load_state_dict({name: value for name, value in state.items() if name not in ("gram", "along", "weights")})
    assert not fresh.state_dict()["oldest"].any()
    client, update, version = Arrivals(12, 80, seed=1).next(server)
    for each in (server, fresh):
        each.submit(client, update.to(device), version)
    assert relative_error(fresh.model.cpu(), server.model.cpu()) < 1e-5


@pytest.mark.parametrize("settings", [*({"history_dtype": history} for history in HISTORIES), {"memory": 0}], ids=str)
def test_saved_killed_and_resumed_is_bit_identical(device, tmp_path, settings):
    whole, half = (make(device, 20, 80, **settings) for _ in range(2))
    arrivals = Arrivals(20, 80)
    drive((whole, half), arrivals, 70)
    half.save(tmp_path / "half")
    resumed = SecureAFL.load(tmp_path / "half", device=device)
    drive((whole, resumed), arrivals, 50)
    identical(resumed, whole)


@pytest.mark.parametrize("d", [1, 2, 4, 64, 100])
def test_a_state_is_a_copy(device, d):
    """d: a single tile, on either device, lies in memory as its rows do."""
    server = make(device, 9, d)
    drive((server,), Arrivals(9, d), 20)
    state = server.state_dict()
    before = {name: torch.as_tensor(value).clone() for name, value in state.items()}
    drive((server,), Arrivals(9, d, seed=1), 5)
    assert all(torch.equal(torch.as_tensor(state[name]), value) for name, value in before.items())
