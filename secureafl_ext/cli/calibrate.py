"""Fits the attack strengths that the paper does not state, so that undefended training suffers as in the paper.

Only AsyncSGD is used: a strength that was fitted on a defense would not test that defense.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ..attacks import ATTACKS
from ..sim.loop import Outcome
from ..sim.results import Record, flat
from ..sim.settings import Settings

UNDEFENDED = "async-sgd"
BITES = 0.5  # least attack success of a backdoor without a defense: a weaker attack would not test a defense


class Target(NamedTuple):
    """Final error and attack success of the paper's AsyncSGD."""

    error: float
    asr: float | None = None


TARGETS = {
    "fashion-mnist": {
        "none": Target(0.12),
        "label-flip": Target(0.12),
        "sign-flip": Target(0.41),
        "gaussian": Target(0.52),
        "scaling": Target(0.41, 0.69),
        "dba": Target(0.53, 0.60),
        "pgd": Target(0.28, 0.36),
        "neurotoxin": Target(0.25, 0.25),
        "3dfed": Target(0.90, 1.0),
        "min-max": Target(0.90),
        "adaptive": Target(0.90),
    },
    "cifar10": {
        "none": Target(0.22),
        "label-flip": Target(0.37),
        "sign-flip": Target(0.48),
        "gaussian": Target(0.80),
        "scaling": Target(0.85, 1.0),
        "dba": Target(0.86, 1.0),
        "pgd": Target(0.70, 0.97),
        "neurotoxin": Target(0.56, 0.88),
        "3dfed": Target(0.90, 1.0),
        "min-max": Target(0.84),
        "adaptive": Target(0.86),
    },
}
# The values that are tried for the option `Kind.free` of an attack.
STRENGTHS = {
    "scaling": (1.0, 10.0, 20.0, 30.0, 40.0, 50.0),
    "dba": (1.0, 5.0, 50.0, 70.0, 100.0, 150.0),
    "pgd": (0.1, 0.2, 0.3, 0.5, 1.0, 3.0),
    "neurotoxin": (0.3, 1.0, 3.0, 5.0, 10.0, 20.0),
    "3dfed": (1.0, 5.0, 50.0),
    "min-max": (1.0, 10.0),
}


def free() -> list[str]:
    """The attacks whose strength the paper does not state."""
    return [name for name, kind in ATTACKS.items() if kind.free is not None]


def trials(base: Settings, attacks: list[str]) -> list[Settings]:
    """Every strength of every attack, on undefended training. An attack without a free strength runs once."""
    if base.defense != UNDEFENDED:
        raise ValueError(f"calibrate: defense must be {UNDEFENDED}, got {base.defense!r}")
    known = targets(base.dataset)
    many = []
    for name in attacks:
        if name not in ATTACKS:
            raise ValueError(f"unknown attack {name!r}; choose from {', '.join(ATTACKS)}")
        if name not in known:
            raise ValueError(f"calibrate: attack must be one of the paper's, {', '.join(known)}, got {name!r}")
        option = ATTACKS[name].free
        strengths: list[dict[str, object]] = [{option: value} for value in STRENGTHS[name]] if option else [{}]
        many += [
            replace(base, attack=name, attack_options=base.attack_options | strength, defense=UNDEFENDED)
            for strength in strengths
        ]
    kept = {option for name in attacks for option in ATTACKS[name].settings if option != ATTACKS[name].free}
    for name in attacks:
        option = ATTACKS[name].free
        if option in base.attack_options and option not in kept:
            got = base.attack_options[option]
            raise ValueError(f"calibrate: attack option {option} must not be set, calibrate chooses it, got {got!r}")
    return many


def targets(dataset: str) -> dict[str, Target]:
    if dataset not in TARGETS:
        raise ValueError(f"calibrate: dataset must be one of {', '.join(TARGETS)}, got {dataset!r}")
    return TARGETS[dataset]


def distance(outcome: Outcome) -> float:
    """|error - target error| + max(0, target success - attack success). The second term only if the paper has one; the
    success is a mean late in the run, and its target is at least BITES.
    """
    target = targets(outcome.settings.dataset)[outcome.settings.attack]
    total = abs(outcome.error - target.error)
    if target.asr is not None:
        success = outcome.asr if outcome.late_asr is None else outcome.late_asr
        if success is None:
            raise ValueError(f"calibrate: attack {outcome.settings.attack!r} must have an attack success, got None")
        total += max(0.0, max(target.asr, BITES) - success)
    return math.inf if math.isnan(total) else total


def choose(outcomes: list[Outcome]) -> dict[str, Outcome]:
    """For each attack the trial nearest to its target; the first of equals."""
    for outcome in outcomes:
        if outcome.settings.defense != UNDEFENDED:
            raise ValueError(f"calibrate: defense must be {UNDEFENDED}, got {outcome.settings.defense!r}")
    names = dict.fromkeys(outcome.settings.attack for outcome in outcomes)
    return {name: min((o for o in outcomes if o.settings.attack == name), key=distance) for name in names}


def report(records: list[Record]) -> dict[str, Any]:
    """The chosen strengths and every trial, with all that is needed to repeat it."""
    outcomes = [record.outcome for record in records]
    dataset = outcomes[0].settings.dataset
    return {
        "dataset": dataset,
        "targets": {name: target._asdict() for name, target in targets(dataset).items()},
        "chosen": {
            name: {"options": outcome.settings.attack_options, "distance": distance(outcome)}
            for name, outcome in choose(outcomes).items()
        },
        "trials": [{"distance": distance(record.outcome)} | flat(record) for record in records],
    }
