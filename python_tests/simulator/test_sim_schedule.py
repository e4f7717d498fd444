"""The simulator's learning-rate schedule."""

import math

import pytest
import torch

from secureafl_ext.sim.loop import Rounds, side_stream
from secureafl_ext.sim.settings import Settings


def test_the_cosine_falls_from_the_rate_to_nearly_zero():
    settings = Settings(rounds=40, evaluations=8, schedule="cosine", lr=0.2, defense="async-sgd", device="cpu")
    rounds, rates = Rounds(settings.resolve()), []
    for _ in range(8):
        rounds.advance(5)
        rates.append(rounds.server.lr)
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 8
    assert rates[0] > 0.195 and rates[-1] < 0.005 and math.isclose(sum(rates) / 8, 0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("defense", ["async-sgd", "secureafl", "secureafl-support", "kardam"])
def test_a_captured_round_uses_the_rate_of_its_stretch(defense, optimizer, device):
    """As the rounds that are not captured do."""
    if device == "cpu":
        pytest.skip("there are no graphs on a CPU")
    lr = {"sgd": 0.02, "adam": 0.001}[optimizer]
    how = {"optimizer": optimizer, "schedule": "cosine", "lr": lr}
    settings = Settings(rounds=80, evaluations=4, **how, defense=defense, attack="sign-flip", device=device)
    models = []
    for captures in (True, False):
        with side_stream(device):
            rounds = Rounds(settings.resolve())
            rounds.captured = rounds.captured if captures else None
            for _ in range(4):
                rounds.advance(20)
            models.append(rounds.server.model.cpu())
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-6)  # the rate of another stretch would change far more
