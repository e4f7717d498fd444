"""Trials: the steps of a newcomer grow from nothing to full (secureafl_ext/engines/trials.py)."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from trial_oracle import TRIAL, D, Definition, N, founded

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.engines.trials import FOUNDING, RETURN, Trials


@pytest.mark.parametrize("quorum", [0, 0.5])
def test_shares_are_those_of_the_definition(quorum):
    random = np.random.default_rng(0)
    server = SecureAFL(torch.zeros(3), N, **TRIAL, quorum=quorum)
    expected = Definition(20, max(1, server.config.quorum_of(N)))
    seen, usual = set(), set()
    for i in range(3000):
        # Some come late, and in the middle most are silent for a while.
        few = N if i > 900 else 9
        client = int(random.integers(3 if 1500 < i < 2000 else few))
        event = random.random()
        if event < 0.004 or 2200 < i < 2230:  # many come back under new ids
            server.forget(client), expected.forget(client)
        elif event < 0.01:
            server.leave(client), expected.leave(client)
        assert server._trials.share(client) == pytest.approx(expected.share(client), rel=1e-4), i
        seen.add(expected.share(client))
        server.submit(client, torch.ones(3), server.version)
        expected.submitted(client)
        usual.add(expected.usual)
    assert server._trials.epoch == expected.epoch > 80 and len(seen) > 10 and len(usual) > 1


def moved(server, client, update):
    """How far the model moves along this update, and the receipt's weight."""
    before = server.model.clone()
    receipt = server.submit(client, update, server.version)
    return float((before - server.model) @ update), float(receipt.weight)


def without_trials(server):
    twin = SecureAFL.from_config(server.model, N, replace(server.config, trial=0))
    twin.load_state_dict({name: value for name, value in server.state_dict().items() if name != "trials"})
    return twin


@pytest.mark.parametrize("settings", [{}, {"averages": "steps"}, {"averages": "steps", "sketch": 64}], ids=str)
def test_steps_of_a_newcomer_grow_to_full(settings, device):
    server, random = founded(device, **settings), torch.Generator().manual_seed(1)
    shares = []
    for _ in range(24):  # an epoch is 8 rounds or more, and the trial 20 of them
        update = torch.randn(D, generator=random).to(device)
        step, weight = moved(without_trials(server), N - 1, update)
        shares.append(server._trials.share(N - 1))
        assert server.stats()["on_trial"] == (len(shares) > 1 and shares[-1] < 1)
        assert moved(server, N - 1, update) == pytest.approx((shares[-1] * step, shares[-1] * weight), rel=1e-3)
        for client in range(N - 1):
            server.submit(client, torch.randn(D, generator=random).to(device), server.version)
    assert shares[0] == 0 and shares[-1] == 1 and all(a <= b for a, b in pairwise(shares)) and len({*shares}) > 10
    assert float(server.weights()[N - 1]) > 0


def test_founders_have_full_steps_and_uploads_count_as_before():
    """Until somebody comes late, leaves or is forgotten, a server with trials does what one without does."""
    servers = [SecureAFL(torch.zeros(D), N, **TRIAL | {"trial": trial}) for trial in (0, 20)]
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        client, update = int(torch.randint(N, (), generator=random)), torch.randn(D, generator=random)
        for server in servers:
            server.submit(client, update, server.version)
    assert torch.equal(*(server.model for server in servers)) and servers[0].model.any()
    assert not servers[1].stats()["on_trial"]


def test_the_mean_of_a_newcomer_is_as_full_as_any():
    """It is judged by whole updates though the model hardly moves along them: so it is found within its trial."""
    server = founded(averages="steps")
    for _ in range(6):
        server.submit(N - 1, torch.randn(D), server.version)
        for client in range(N - 1):
            server.submit(client, torch.randn(D), server.version)
    total = server.state_dict()["total"]
    assert float(total[N - 1]) > 0.5 * 3


def test_newcomers_alone_end_no_epoch():
    """A flood of fresh ids, each with one upload, neither shortens a trial nor lasts it out."""
    trials = Trials(1000, 20, 1)
    for _ in range(3 * FOUNDING):
        for client in range(20):
            trials.count_round(client)
    before = trials.epoch
    trials.count_round(999)
    for client in range(100, 300):
        trials.count_round(client)
    assert trials.epoch == before and trials.share(999) == 0 and trials.share(500) == 0 and trials.share(0) == 1


