"""The attacks that are not in the paper, on the embedded data: each runs, and undefended training falls to them."""

from functools import cache

import pytest

from secureafl_ext.attacks import ATTACKS
from secureafl_ext.sim.loop import run
from secureafl_ext.sim.settings import Settings

NEW = ("alie", "ipm", "mimic", "crafted", "ghost", "freeze", "squads", "mosaic")
NEW += ("squad-backdoor", "sleeper", "rotate", "decoy")


def outcome(attack, defense="async-sgd", rounds=12, **options):
    few = {"clients": 10, "batch": 16, "rounds": rounds, "evaluations": 1, "device": "cpu"}
    return run(Settings(attack=attack, attack_options=options, defense=defense, **few))


@cache
def clean():
    return outcome("none", rounds=120).error


def test_the_table_has_them_after_those_of_the_paper():
    assert tuple(ATTACKS)[11:23] == NEW


@pytest.mark.parametrize("attack", NEW)
def test_runs(attack):
    found = outcome(attack, "secureafl-support")
    assert (found.asr is not None) == (attack == "squad-backdoor") and 0 <= found.error <= 1
    assert 0 < found.summary["accepted"] <= 1


@pytest.mark.parametrize(("attack", "options"), [("ghost", {}), ("ghost", {"direction": "dead"}), ("squads", {})])
def test_undefended_training_falls(attack, options):
    """Two of ten clients. A ghost needs no more than one upload each."""
    assert clean() < 0.78
    assert outcome(attack, rounds=120, **options).error > 0.85


def test_a_push_of_nothing_does_no_harm():
    """What harms is the push, not the frame around it."""
    assert outcome("crafted", rounds=120, strength=0.0).error == clean()
