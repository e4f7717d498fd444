"""quorum: the model does not move while too few clients have a stored upload, so that the first ones do not decide."""

import numpy as np
import pytest
import torch

from secureafl_ext import SecureAFL

N, SIZE = 10, 12


def made(device, rule="support", quorum=0.5, **settings):
    return SecureAFL(torch.zeros(SIZE, device=device), N, rule=rule, memory=0, lr=0.1, quorum=quorum, **settings)


def update(device, *key):
    values = np.random.default_rng(key).normal(size=SIZE)
    return torch.tensor(values, dtype=torch.float32, device=device)


@pytest.mark.parametrize("rule", ["support", "kinship", "median", "mean", "geometric_median"])
def test_the_model_waits_for_half_of_the_clients(device, rule):
    server = made(device, rule)
    for client in range(4):
        server.submit(client, update(device, client), server.version)
        assert not server.model.any()
    server.submit(4, update(device, 4), server.version)
    assert server.model.any() and server.version == 5


def test_seven_of_a_hundred_are_seven_hundredths():
    server = SecureAFL(torch.zeros(3), 100, rule="mean", memory=0, quorum=0.07)
    for client in range(7):
        assert not server.model.any()
        server.submit(client, torch.ones(3), server.version)
    assert server.model.any()


def test_only_stored_uploads_of_different_clients_count(device):
    server = made(device)
    for client in range(4):
        server.submit(client, update(device, client), server.version)
    for again in range(20):
        assert not server.submit(again % 4, update(device, again, 9), server.version).accepted  # the same model again
        server.submit(5, torch.full((SIZE,), torch.nan, device=device), server.version)
    assert not server.model.any()


def test_a_client_that_is_forgotten_counts_no_more(device):
    server = made(device)
    for client in range(5):
        server.submit(client, update(device, client), server.version)
    before = server.model
    server.forget(0)
    server.submit(1, update(device, 1, 1), server.version)
    assert torch.equal(server.model, before)
    server.submit(6, update(device, 6), server.version)
    assert not torch.equal(server.model, before)


def test_clients_that_stay_silent_keep_the_model_where_it_is_until_enough_have_come(device):
    """However often the others upload: on a model that stays, all but the first upload of a client are rejected."""
    server = made(device, quorum=0.65)
    for round in range(60 * N):
        server.submit(round % 6, update(device, round), server.version)
    assert not server.model.any() and server.version == 60 * N
    assert server.stats()["accepted"] == 6
    server.submit(6, update(device, 6), server.version)
    assert server.model.any()


def test_without_a_quorum_the_first_client_moves_the_model_as_far_as_it_likes(device):
    """Three of ten are first, with huge updates. Later there is a median norm to clip these to."""

    def distance(quorum):
        server = made(device, quorum=quorum, max_norm=1e6)
        for client in range(N):
            huge = client < 3
            server.submit(client, update(device, client) * (1000 if huge else 1), server.version)
        return float(server.model.norm())

    assert distance(0.0) > 100
    assert distance(0.7) < 5


def test_a_resumed_server_waits_on(device, tmp_path):
    server = made(device)
    for client in range(3):
        server.submit(client, update(device, client), server.version)
    server.save(tmp_path / "server")
    resumed = SecureAFL.load(tmp_path / "server", device)
    assert resumed.config.quorum == 0.5
    for client in (3, 4, 5):
        for one in (server, resumed):
            one.submit(client, update(device, client), one.version)
        assert torch.equal(server.model, resumed.model)
        assert bool(resumed.model.any()) == (client >= 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quorum": 1.5}, "SecureAFL: quorum must be a number between 0 and 1, got 1.5"),
        ({"quorum": "half"}, "SecureAFL: quorum must be a number between 0 and 1, got 'half'"),
        ({"quorum": 0.5, "memory": 3}, "SecureAFL: quorum must be 0 with memory=3, got 0.5"),
    ],
)
def test_what_cannot_be_is_refused(settings, words):
    with pytest.raises((TypeError, ValueError)) as error:
        SecureAFL(torch.zeros(SIZE), N, **settings)
    assert str(error.value) == words


def test_enqueue_waits_too(device):
    server, plain = made(device), made(device)
    for round in range(20):
        client, sent = round % N, update(device, round)
        server.enqueue(torch.tensor([client], device=device), sent, server.model)
        plain.submit(client, sent, plain.version)
        assert torch.equal(server.model, plain.model)
        assert bool(server.model.any()) == (round >= 4)
