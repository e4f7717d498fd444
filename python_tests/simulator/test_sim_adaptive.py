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
from secureafl_ext.attacks.adaptive import spread_of
from secureafl_ext.attacks.evasion import BEST, WAYS, ball, cone
from secureafl_ext.defenses import DEFENSES as ALL
from secureafl_ext.defenses.async_defender import AsyncDefender

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
            scenes.honest_round(run, server, scenes.HONEST[t % len(scenes.HONEST)], t)
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


def test_secureafl_ends_farther_from_the_honest_median_under_attack():
    """All attackers' estimates push one way, round after round."""
    taken, server, run = played("secureafl", 40)
    rows, seen = server.estimates(), server.seen
    honest = seen & ~torch.zeros(scenes.CLIENTS, dtype=torch.bool).index_fill(0, run.malicious, True)
    pushed = ops.median(rows, seen) - ops.median(rows, honest)
    assert pushed @ taken[-1].p < 0


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
        scenes.honest_round(run, server, scenes.HONEST[t % 5], t)
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
