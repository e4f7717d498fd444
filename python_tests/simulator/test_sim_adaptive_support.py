"""Adaptive against rule="support": the length of its push, on synthetic tables and in a run on the embedded data."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scenes
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from secureafl_ext.attacks import make
from secureafl_ext.attacks.unnoticed import CAMP_PUSH, STEALTH, STEALTH_CROWD, STEALTH_ODD, past_support
from secureafl_ext.rules import support
from secureafl_ext.rules.kinship import KIN
from secureafl_ext.sim import loop
from secureafl_ext.sim.settings import Settings

GRID = np.array([0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.23, 0.26, 0.3, 0.4])


def bounds(table):
    """(crowd, odd): the rule's bounds on eigenvalues, from its documentation. table: (c, c) of c clients"""

    def level(products):
        return np.median((products**2).sum(1) / np.maximum(np.diag(products), support.SHORT_LEVEL))

    center = np.eye(len(table)) - 1 / len(table)
    norms = np.sqrt(np.maximum(np.diag(table), support.SHORT_SQUARE))
    near = np.clip((table / np.outer(norms, norms) - support.KIN) / (1 - support.KIN), 0, 1)
    np.fill_diagonal(near, 0)
    maps = np.eye(len(table)) - near / np.maximum(near.sum(1, keepdims=True), support.FEW_KIN)
    crowd = max(support.CROWD_LEAST, support.CROWD * level(center @ table @ center))
    return crowd, max(support.ODD_LEAST, support.ODD * level(maps @ table @ maps.T))


def fleet(clients, common, group, own, seed, groups=10):
    """(mean updates (n, 600), a direction of norm 1 that is none of theirs), in median norms.

    common, group, own: squared norms of the parts that all clients, a group, and one client have
    """
    random = np.random.default_rng(seed)
    basis = np.linalg.qr(random.standard_normal((600, groups + clients + 2)))[0].T
    label = random.permutation(clients) % groups
    scale = random.uniform(0.6, 1.4, (clients, 1))
    part = np.sqrt(group) * scale * (basis[label] - basis[:groups].mean(0))
    rows = np.sqrt(common) * basis[-2] + part + np.sqrt(own) * basis[groups : groups + clients]
    return rows, basis[-1]


def table_of(rows, seed):
    """(n, n): the server's averaged inner products of these mean updates, with some noise left."""
    noise = np.random.default_rng(seed).standard_normal((len(rows),) * 2) * 0.01
    return torch.from_numpy(rows @ rows.T + (noise + noise.T) / np.sqrt(2))


def pull(rows, push, attackers, length, seed):
    """How far the rule's step goes along the push of the last clients, in median norms."""
    pushed = rows.copy()
    pushed[-attackers:] += length * push
    weights = 1 / len(rows) + support.shifts(table_of(pushed, seed)).numpy()
    return weights @ pushed @ push


# clients, attackers, squared norms of the common, the group's and the client's own part
FLEETS = {  # STEALTH_CROWD and STEALTH_ODD were chosen on these
    "groups": (50, 10, 0.0, 0.2, 0.02),
    "groups and a common part": (50, 10, 0.1, 0.2, 0.02),
    "nearly alike": (50, 10, 0.3, 0.1, 0.02),
    "short": (50, 10, 0.02, 0.05, 0.01),
    "few attackers": (50, 5, 0.3, 0.1, 0.02),
    "many attackers": (50, 15, 0.1, 0.2, 0.02),
}
HELD_OUT = [
    *((50, 10, 0.05, 0.3, 0.03), (40, 8, 0.15, 0.15, 0.04), (30, 6, 0.2, 0.05, 0.01), (50, 12, 0.05, 0.1, 0.02)),
    *((50, 10, 0.1, 0.5, 0.05), (20, 4, 0.1, 0.2, 0.02), (20, 4, 0.02, 0.05, 0.01), (50, 5, 0.1, 0.2, 0.02)),
]


