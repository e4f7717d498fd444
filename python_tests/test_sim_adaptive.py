"""Adaptive: the shapes it fits itself into, and that every real defense takes what it sends."""

import math
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import scenes
import torch

from secureafl_ext import ops
from secureafl_ext.attacks import make
from secureafl_ext.attacks.adaptive import SPREADS, spread_of
from secureafl_ext.attacks.evasion import BEST, WAYS, ball, cone
from secureafl_ext.defenses import DEFENSES as ALL
from secureafl_ext.defenses.async_defender import AsyncDefender
from secureafl_ext.rules.kinship import KIN, SHORT_CENTERED

HONEST = [client for client in range(scenes.CLIENTS) if client not in scenes.MALICIOUS]
F64 = torch.float64


def vector(*values):
    return torch.tensor(values, dtype=F64)


def test_ball_gives_the_nearest_point():
    centre = vector(1, 1)
    assert ball(vector(4, 5), centre, torch.tensor(2.5)).tolist() == pytest.approx([2.5, 3])
    assert ball(vector(2, 1), centre, torch.tensor(2.5)).tolist() == [2, 1]
    assert ball(vector(4, 5), centre, torch.tensor(0.0)).tolist() == [1, 1]
    assert ball(vector(4, 5), centre, torch.tensor(math.inf)).tolist() == [4, 5]


@pytest.mark.parametrize("cosine", [0.6, 0.0, -0.28])
def test_cone_tilts_to_the_asked_cosine(cosine):
    axis = vector(0, 0, 3)
    tilted = cone(vector(0, 2, -9), axis, torch.tensor(cosine, dtype=F64))
    assert torch.cosine_similarity(tilted, axis, dim=0).item() == pytest.approx(cosine)
    assert tilted[:2].tolist() == [0, 2]
    assert cone(vector(0, 2, -9), axis, cosine).tolist() == pytest.approx(tilted.tolist())
    inside = vector(0, 1, 9)
    assert torch.equal(cone(inside, axis, cosine), inside)


def test_spread_is_over_the_kept_rows():
    rows = vector(1, 0, 3, 4, 99, 99).view(3, 2)  # deviations 1 and 2 of the first two rows
    assert spread_of(rows, torch.tensor([True, True, False])).item() == pytest.approx(math.sqrt(2.5))
    assert spread_of(rows, torch.tensor([False] * 3)).item() == 0


# A defense after some rounds