def test_a_flood_hardly_shortens_a_trial():
    """Ten of 50 clients make 94 % of the uploads. Without a flood a client uploads 1.1 times in an epoch."""
    trials, honest, random = Trials(50, 20, 1), 0, np.random.default_rng(0)
    for client in list(range(50)) * 3 * FOUNDING:
        trials.count_round(client)
    before, rounds = trials.epoch, 40_000
    for _ in range(rounds):
        client = int(random.integers(10)) if random.random() < 0.94 else 10 + int(random.integers(40))
        trials.count_round(client)
        honest += client >= 10
    assert 0.5 < honest / 40 / (trials.epoch - before) < 2


def test_who_comes_back_has_a_short_trial_and_who_is_forgotten_a_whole_one():
    server, update = founded(), torch.randn(D)
    server.leave(0)
    server.forget(1)
    assert moved(server, 0, update)[0] == 0 and moved(server, 1, update)[0] == 0
    shares = []
    for _ in range(RETURN // 2):
        for client in range(2, N - 1):
            server.submit(client, torch.randn(D), server.version)
        for client in (0, 1):
            server.submit(client, update, server.version)
        shares.append((server._trials.share(0), server._trials.share(1)))
    assert 0.3 < shares[-1][0] < 1 and shares[-1][1] < 0.6 * shares[-1][0]
    for client, needs in ((0, RETURN), (1, 20)):  # on trial: it begins again, as long as it was
        server.leave(client)
        server.submit(client, update, server.version)
        assert server._trials.needs[client] == needs and server._trials.share(client) <= 1 / needs


def test_when_most_come_back_under_new_ids_the_model_moves_on():
    """After a failure all nodes have new ids. In the first epoch they move nothing; then all move the model in full,
    but for one that comes later still."""
    server = founded()
    for client in range(N):
        server.leave(client)
        server.forget(client)
    shares = []
    for _ in range(6):
        shares.append([server._trials.share(client) for client in range(N)])
        for client in range(N - 1):
            server.submit(client, torch.randn(D), server.version)
    assert shares[0] == [0.0] * N and shares[-1] == [1.0] * (N - 1) + [0.0]
    assert server._trials.share(0) == 1 and server.stats()["on_trial"] == 0


def test_fewer_than_half_under_new_ids_gain_nothing():
    server = founded()
    for client in range((N - 1) // 2):
        server.forget(client)
    for _ in range(6):
        for client in range(N - 1):
            server.submit(client, torch.randn(D), server.version)
    assert 0 < server._trials.share(0) < 0.5 and server._trials.share(N - 2) == 1


@pytest.mark.parametrize("away", ["silent", "left"])
def test_a_reserve_of_numbers_is_worth_nothing(away):
    """An attacker registers numbers by one upload each, some as founders, and takes one when another has lost its
    weight. A trial is as long as the uploads that it takes, and founders that fall silent have one."""
    trials = Trials(60, 20, 1)
    reserve = range(50, 60)
    for client in [*reserve, *range(50)]:
        trials.count_round(client)
        if client in reserve and away == "left":
            trials.leave(client)
    for client in list(range(50)) * 100:
        trials.count_round(client)
    assert trials.epoch > 80 and trials.share(0) == 1 and [trials.share(client) for client in reserve] == [0.0] * 10
    for _ in range(30):  # a burst is one epoch
        trials.count_round(50)
    assert trials.share(50) <= 1 / 20


def test_the_cost_of_a_round_does_not_grow_with_the_capacity(monkeypatch):
    """With few active clients an epoch ends in every few rounds."""
    trials, looked = Trials(100_000, 20, 1), []
    progress = Trials._progress
    monkeypatch.setattr(Trials, "_progress", lambda *given: looked.append(given) or progress(*given))
    monkeypatch.setattr(Trials, "_recount", None)  # looks at all clients
    for i in range(300):
        trials.count_round(i % 3)
    assert trials.epoch > 50 and len(looked) <= 3 * trials.epoch


def test_a_refused_upload_is_no_round():
    server = founded()
    before = server._trials.tensor(None)
    for update in (torch.full((D + 1,), 1.0), "x"):
        with pytest.raises((ValueError, TypeError)):
            server.submit(N - 1, update, server.version)
    assert server.submit(N - 1, torch.ones(D), 0).kind == "stale"
    assert torch.equal(server._trials.tensor(None), before)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trial": -1}, "trial must be a whole number 0 to 1048576, got -1"),
        ({"trial": 2**20 + 1}, "trial must be a whole number"),
        ({"trial": 1.5}, "trial must be a whole number"),
        ({"step": "all"}, "trial must be 0 unless step='received', got 20"),
    ],
)
def test_refusals(settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        SecureAFL(torch.zeros(2), N, **TRIAL | settings)


def test_the_recommended_settings_have_trials():
    assert SecureAFL(torch.zeros(2), N, **RECOMMENDED).config.trial == RECOMMENDED["trial"] > 0
    assert json.dumps(RECOMMENDED)
