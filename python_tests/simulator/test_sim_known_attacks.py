"""ALIE, IPM and Mimic, against their formulas in NumPy."""

import math

import numpy as np
import pytest
import scenes

from secureafl_ext.attacks import make
from secureafl_ext.attacks.alie import z_max


def sent(name, client=None, **options):
    run = scenes.scene()
    attack = make(name, run, **options)
    view = scenes.view(run, attack, client)
    gradients = run.net.gradients(view.model, *run.data.train(view.honest)).double().numpy()  # (k, d)
    return attack.update(view).double().numpy(), gradients


def test_alie_is_the_mean_less_z_deviations():
    update, gradients = sent("alie", z=1.5)
    assert len(gradients) == 5
    np.testing.assert_allclose(update, gradients.mean(0) - 1.5 * gradients.std(0, ddof=1), rtol=1e-4, atol=1e-6)
    usual, gradients = sent("alie", honest=3)
    expected = gradients.mean(0) - z_max(8, 3) * gradients.std(0, ddof=1)
    assert len(gradients) == 3
    np.testing.assert_allclose(usual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("clients", "malicious", "share"),
    [(50, 10, 24 / 40), (50, 24, 24 / 26), (51, 12, 25 / 39), (20, 4, 9 / 16), (8, 3, 3 / 5)],
)
def test_z_max_is_the_quantile_of_the_paper(clients, malicious, share):
    """The share of honest clients below z, counted over many normal draws."""
    draws = np.random.default_rng(0).standard_normal(400_000)
    assert (draws < z_max(clients, malicious)).mean() == pytest.approx(share, abs=0.003)


def test_z_max_without_a_majority_to_win_or_anybody_to_win_it_from():
    assert z_max(10, 7) == pytest.approx(z_max(10, 5), abs=1.0) and z_max(10, 7) > 0
    assert z_max(10, 9) == z_max(1, 0) == 0.0
    assert np.isfinite(z_max(50, 0))


def test_ipm_is_minus_the_mean_times_epsilon():
    for options, epsilon in (({}, 10.0), ({"epsilon": 0.5, "honest": 2}, 0.5)):
        update, gradients = sent("ipm", **options)
        assert len(gradients) == options.get("honest", 5)
        np.testing.assert_allclose(update, -epsilon * gradients.mean(0), rtol=1e-4, atol=1e-6)


def test_mimics_are_the_victim():
    for victim in (0, 3):
        update, gradients = sent("mimic", scenes.MALICIOUS[victim % 3], victim=victim)
        assert len(gradients) == 5
        np.testing.assert_allclose(update, gradients[victim], rtol=1e-4, atol=1e-7)
    update, gradients = sent("mimic", scenes.MALICIOUS[0], victim=1, factor=-2.0)
    np.testing.assert_allclose(update, -2 * gradients[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("alie", {"honest": 6}, "alie: honest must be 1 to 5, the honest clients, got 6"),
        ("ipm", {"honest": 0}, "ipm: honest must be 1 to 5, the honest clients, got 0"),
        ("mimic", {"factor": math.nan}, "mimic: factor must be a finite number, got nan"),
        ("mimic", {"victim": 5}, "mimic: victim must be 0 to 4, an honest client, got 5"),
    ],
)
def test_refusals(name, options, words):
    with pytest.raises(ValueError, match=words):
        make(name, scenes.scene(), **options)