def played(name, rounds=30, settings=None, attack=None, run=None):
    """A run in which honest clients and attackers take turns; the receipts and updates of the attackers."""
    run = run or scenes.scene(lr=0.05)
    server = scenes.server(run, name, **(settings or {}))
    attack = attack or make("adaptive", run)
    taken = []
    for t in range(rounds):
        if t % 4 < 3:
            scenes.honest_round(run, server, HONEST[t % len(HONEST)], t)
            continue
        client = scenes.MALICIOUS[t // 4 % 3]
        version = max(0, server.version - t % 3)
        view = scenes.view(run, attack, client, t, server, server.model_at(version).clone())
        attack.before()
        update = attack.update(view)
        average, current = attack.average.clone(), server.model.clone()
        receipt = server.submit(client, update, version)
        attack.after(view, server.model)
        mean = run.net.gradients(view.model, *run.data.train(view.honest)).mean(0)
        taken.append(SimpleNamespace(receipt=receipt, update=update, mean=mean, p=average.sign(), view=view,
                                     step=server.model - current))  # fmt: skip
    return taken, server, run


DEFENSES = {
    "async-sgd": ("async-sgd", {}),
    "kardam": ("kardam", {"patience": 10**6}),
    "kardam with a short list": ("kardam", {"kept": 1, "quantile": 0.5, "patience": 10**6}),
    "basgd": ("basgd", {}),
    "sageflow": ("sageflow", {"warmup": 2, "threshold": 2.2}),
    "sageflow in warm-up": ("sageflow", {"warmup": 100, "threshold": 0.1}),
    "sageflow trained": ("sageflow", {"warmup": 2, "threshold": 2.2, "candidate": "trained"}),
    "zeno++": ("zeno++", {"every": 3}),
    "zeno++ with a narrow cone": ("zeno++", {"rho": 0.025}),
    "zeno++ with a wide cone": ("zeno++", {"eps": 0.5, "every": 1}),
    "aflguard": ("aflguard", {}),
    "aflguard lazy": ("aflguard", {"every": 5}),
    "aflguard cosine": ("aflguard", {"test": "cosine"}),
    "async-defender": ("async-defender", {"warmup": 4}),
    "async-defender shifted": ("async-defender", {"weight": "shifted", "warmup": 4}),
    "async-defender model": ("async-defender", {"reference": "model", "warmup": 4}),
    "secureafl": ("secureafl", {}),
    "secureafl by a low quantile": ("secureafl", {"quantile": 0.3}),
    "secureafl-i": ("secureafl-i", {}),
    "secureafl-kin": ("secureafl-kin", {}),
    "secureafl-support": ("secureafl-support", {}),
    "secureafl-iii": ("secureafl-iii", {}),
}


@pytest.mark.parametrize("case", DEFENSES)
def test_the_defense_takes_it_and_it_points_away(case):
    name, settings = DEFENSES[case]
    taken, _, _ = played(name, 24, settings)
    for t, one in enumerate(taken):
        assert one.receipt.accepted, f"{t}: {one.receipt.reason}, {float(one.receipt.factor)}"
        assert one.update.isfinite().all()
    # Less along p, the way honest clients go, than they; where a ball is small it takes a few uploads.
    away = [((one.update @ one.p) / one.update.norm()) < ((one.mean @ one.p) / one.mean.norm()) for one in taken]
    assert all(away[3:])


def test_without_a_filter_the_wish_itself_is_sent():
    for name in ("async-sgd", "basgd"):
        for one in played(name, 12)[0]:
            torch.testing.assert_close(one.update, one.mean - 10 * one.p, rtol=1e-5, atol=1e-5)


def test_p_is_the_sign_of_the_long_run_mean():
    run = scenes.scene()
    attack = make("adaptive", run, momentum=0.75)
    server, means = scenes.server(run, "async-sgd"), []
    for seed in range(3):
        view = scenes.view(run, attack, seed=seed, server=server)
        means.append(run.net.gradients(view.model, *run.data.train(view.honest)).mean(0))
        update = attack.update(view)
    expected = means[2] - 10 * (0.75**2 * means[0] + 0.75 * means[1] + means[2]).sign()
    torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-5)


def test_looks_at_ten_honest_clients_or_all():
    assert make("adaptive", scenes.scene()).honest == 5
    assert make("adaptive", scenes.scene(clients=30)).honest == 10
    assert make("adaptive", scenes.scene(clients=30), honest=20).honest == 20


def test_kardam_is_met_near_the_edge_of_its_ball():
    run = scenes.scene(lr=0.05)
    attack, server = make("adaptive", run), scenes.server(run, "kardam", patience=10**6)
    for t in range(20):
        scenes.honest_round(run, server, HONEST[t % 5], t)
    refused = []
    for t in range(9):
        client = scenes.MALICIOUS[t % 3]
        view = scenes.view(run, attack, client, t, server, server.model.clone())
        update, applied = attack.update(view), server.rule.applied.clone()
        farther = deepcopy(server).submit(client, applied + 1.5 * (update - applied), server.version)
        refused.append(not farther.accepted)
        assert server.submit(client, update, server.version).accepted
    assert sum(refused) >= 6  # its own coefficient, which it counts as 0, widens the ball now and then


def test_aflguard_steps_back_by_what_its_radius_exceeds_one():
    taken, server, _ = played("aflguard", 20, {"radius": 1.5})
    for one in taken:
        assert float(one.receipt.factor) == pytest.approx(1.5, rel=2e-3)
        trusted = server.rule.trusted.gradient(one.view.current)
        torch.testing.assert_close(one.update, -0.5 * trusted, rtol=1e-2, atol=1e-6)


def cosine(x, y):
    return torch.cosine_similarity(x, y, dim=0).item()


