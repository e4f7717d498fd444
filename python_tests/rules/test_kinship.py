"""Who pulls together: averages against a slow twin, who is left out and who is not."""

import numpy as np
import pytest
import torch
from kinship_fleet import CLIENTS, COLLUDERS, HONEST, SIZE, drive, fleet, left_out, make, uploads
from slow_kinship import Twin

from secureafl_ext.rules.kinship import SPAN

F64, F32 = torch.float64, torch.float32


@pytest.fixture(params=[F64, F32], ids=str)
def dtype(request):
    """The composed round and the one op. Both are the slow one's below, so not every long test needs both."""
    return request.param


SETTINGS = {
    "remembered updates": {},
    "rejected ones remembered": {"store": "all", "on_reject": "step", "quantile": 0.6},
    "no filter, short first ones": {"filter": False, "max_norm": 0.5},
    "corrections": {"memory": 2, "trust": 0.3},
}
CASES = [(name, F64) for name in SETTINGS] + [(name, F32) for name in SETTINGS if name != "corrections"]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_server_follows_the_slow_one_round_by_round(name, dtype, device):
    server = make(device, dtype=dtype, **SETTINGS[name])
    close = {F64: {"rtol": 1e-6, "atol": 1e-9}, F32: {"rtol": 1e-5, "atol": 1e-6}}[dtype]
    twin, verdicts, random = Twin(server), [], np.random.default_rng(5)
    for t, (client, update) in enumerate(uploads(fleet(), 260)):
        if t % 37 == 30:
            update = np.full(SIZE, np.nan)
        if t % 17 == 9:
            update = 9 * update
        update = update.astype(np.float32).astype(float)  # alike for all that take it
        version = max(0, server.version - int(random.integers(4)))
        expected = twin.submit(client, update, version)
        assert bool(server.submit(client, torch.from_numpy(update).to(server.model), version).accepted) == expected
        assert np.allclose(server.model.cpu().numpy(), twin.slow.model, **close)
        verdicts.append(expected)
    assert np.allclose(server.kinship.cpu().numpy(), twin.means, **close)
    assert len(set(verdicts)) == 2 and set(left_out(server)) >= set(range(HONEST, CLIENTS))


def test_averages_tend_to_the_products_of_the_mean_updates():
    """Also on the diagonal, where the square of one update would have its noise in it."""
    means = fleet()
    server = drive(make(dtype=F32, filter=False), uploads(means, 2000))
    expected = means @ means.T
    usual = np.median(np.linalg.norm([update for _, update in uploads(means, 500)], axis=1))
    squares = np.diag(expected) + 0.15**2 * SIZE
    cut = np.minimum(1, usual / np.sqrt(squares))
    expected = expected * cut[:, None] * cut / usual**2
    assert np.abs(server.kinship.numpy() - expected).max() < 0.08
    assert np.diag(expected).max() < 0.6 < (squares * cut**2 / usual**2).min()


def test_colluders_and_the_turned_are_left_out_and_honest_groups_are_not(device, dtype):
    assert left_out(drive(make(device, dtype=dtype), uploads(fleet(), 700))) == [*range(HONEST, CLIENTS)]


def test_colluders_stand_out_among_clients_that_are_all_alike(device, dtype):
    """Who are kin of each other, in a group larger than theirs."""
    means = np.concatenate([np.tile(fleet()[0], (HONEST, 1)), fleet()[HONEST : HONEST + COLLUDERS]])
    server = drive(make(device, clients=len(means), dtype=dtype), uploads(means, 700))
    assert left_out(server) == [*range(HONEST, len(means))]


def test_without_attackers_nobody_is_left_out():
    honest = fleet(colluders=0, turned=False)
    assert left_out(drive(make(clients=HONEST, dtype=F32), uploads(honest, 700))) == []
    alike = np.tile(honest.sum(0), (HONEST, 1))
    assert left_out(drive(make(clients=HONEST, dtype=F32), uploads(alike, 700))) == []
    nothing = np.zeros((HONEST, SIZE))  # all noise: cosines of what is no length must not count
    assert left_out(drive(make(clients=HONEST, dtype=F32), uploads(nothing, 700))) == []


