"""Adaptive against SecureAFL: the edge of the filter's ball, kinship, and how long a push is worth its while."""

import math
from types import SimpleNamespace

import pytest
import scenes
import torch

from secureafl_ext import ops
from secureafl_ext.attacks import make
from secureafl_ext.attacks.adaptive import SPREADS
from secureafl_ext.rules.kinship import KIN, SHORT_CENTERED

F64 = torch.float64


def test_secureafl_is_met_at_the_edge_of_its_ball():
    run = scenes.scene(lr=0.05)
    attack, server = make("adaptive", run), scenes.server(run, "secureafl")
    for t in range(40):
        scenes.honest_round(run, server, scenes.HONEST[t % 5], t)
    first, bounds, factors = [], [], []
    for t in range(12):
        client = scenes.MALICIOUS[t % 3]
        view = scenes.view(run, attack, client, t, server, server.model.clone())
        bound = server.threshold(view.client).item()
        receipt = server.submit(client, attack.update(view), server.version)
        assert receipt.accepted
        (first if "first" in receipt.reason else bounds).append(bound)
        factors += [float(receipt.factor)] if "first" not in receipt.reason else []
    assert len(first) == 3
    at_the_edge = [factor / bound for factor, bound in zip(factors, bounds, strict=True)]
    assert max(at_the_edge) <= 1 and max(at_the_edge) > 0.99


def test_a_first_contact_is_no_longer_than_the_clip():
    run = scenes.scene()
    attack, server = make("adaptive", run), scenes.server(run, "secureafl", max_norm=0.01)
    update = attack.update(scenes.view(run, attack, server=server))
    assert update.norm().item() == pytest.approx(0.01, rel=1e-4)


def test_the_same_model_again_is_answered_the_same():
    run = scenes.scene()
    attack, server = make("adaptive", run), scenes.server(run, "secureafl")
    scenes.honest_round(run, server, 0, 0)
    for seed in range(3):
        kept, _ = server.last(torch.tensor([1]))
        update = attack.update(scenes.view(run, attack, 1, seed, server, server.model_at(1).clone()))
        assert torch.equal(update, kept) == (seed > 0)
        assert server.submit(1, update, 1).accepted


@pytest.mark.parametrize(("apart", "bound"), [(0.36, 0.36), (0.02, KIN * SHORT_CENTERED)])
def test_attackers_keep_just_short_of_being_kin(random, apart, bound):
    """The push that all share makes up nearly half of the square of each one's mean update, also once the centre is
    taken off: where honest clients are alike nothing is left of theirs, and what is too short to be judged bounds it.
    """
    run = scenes.scene(clients=30, malicious=tuple(range(24, 30)))
    attack, d = make("adaptive", run), run.net.size
    norms = torch.randn(30, d, generator=random).norm(dim=1).double()
    means = torch.zeros(30, 30, dtype=F64)
    means.diagonal()[:24] = 0.36
    means.diagonal()[24:] = 99.0  # what the server has of themselves tells nothing of honest ones
    seen = torch.ones(30, dtype=torch.bool)
    left = torch.full((30, 30), apart, dtype=F64)
    server = SimpleNamespace(kinship=means, kinship_apart=left, present=seen, norms=lambda: norms)
    away = torch.randn(d, generator=random).sign()
    view = scenes.view(run, attack, 25)
    push = attack._unnoticed(view, server, away) - run.net.gradient(view.model, *run.data.train(view.own[0]))
    torch.testing.assert_close(push / push.norm(), away / away.norm(), rtol=1e-3, atol=1e-3)
    square = (push.norm() / norms[:24].median()).item() ** 2
    assert 0.38 < square / (square + bound) < 0.5 == KIN
    nobody = SimpleNamespace(kinship=means, kinship_apart=left, present=~seen, norms=lambda: norms)
    assert attack._unnoticed(view, nobody, away).isfinite().all()


def stand_in(rows, seen):
    """As much of a server as the search for gamma asks."""
    config = SimpleNamespace(rule="median", estimate=True)
    return SimpleNamespace(config=config, estimates=lambda: rows, present=seen)


def test_gamma_is_the_least_that_saturates_the_median(random):
    """Spec 7.7: 40 honest of deviation 0.05; along a sign the median has moved as far as it will from about 0.1 on."""
    run = scenes.scene(clients=50, malicious=tuple(range(40, 50)))
    d, attack = 2000, make("adaptive", run)
    mu = 0.02 * torch.randn(d, generator=random)
    rows = torch.zeros(50, d)
    rows[:40] = mu + 0.05 * torch.randn(40, d, generator=random)
    seen = torch.arange(50) < 40
    mean, away = rows[:40].mean(0), -mu.sign()
    gamma = attack._min_gamma(stand_in(rows, seen), mean, away)
    assert 0.03 <= gamma <= 0.2

    def shift(gamma):
        copies = (mean + gamma * away).expand(10, -1)
        return (ops.median(torch.cat([rows[:40], copies])) - ops.median(rows[:40])).norm()

    most = shift(1e3)
    assert shift(gamma) >= 0.99 * most > shift(gamma / 2)
    assert most / math.sqrt(d) == pytest.approx(0.32 * 0.05, rel=0.25)  # spec 3.10: 0.32 deviations for a fifth
    lazy = make("adaptive", run, saturation=0.5)._min_gamma(stand_in(rows, seen), mean, away)
    assert lazy < gamma


def test_attackers_estimates_and_the_unseen_do_not_count_as_honest(random):
    run = scenes.scene()
    attack = make("adaptive", run)
    rows = torch.randn(scenes.CLIENTS, 30, generator=random)
    seen = torch.ones(scenes.CLIENTS, dtype=torch.bool)
    mean, away = rows[scenes.HONEST].mean(0), torch.ones(30)
    gamma = attack._min_gamma(stand_in(rows, seen), mean, away)
    other = rows.index_fill(0, run.malicious, 1e6)
    assert torch.equal(attack._min_gamma(stand_in(other, seen), mean, away), gamma)
    seen[scenes.HONEST[2:]] = False
    gammas = [attack._min_gamma(stand_in(rows.index_fill(0, torch.tensor(scenes.HONEST[2:]), value), seen), mean, away)
              for value in (0.0, 1e6, -1e6)]  # fmt: skip
    assert gammas[0] == gammas[1] == gammas[2]


def test_with_nobody_seen_gamma_is_in_units_of_the_mean():
    run = scenes.scene()
    attack = make("adaptive", run)
    nobody = stand_in(torch.zeros(scenes.CLIENTS, 30), torch.zeros(scenes.CLIENTS, dtype=torch.bool))
    gamma = attack._min_gamma(nobody, torch.full((30,), 2.0), -torch.ones(30))
    assert gamma.item() in [pytest.approx(2 * times) for times in SPREADS]


def test_a_mean_leaves_nothing_to_saturate():
    run = scenes.scene()
    attack = make("adaptive", run, gamma=7.0)
    for config in (SimpleNamespace(rule="mean", estimate=True), SimpleNamespace(rule="median", estimate=False)):
        assert attack._min_gamma(SimpleNamespace(config=config), None, None) == 7