@pytest.mark.parametrize(("rho", "edge"), [(0.0, 0.0), (0.025, 0.5)])
def test_zeno_is_met_at_the_edge_of_its_cone(rho, edge):
    taken, server, _ = played("zeno++", 28, {"every": 1, "rho": rho})
    references = [server.rule.trusted.gradient(one.view.current) for one in taken]
    wished = [cosine(one.mean - 10 * one.p, v) for one, v in zip(taken, references, strict=True)]
    sent = [cosine(one.update, v) for one, v in zip(taken, references, strict=True)]
    assert sent == pytest.approx([max(edge, wish) for wish in wished], abs=3e-3)
    assert min(wished) < edge - 0.05


def test_async_defender_is_given_the_cosine_of_most_effect():
    for weight, best in (("positive", math.sqrt(0.5)), ("shifted", -0.5)):
        rule = SimpleNamespace(direction=vector(0, 3), reference="ema", weight=weight, taken=torch.tensor(4), warmup=4)
        view = SimpleNamespace(current=vector(3, 0))
        past = partial(WAYS[AsyncDefender], rule, None, view)
        assert cosine(past(vector(0, 1), vector(2, -9)), rule.direction) == pytest.approx(best)
        rule.warmup = 5
        assert past(vector(0, 1), vector(2, -9)).tolist() == [2, -8]
        rule.warmup, rule.reference = 4, "model"
        assert cosine(past(vector(1, 0), vector(-9, 2)), view.current) == pytest.approx(best)
    grid = torch.linspace(-1, 1, 2001, dtype=F64)
    across = grid.clamp(min=0) * (1 - grid**2).sqrt()
    back = -grid * (1 + grid) / 2
    assert grid[across.argmax()].item() == pytest.approx(BEST["positive"], abs=1e-3)
    assert grid[back.argmax()].item() == pytest.approx(BEST["shifted"], abs=1e-3)


@pytest.mark.parametrize("candidate", ["current", "trained"])
def test_sageflow_is_sent_the_strongest_that_leaves_it_sure(candidate):
    run = scenes.scene()
    attack = make("adaptive", run)
    server = scenes.server(run, "sageflow", warmup=0, candidate=candidate)
    view = scenes.view(run, attack, server=server, model=run.net.start(5))
    start = view.current if candidate == "current" else view.model

    def evaluate(model):  # sure as long as a step is short
        step = (model - start).norm()
        return step, torch.where(step < bound, 0.5, 2.0)

    mean = run.net.gradients(view.model, *run.data.train(view.honest)).mean(0)
    server.rule.trusted = SimpleNamespace(evaluate=evaluate)
    for share in (1.0, 0.3, 0.03):
        trial = mean - 10 * share * mean.sign()
        bound = run.lr * trial.norm() * 1.01
        torch.testing.assert_close(attack.update(view), trial, rtol=1e-4, atol=1e-4)
    server.rule.warmup = 1  # takes any
    torch.testing.assert_close(attack.update(view), mean - 10 * mean.sign(), rtol=1e-4, atol=1e-4)
    server.rule.warmup, bound = 0, 0.0
    torch.testing.assert_close(attack.update(view), mean - 10 * mean.sign(), rtol=1e-4, atol=1e-4)


def test_refuses_a_server_that_it_does_not_know():
    run = scenes.scene()
    attack = make("adaptive", run)
    server = SimpleNamespace(rule=object(), model=run.net.start(0))
    with pytest.raises(ValueError, match="server must be a SecureAFL or a RuleServer, got SimpleNamespace"):
        attack.update(scenes.view(run, attack, server=server))


def test_each_compared_rule_has_a_way_of_its_own():
    servers = [scenes.server(scenes.scene(), name) for name in ALL if not name.startswith("secureafl")]
    assert {type(server.rule) for server in servers} == set(WAYS)


# SecureAFL