def searched(clients, attackers, *parts, seeds):
    """(pulls of the lengths in GRID, the solved length), means over fleets of these seeds."""
    pulls, solved = np.zeros(len(GRID)), []
    for seed in seeds:
        rows, push = fleet(clients, *parts, seed)
        pulls += [pull(rows, push, attackers, length, seed) / len(seeds) for length in GRID]
        solved.append(past_support(table_of(rows, seed), torch.arange(clients - attackers), attackers).item())
    return pulls, np.mean(solved)


@pytest.mark.parametrize("name", FLEETS)
def test_the_push_is_near_the_best_of_a_grid(name):
    """Within 30 % of the length with the largest pull. A much longer push is noticed."""
    pulls, length = searched(*FLEETS[name], seeds=range(4))
    assert 0.7 <= length / GRID[pulls.argmax()] <= 1.3
    assert np.interp(length, GRID, pulls) >= 0.75 * pulls.max() > 0
    assert np.interp(2.5 * length, GRID, pulls) < 0.75 * pulls.max()


@pytest.mark.parametrize("fleet", HELD_OUT)
def test_in_other_fleets_it_keeps_most_of_the_pull(fleet):
    """The curves are flat near their maximum, so the length is less certain than the pull."""
    pulls, length = searched(*fleet, seeds=range(10, 14))
    assert np.interp(length, GRID, pulls) >= 0.6 * pulls.max() > 0
    assert 0.55 <= length / GRID[pulls.argmax()] <= 1.45


@pytest.mark.parametrize(("parts", "binding"), [((0.0, 0.2, 0.02), 1), ((0.3, 0.1, 0.02), 0)])
def test_the_push_is_just_below_the_lower_bound(parts, binding):
    rows, _ = fleet(50, *parts, 3)
    rows[40:] *= 50  # the attackers' own rows tell nothing of honest ones
    crowd, odd = bounds(rows[:40] @ rows[:40].T)
    both = STEALTH_CROWD**2 * support.AGAIN * crowd, STEALTH_ODD**2 * odd
    assert both[binding] == min(both)
    got = past_support(torch.from_numpy(rows @ rows.T), torch.arange(40), 10).item()
    assert got == pytest.approx(np.sqrt(min(both) / 10), rel=1e-9)


def test_an_empty_table_leaves_the_least_bound():
    got = past_support(torch.zeros(8, 8, dtype=torch.float64), torch.tensor([0, 2, 3, 5, 7]), 3).item()
    least = min(STEALTH_CROWD**2 * support.AGAIN * support.CROWD_LEAST, STEALTH_ODD**2 * support.ODD_LEAST)
    assert got == pytest.approx(np.sqrt(least / 3))


def test_it_sends_its_own_gradient_and_the_push(random):
    run = scenes.scene(clients=30, malicious=tuple(range(24, 30)))
    attack, d = make("adaptive", run), run.net.size
    honest_rows, _ = fleet(30, 0.1, 0.2, 0.02, 0)
    table = torch.from_numpy(honest_rows @ honest_rows.T)
    rows = torch.randn(30, d, generator=random)
    present = torch.ones(30, dtype=torch.bool)
    present[:6] = False  # expired: their long rows do not count
    rows[:6] *= 100
    server = SimpleNamespace(
        kinship=None, kinship_apart=None, similarity=table, present=present, norms=lambda: rows.norm(dim=1).double()
    )
    away = torch.randn(d, generator=random).sign()
    view = scenes.view(run, attack, 25)
    push = attack._unnoticed(view, server, away) - run.net.gradient(view.model, *run.data.train(view.own[0]))
    torch.testing.assert_close(push / push.norm(), away / away.norm(), rtol=1e-3, atol=1e-3)
    crowd, odd = bounds(honest_rows[:24] @ honest_rows[:24].T)
    length = np.sqrt(min(STEALTH_CROWD**2 * support.AGAIN * crowd, STEALTH_ODD**2 * odd) / 6)
    median = np.median(np.linalg.norm(rows[6:24].numpy(), axis=1))
    assert push.norm().item() == pytest.approx(length * median, rel=1e-3)


