"""Who uploads often gains nothing: its steps shrink, and those who upload rarely stay. Pace: share of a full step."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from engines import ENGINES, make
from presence_oracle import PAPER, Clock

from secureafl_ext import SecureAFL


@pytest.mark.parametrize("share", [0.33, 0.94])
@pytest.mark.parametrize("from_the_start", [False, True])
@pytest.mark.parametrize("expiry", [8, 4])
def test_a_flood_expires_nobody(share, from_the_start, expiry):
    """20 % of the clients make most of the uploads. The others stay, and are always more than they are."""
    n, bad = 50, 10
    clock, random = Clock(n, expiry), np.random.default_rng(0)
    for _ in range(0 if from_the_start else 10 * n):
        clock.stored(int(random.integers(n)))
    kept, rounds = [], 6000
    for i in range(rounds):
        flood = random.random() < share
        clock.stored(int(random.integers(bad) if flood else random.integers(bad, n)))
        if i % 10 == 0:
            kept.append(sum(k >= bad for k in clock.present()))
            assert kept[-1] > bad or (clock.uploads[bad:] > 0).sum() <= bad + 5
    late = kept[len(kept) // 2 :]
    assert np.mean(late) > 0.96 * (n - bad) and np.min(late) > 0.8 * (n - bad)


def begin_epoch(server, sent):
    """Everybody uploads in turn, until an epoch has just begun."""
    for i in range(9 * server.clients):
        server.submit(i % server.clients, sent, server.version)
        if i >= 6 * server.clients and not server.state_dict()["clock"][1]:
            return
    raise AssertionError("no epoch ended")


def steps_of(server, clients, sent):
    """How far each upload moves the model."""
    models = [server.model.clone()]
    for client in clients:
        server.submit(client, sent, server.version)
        models.append(server.model.clone())
    return [float((a - b).norm()) for a, b in pairwise(models)]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_steps_of_a_client_that_runs_ahead_are_smaller(engine, device):
    """Three are full, or two along received updates, then they shrink; none is zero. Those of others stay full."""
    server = make(engine, device, filter=False, store="accepted", receive=True)
    free = {"all": 3, "received": 2}[server.config.step]
    ones = torch.ones(7).to(server.model)
    begin_epoch(server, ones)
    epoch = server.state_dict()["clock"][0]
    steps = steps_of(server, [0] * 40, ones)
    assert server.state_dict()["clock"][0] == epoch
    assert steps[:free] == pytest.approx(steps[:1] * free, rel=1e-3) and steps[-1] > 0
    assert all(step <= steps[0] * (free / u) ** 4 + 1e-6 for u, step in enumerate(steps[free:], free + 1))
    assert steps_of(server, [1], ones) == pytest.approx([steps[0]], rel=1e-3)


def test_if_many_fall_silent_the_steps_of_the_others_stay_full(device):
    """No epoch ends for long, but they keep up with each other."""
    server = SecureAFL(torch.zeros(7, device=device), 10, lr=0.05, filter=False, rule="mean")
    ones = torch.ones(7, device=device)
    begin_epoch(server, ones)
    epoch = server.state_dict()["clock"][0]
    steps = steps_of(server, [i % 6 for i in range(90)], ones)
    assert server.state_dict()["clock"][0] == epoch
    assert steps == pytest.approx([steps[0]] * 90, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("share", "least", "most"), [(0.2, 0.93, 1.0), (0.75, 0.24, 0.3), (0.94, 0.055, 0.08)])
def test_the_steps_of_a_flood(share, least, most):
    """A fifth of 50 clients make this share of the uploads. Without a flood nearly all steps are full."""
    clock, random, paces = Clock(50, 4), np.random.default_rng(0), []
    for _ in range(5000):
        flood = random.random() < share
        paces.append(clock.stored(int(random.integers(10) if flood else random.integers(10, 50))))
    assert least < np.mean(paces[1000:]) < most


@pytest.mark.parametrize("step", ["all", "received"])
@pytest.mark.parametrize("share", [0.25, 0.33, 0.5, 0.75, 0.94])
def test_to_upload_often_gains_nothing(share, step):
    """A fifth of the clients make this share of the uploads, and less than a fifth of the steps, or little more."""
    clock, random, paces = Clock(50, 4, step=step), np.random.default_rng(1), np.zeros(2)
    for i in range(6000):
        flood = random.random() < share
        pace = clock.stored(int(random.integers(10) if flood else random.integers(10, 50)))
        paces[int(flood)] += pace * (i > 1000)
    assert paces[1] / paces.sum() < (0.25 if share < 0.3 else 0.2)
    assert paces[0] > 0.9 * (1 - share) * 5000


def test_without_expiry_all_steps_are_full_ones():
    """As in the paper."""
    server = SecureAFL(torch.zeros(3), 4, lr=0.1, filter=False, rule="mean", **PAPER)
    for i in range(100):
        before = server.model.clone()
        server.submit(0 if i > 4 else i % 4, torch.ones(3), server.version)
        assert torch.allclose(before - server.model, torch.full((3,), 0.1), atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("forged", [0, 1])
def test_forged_uploads_of_an_epoch_last_no_longer_than_it(engine, forged, device):
    """Client 0 uploads. If its own count is forged, its step is small; if that of another, no step is longer."""
    server = make(engine, device, filter=False, store="accepted", receive=True)
    ones = torch.ones(7).to(server.model)
    begin_epoch(server, ones)
    (full,) = steps_of(server, [0], ones)
    steps_of(server, [1], ones)  # both have uploaded in this epoch
    state = server.state_dict()
    state["uploads"][forged, 1] = 10**9
    server.load_state_dict(state)
    (step,) = steps_of(server, [0], ones)
    assert step < 1e-6 if forged == 0 else step <= full * (1 + 1e-3)
    begin_epoch(server, ones)
    assert steps_of(server, [0], ones) == pytest.approx([full], rel=1e-3)