def test_secureafl_is_met_at_the_edge_of_its_ball():
    run = scenes.scene(lr=0.05)
    attack, server = make("adaptive", run), scenes.server(run, "secureafl")
    for t in range(40):
        scenes.honest_round(run, server, HONEST[t % 5], t)
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
    rows = torch.randn(30, d, generator=random)
    means = torch.zeros(30, 30, dtype=F64)
    means.diagonal()[:24] = 0.36
    means.diagonal()[24:] = 99.0  # what the server has of themselves tells nothing of honest ones
    seen = torch.ones(30, dtype=torch.bool)
    left = torch.full((30, 30), apart, dtype=F64)
    server = SimpleNamespace(kinship=means, kinship_apart=left, present=seen, estimates=lambda: rows)
    away = torch.randn(d, generator=random).sign()
    view = scenes.view(run, attack, 25)
    push = attack._unnoticed(view, server, away) - run.net.gradient(view.model, *run.data.train(view.own[0]))
    torch.testing.assert_close(push / push.norm(), away / away.norm(), rtol=1e-3, atol=1e-3)
    square = (push.norm() / rows[:24].norm(dim=1).median()).item() ** 2
    assert 0.38 < square / (square + bound) < 0.5 == KIN
    nobody = SimpleNamespace(kinship=means, kinship_apart=left, present=~seen, estimates=lambda: rows)
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
    gamma = attack._worthwhile(stand_in(rows, seen), mean, away)
    assert 0.03 <= gamma <= 0.2

    def shift(gamma):
        copies = (mean + gamma * away).expand(10, -1)
        return (ops.median(torch.cat([rows[:40], copies])) - ops.median(rows[:40])).norm()

    most = shift(1e3)
    assert shift(gamma) >= 0.99 * most > shift(gamma / 2)
    assert most / math.sqrt(d) == pytest.approx(0.32 * 0.05, rel=0.25)  # spec 3.10: 0.32 deviations for a fifth
    lazy = make("adaptive", run, saturation=0.5)._worthwhile(stand_in(rows, seen), mean, away)
    assert lazy < gamma


def test_attackers_estimates_and_the_unseen_do_not_count_as_honest(random):
    run = scenes.scene()
    attack = make("adaptive", run)
    rows = torch.randn(scenes.CLIENTS, 30, generator=random)
    seen = torch.ones(scenes.CLIENTS, dtype=torch.bool)
    mean, away = rows[HONEST].mean(0), torch.ones(30)
    gamma = attack._worthwhile(stand_in(rows, seen), mean, away)
    other = rows.index_fill(0, run.malicious, 1e6)
    assert torch.equal(attack._worthwhile(stand_in(other, seen), mean, away), gamma)
    seen[HONEST[2:]] = False
    gammas = [attack._worthwhile(stand_in(rows.index_fill(0, torch.tensor(HONEST[2:]), value), seen), mean, away)
              for value in (0.0, 1e6, -1e6)]  # fmt: skip
    assert gammas[0] == gammas[1] == gammas[2]


def test_with_nobody_seen_gamma_is_in_units_of_the_mean():
    run = scenes.scene()
    attack = make("adaptive", run)
    nobody = stand_in(torch.zeros(scenes.CLIENTS, 30), torch.zeros(scenes.CLIENTS, dtype=torch.bool))
    gamma = attack._worthwhile(nobody, torch.full((30,), 2.0), -torch.ones(30))
    assert gamma.item() in [pytest.approx(2 * times) for times in SPREADS]


def test_a_mean_leaves_nothing_to_saturate():
    run = scenes.scene()
    attack = make("adaptive", run, gamma=7.0)
    for config in (SimpleNamespace(rule="mean", estimate=True), SimpleNamespace(rule="median", estimate=False)):
        assert attack._worthwhile(SimpleNamespace(config=config), None, None) == 7


def test_secureafl_ends_farther_from_the_honest_median_under_attack():
    """All attackers' estimates push one way, round after round."""
    taken, server, run = played("secureafl", 40)
    rows, seen = server.estimates(), server.seen
    honest = seen & ~torch.zeros(scenes.CLIENTS, dtype=torch.bool).index_fill(0, run.malicious, True)
    pushed = ops.median(rows, seen) - ops.median(rows, honest)
    assert pushed @ taken[-1].p < 0