def test_a_group_no_larger_than_others_is_not_told_from_them():
    """What the rule cannot see: colluders as many as honest clients that are alike."""
    means = fleet(colluders=2, turned=False)
    assert left_out(drive(make(clients=len(means), dtype=F32), uploads(means, 700))) == []


def test_the_model_goes_where_honest_clients_pull():
    honest = fleet(colluders=0, turned=False)
    there = drive(make(clients=HONEST, dtype=F32), uploads(honest, 700)).model
    robust = drive(make(dtype=F32), uploads(fleet(), 700)).model
    plain = drive(make(dtype=F32, rule="mean", buckets=2), uploads(fleet(), 700)).model

    def cosine(a):
        return float(torch.nn.functional.cosine_similarity(a, there, dim=0))

    assert cosine(robust) > 0.97 and cosine(plain) < 0.7


def test_long_noise_is_cut_though_most_of_those_left_send_it(device, dtype):
    """Three of six honest clients are alike and left out; four send noise a hundred times as long as an update."""
    alike, honest, clients = 3, 6, 10
    means = np.zeros((clients, SIZE))
    means[range(honest), [0] * alike + [1, 2, 3]] = 1
    server = make(device, clients=clients, dtype=dtype, filter=False)
    longest, steps = 0, []
    for client, update in uploads(means, 400):
        longest = max(longest, np.linalg.norm(update))
        before = server.model.clone()
        drive(server, [(client, 100 * update if client >= honest else update)])
        steps.append(float((server.model - before).norm()) / server.lr)
    assert left_out(server) == [*range(alike)]
    assert 0.1 * longest < max(steps[200:]) < longest


def test_names_and_units_of_clients_do_not_matter(dtype):
    one = drive(make(dtype=dtype, filter=False, max_norm=1e9), uploads(fleet(), 400))
    order = np.random.default_rng(2).permutation(CLIENTS)
    other = drive(make(dtype=dtype, filter=False, max_norm=1e9), uploads(fleet(), 400, scale=1000.0, order=order))
    assert sorted(order[left_out(one)]) == left_out(other)
    rtol, atol = {F64: (1e-6, 1e-9), F32: (1e-4, 1e-6)}[dtype]
    assert torch.allclose(other.model, 1000 * one.model, rtol=rtol, atol=1000 * atol)
    assert torch.allclose(other.kinship[order][:, order], one.kinship, rtol=rtol, atol=atol)


def test_one_long_update_hardly_moves_an_average():
    server = drive(make(dtype=F32, filter=False), uploads(fleet(), 1000))
    before = server.kinship.clone()
    server.submit(3, 1e6 * torch.ones(SIZE, dtype=F32), server.version)
    moved = (server.kinship - before).abs()
    assert 0 < moved.max() <= 2 / SPAN
    moved[3] = moved[:, 3] = 0
    assert not moved.any()


def test_a_forgotten_client_is_nobodys_kin_and_starts_anew(device, dtype):
    server, honest, spy = drive(make(device, dtype=dtype), uploads(fleet(), 500)), fleet()[0], HONEST + 1
    assert spy in left_out(server)
    before = server.kinship.clone()
    server.forget(spy)
    assert not server.kinship[spy].any() and not server.kinship[:, spy].any() and spy not in left_out(server)
    others = torch.arange(CLIENTS, device=device) != spy
    assert torch.equal(server.kinship[others][:, others], before[others][:, others])
    drive(server, [(0, fleet()[0])])
    assert not server.kinship[spy].any()
    means = fleet()
    means[spy] = honest  # another client has the number now
    drive(server, uploads(means, 500, seed=2))
    assert spy not in left_out(server) and HONEST in left_out(server)
