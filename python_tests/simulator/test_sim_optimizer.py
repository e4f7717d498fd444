"""Adam for all defenses alike: gradients are scaled before the defense sees them. And clipped gradients."""

import numpy as np
import pytest
import torch

from secureafl_ext.sim.loop import Rounds, run
from secureafl_ext.sim.optimizer import Adam
from secureafl_ext.sim.settings import Settings
from secureafl_ext.tasks.models import cnn

BEGIN = torch.linspace(-1, 1, 12)


def gradients(count):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-5, 0, 12)
    return [sizes * torch.randn(12, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_its_steps_are_those_of_the_formula(decay):
    """A mean square per coordinate, in NumPy and float64, with a learning rate that changes."""
    model, adam = BEGIN.clone(), Adam(BEGIN, 0.5, decay)
    wanted, square = BEGIN.double().numpy(), np.full(12, 1e-4)
    for i, gradient in enumerate(gradients(3000)):
        rate = 0.1 / (1 + i / 1000)
        adam.rate.fill_(rate)
        after = model - 0.5 * gradient * adam.scale  # a defense that takes every update
        adam.step(model, after)
        model, g = after, gradient.double().numpy()
        wanted = wanted * (1 - rate * decay) - rate * g / (1 + np.sqrt(square) / 1e-3)
        square = 0.999 * square + 0.001 * g**2
    np.testing.assert_allclose(model.numpy(), wanted, rtol=1e-3, atol=1e-4)
    assert adam.scale[0] > 100 * adam.scale[-1]  # a calm coordinate stays, a large one is divided


def test_a_model_that_the_server_did_not_move_stays():
    """A rejected update must not count as one of zeros, and weights must not decay without a step."""
    adam, model = Adam(BEGIN, 0.5, 0.3), BEGIN
    for gradient in gradients(3):
        after = model - 0.5 * gradient
        adam.step(model, after)
        model = after
    square, scale, after = adam.square.clone(), adam.scale.clone(), model.clone()
    adam.step(model, after)
    assert torch.equal(after, model) and torch.equal(adam.square, square) and torch.equal(adam.scale, scale)


def test_model_and_scale_stay_finite_whatever_the_defense_does():
    adam, model = Adam(BEGIN, 1.0, 0.1), BEGIN
    for value in (1e30, -3e38, 3e38, torch.inf, torch.nan, 1.0):
        after = torch.full_like(model, value)
        adam.step(model, after)
        assert after.isfinite().all() and adam.square.isfinite().all() and adam.scale.isfinite().all()
        model = after


def test_all_gradients_are_scaled_and_then_clipped():
    """Those of one minibatch and of several: attackers and the server's own data use the same ones as clients."""
    net, generator = cnn((1, 12, 12), 10), torch.Generator().manual_seed(1)
    x, y = torch.rand(3, 4, 1, 12, 12, generator=generator), torch.randint(10, (3, 4), generator=generator)
    model, scale = net.start(0), torch.rand(net.size, generator=generator)
    plain = net.gradients(model, x, y)
    net.scale = scale
    torch.testing.assert_close(net.gradients(model, x, y), plain * scale)
    torch.testing.assert_close(net.gradient(model, x[1], y[1]), plain[1] * scale)
    lengths = (plain * scale).norm(dim=1)
    net.clip = float(lengths.sort().values[1])
    clipped = net.gradients(model, x, y)
    torch.testing.assert_close(clipped.norm(dim=1), lengths.clamp(max=net.clip))
    torch.testing.assert_close(net.gradient(model, x[1], y[1]), clipped[1])


@pytest.mark.parametrize("defense", ["async-sgd", "fltrust"])
def test_the_defense_sees_scaled_gradients(defense, monkeypatch):
    """FLTrust compares updates with a gradient of its own: with the same scale, or it would reject honest clients."""
    rounds = Rounds(
        Settings(
            rounds=8, evaluations=1, batch=4, optimizer="adam", lr=0.5, clip=0.02, defense=defense, device="cpu"
        ).resolve()
    )
    lengths, submit = [], rounds.server.enqueue
    monkeypatch.setattr(
        rounds.server, "enqueue", lambda who, update, *rest: lengths.append(update.norm()) or submit(who, update, *rest)
    )
    rounds.advance(8)
    assert len(lengths) == 8 and 0 < max(lengths) <= 0.02 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("defense", "options"),
    [
        ("async-sgd", {}),
        ("secureafl", {}),
        ("secureafl-support", {}),
        ("secureafl-support", {"step": "all"}),
        ("basgd", {}),
    ],
)
def test_every_defense_trains_with_it(defense, options):
    how = {"optimizer": "adam", "lr": 1.0, "batch": 8, "clients": 10, "defense": defense, "defense_options": options}
    rounds = Rounds(Settings(rounds=120, evaluations=2, **how, seed=1, device="cpu").resolve())
    start = rounds.server.model.clone()
    rounds.advance(60)
    assert torch.equal(rounds.past[60 % len(rounds.past)], rounds.server.model)
    assert (rounds.server.model - start).abs().max() > 0.001
    rounds.advance(60)
    assert rounds.evaluate().error < 0.75


def test_the_schedule_sets_its_rate_and_leaves_the_servers():
    settings = Settings(
        rounds=8, evaluations=4, optimizer="adam", schedule="cosine", lr=0.01, defense="async-sgd", device="cpu"
    )
    rounds, rates = Rounds(settings.resolve()), []
    for _ in range(4):
        rounds.advance(2)
        rates.append(float(rounds.adam.rate))
        assert rounds.server.lr == 0.01
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.001 and len(set(rates)) == 4


@pytest.mark.parametrize("defense", ["zeno++", "secureafl"])
def test_rules_and_attacks_are_told_the_rate_of_the_schedule(defense, monkeypatch):
    """Zeno++ weighs an update by the step that it becomes; 3DFed divides a change of the model by it."""
    how = {"optimizer": "adam", "schedule": "cosine", "lr": 0.01, "defense": defense, "attack": "adaptive"}
    rounds = Rounds(Settings(rounds=40, evaluations=4, batch=4, **how, device="cpu").resolve())
    told, update = [], rounds.attack.update
    monkeypatch.setattr(rounds.attack, "update", lambda view: told.append(float(view.lr)) or update(view))
    if defense == "zeno++":
        judge = rounds.server.rule.judge
        monkeypatch.setattr(rounds.server.rule, "judge", lambda came: told.append(float(came.lr)) or judge(came))
    for _ in range(4):
        told.clear()
        rounds.advance(10)
        assert told and set(told) == {float(rounds.adam.rate)}
    assert told[0] < 0.001


def test_it_is_recorded():
    outcome = run(Settings(rounds=4, evaluations=1, optimizer="adam", lr=0.01, defense="async-sgd", device="cpu"))
    assert (outcome.settings.optimizer, outcome.settings.decay) == ("adam", 0.0)