def test_the_server_shows_its_table():
    run = scenes.scene()
    shown = {name: scenes.server(run, name) for name in ("secureafl", "secureafl-kin")}
    shown["secureafl-support"] = scenes.server(run, "secureafl-support", averages="uploads")
    assert shown["secureafl"].similarity is None and shown["secureafl"].kinship is None
    assert shown["secureafl-kin"].similarity is shown["secureafl-kin"].kinship
    server = shown["secureafl-support"]
    assert server.kinship is None and server.kinship_apart is None
    order = [*range(scenes.CLIENTS), 0]  # all once: the model moves once a quorum has uploaded
    updates = [torch.randn(run.net.size, generator=torch.Generator().manual_seed(t)) for t in range(len(order))]
    for client, update in zip(order, updates, strict=True):
        server.submit(client, update / update.norm(), server.version)
    expected = (updates[-1] @ updates[1] / updates[-1].norm() / updates[1].norm()).item()
    assert server.similarity.shape == (scenes.CLIENTS,) * 2 and server.similarity.dtype == torch.float64
    assert server.similarity[0, 1].item() == pytest.approx(expected, rel=1e-3)
    assert server.similarity[1, 0] == server.similarity[0, 1]


def test_a_round_never_waits_for_the_device():
    """A server that has met all clients, so that no branch is left out."""
    run = scenes.scene()
    attack, server = make("adaptive", run), scenes.server(run, "secureafl-support")
    for t in range(40):
        scenes.honest_round(run, server, t % scenes.CLIENTS, t)
    view = scenes.view(run, attack, server=server)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {key: mode.from_tensor(x) for key, x in vars(view).items() if isinstance(x, torch.Tensor)}
        update = attack.update(replace(view, **fake))
        assert update.shape == (run.net.size,)
        with pytest.raises(Exception, match=r"item|local_scalar"):
            bool(update.sum() > 0)


def test_a_run_on_the_embedded_data():
    chosen = Settings(
        attack="adaptive", defense="secureafl-support", rounds=48, evaluations=2, batch=8, seed=1, device="cpu"
    )
    rounds = loop.Rounds(chosen.resolve())
    rounds.advance(24)
    rounds.advance(24)
    server, attackers = rounds.server, rounds.attack.scene.malicious
    assert server.model.isfinite().all()
    assert rounds.accepted.float().mean() > 0.5
    assert server.present[attackers].all()  # the server counts them: it has stored what they sent
    assert 0.05 < past_support(server.similarity, rounds.attack.others, len(attackers)).item() < 1


# Camps, against rule="kinship"


def test_camps_keep_the_cosine_between_them_below_the_bound(random):
    run = scenes.scene(clients=30, malicious=tuple(range(24, 30)))
    attack, d = make("adaptive", run, camps=2), run.net.size
    rows, table = torch.randn(30, d, generator=random), torch.eye(30, dtype=torch.float64)
    present = torch.ones(30, dtype=torch.bool)
    server = SimpleNamespace(
        kinship=table, kinship_apart=table, present=present, norms=lambda: rows.norm(dim=1).double()
    )
    away = torch.randn(d, generator=random).sign()
    pushes = []
    for client in (24, 25, 26):
        view = scenes.view(run, attack, client)
        own = run.net.gradient(view.model, *run.data.train(view.own[0]))
        pushes.append((attack._unnoticed(view, server, away) - own).double().numpy())
    first, second, third = (push / np.linalg.norm(push) for push in pushes)
    np.testing.assert_allclose(first, third, atol=1e-4)
    assert first @ second == pytest.approx(STEALTH * KIN, abs=0.1) and first @ second < 0.55
    along = away.double().numpy() / np.sqrt(d)
    assert first @ along == pytest.approx(np.sqrt(STEALTH * KIN), abs=0.1)
    median = np.median(np.linalg.norm(rows[:24].numpy(), axis=1))
    assert np.linalg.norm(pushes[0]) == pytest.approx(CAMP_PUSH * median, rel=0.1)


def test_camps_are_counted():
    with pytest.raises(ValueError, match="adaptive: camps must be 1 or more, got 0"):
        make("adaptive", scenes.scene(), camps=0)
