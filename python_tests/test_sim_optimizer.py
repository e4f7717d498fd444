"""Adam as the server's optimizer."""

import pytest
import torch

from secureafl_ext.sim.loop import Rounds, run
from secureafl_ext.sim.optimizer import Adam
from secureafl_ext.sim.settings import Settings

START = torch.linspace(-1, 1, 12)


def directions(count):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 1, 12)
    return [sizes * torch.randn(12, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_its_steps_are_those_of_torch(decay):
    """AdamW without momentum, with a learning rate that changes."""
    model, adam = START.clone(), Adam(START, 0.5, decay)
    wanted = START.clone().requires_grad_()
    peer = torch.optim.AdamW([wanted], lr=1.0, betas=(0.0, 0.999), eps=1e-8, weight_decay=decay)
    for i, direction in enumerate(directions(50)):
        rate = 0.1 / (1 + i)
        adam.rate.fill_(rate)
        after = model - 0.5 * direction
        adam.step(model, after)
        model = after
        peer.param_groups[0]["lr"] = rate
        wanted.grad = direction.clone()
        peer.step()
        torch.testing.assert_close(model, wanted.detach(), rtol=1e-3, atol=1e-4)
    assert (model - START).abs().max() > 0.1


def test_a_model_that_the_server_did_not_move_stays():
    """A rejected update must not count as one of zeros, and weights must not decay without a step."""
    adam, model = Adam(START, 0.5, 0.3), START
    for direction in directions(3):
        after = model - 0.5 * direction
        adam.step(model, after)
        model = after
    square, missing, after = adam.square.clone(), adam.missing.clone(), model.clone()
    adam.step(model, after)
    assert torch.equal(after, model) and torch.equal(adam.square, square) and torch.equal(adam.missing, missing)


def test_a_model_stays_finite_whatever_the_defense_does():
    adam, model = Adam(START, 1.0, 0.1), START
    for value in (1e30, -3e38, 3e38, torch.inf, torch.nan, 1.0):
        after = torch.full_like(model, value)
        adam.step(model, after)
        assert after.isfinite().all()
        model = after


@pytest.mark.parametrize(
    ("defense", "options"),
    [("async-sgd", {}), ("secureafl", {}), ("secureafl-support", {"step": "received"}), ("basgd", {})],
)
def test_every_defense_trains_with_it(defense, options):
    how = {"optimizer": "adam", "lr": 0.003, "batch": 8, "clients": 10, "defense": defense, "defense_options": options}
    rounds = Rounds(Settings(rounds=120, evaluations=2, **how, device="cpu").resolve())
    start = rounds.server.model.clone()
    rounds.advance(60)
    assert torch.equal(rounds.past[60 % len(rounds.past)], rounds.server.model)
    assert 0.003 < (rounds.server.model - start).abs().max() < 60 * 0.003 * 5  # of a coordinate: a few rates a round
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


def test_it_is_recorded():
    outcome = run(Settings(rounds=4, evaluations=1, optimizer="adam", lr=0.01, defense="async-sgd", device="cpu"))
    assert (outcome.settings.optimizer, outcome.settings.decay) == ("adam", 0.0)
