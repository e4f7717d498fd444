"""Trials in states and checkpoints: kept bit for bit, those of earlier versions, and forged ones."""

import re

import pytest
import torch
from trial_oracle import TRIAL, D, N, founded

from secureafl_ext import SecureAFL


def test_a_checkpoint_keeps_trials(tmp_path):
    server = founded()
    server.forget(3)
    server.submit(3, torch.ones(D), server.version)
    server.leave(4)
    path = tmp_path / "s.safetensors"
    server.save(path)
    again = SecureAFL.load(path)
    assert torch.equal(again._trials.tensor(None), server._trials.tensor(None))
    random = torch.Generator().manual_seed(1)
    for i in range(200):
        update = torch.randn(D, generator=random)
        for each in (server, again):
            each.submit(i % N, update, each.version)
    assert torch.equal(again.model, server.model)
    assert torch.equal(again._trials.tensor(None), server._trials.tensor(None))


def test_a_state_without_trials_has_founders_alone():
    old = founded(trial=0).state_dict()
    assert "trials" not in old
    server = SecureAFL(torch.zeros(D), N, **TRIAL)
    server.load_state_dict(old)
    assert server._trials.shares() == [1.0] * N and not server.stats()["on_trial"]


@pytest.mark.parametrize(
    ("seen", "got"),
    [
        pytest.param(torch.ones(N, dtype=torch.int64), f"({N},) int64", id="int64"),
        pytest.param(torch.ones(N, device="meta", dtype=torch.bool), f"({N},) bool on meta", id="meta"),
        pytest.param(torch.ones(N, 1), f"({N}, 1) float32", id="two dimensions"),
        pytest.param([True] * N, "list", id="list"),
        pytest.param(torch.ones(N, dtype=torch.bool).to_sparse(), "bool sparse_coo", id="sparse"),
    ],
)
def test_an_old_state_with_a_wrong_tensor_is_refused_by_its_name(seen, got):
    old = founded(trial=0).state_dict()
    server = SecureAFL(torch.zeros(D), N, **TRIAL)
    with pytest.raises((ValueError, TypeError), match=f"seen must be .*got .*{re.escape(got)}"):
        server.load_state_dict({**old, "seen": seen})
    assert not server.seen.any()


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        ((0, 0), 10**6, "trials must end at the clock's epoch"),
        ((0, 2), 10**6, "trials must end at the clock's epoch"),
        ((3, 0), 10**6, "trials must end at the clock's epoch"),
        ((3, 3), 21, "trials must last 0 to 20 epochs, got 21"),
        ((3, 3), -1, "trials must last 0 to 20 epochs"),
        ((0, 1), -1, "trials must last 0 to 20 epochs"),
        ((3, 2), -1, "trials must last 0 to 20 epochs"),
        ((3, 0), -3, "trials must be -2 or more"),
        ((0, 3), -1, "the usual progress of trials must lie in 0 to"),
        ((0, 3), 2**20 + 1, "the usual progress of trials must lie in 0 to"),
    ],
)
def test_a_forged_trial_is_refused(at, value, words):
    server = founded()
    state, before = server.state_dict(), server._trials.tensor(None)
    state["trials"][at] = value
    with pytest.raises(ValueError, match=words):
        server.load_state_dict(state)
    assert torch.equal(server._trials.tensor(None), before)
