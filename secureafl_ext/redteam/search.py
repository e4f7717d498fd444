"""The search for the attack that hurts a defense most. Optuna proposes, the simulator answers.

There is no file beside the results: the sampler is deterministic. The same search asks for the same runs again, and
those that the results file has are not repeated. So a search continues where it was cut short, and a larger budget
extends it.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from ..sim.outcome import Outcome
from ..sim.settings import Settings
from .space import Axis, known, suggest

SEEDS = tuple(range(100, 110))  # of the search; no table uses them
CONFIRM_SEEDS = (0, 1, 2)  # of the tables; the search does not see them
CONFIRMED = 5  # attacks that are repeated on CONFIRM_SEEDS
RANDOM_TRIALS = 20  # before the sampler learns from results

Simulate = Callable[[list[Settings]], Sequence[Outcome]]  # one outcome per run, in order


@dataclass(frozen=True)
class Trial:
    number: int
    settings: Settings
    outcome: Outcome
    harm: float


@dataclass(frozen=True)
class Confirmed:
    """An attack that the search found, on other seeds and with the test set."""

    trial: Trial
    runs: list[Settings]  # one per seed of CONFIRM_SEEDS
    outcomes: list[Outcome]
    harms: list[float]

    @property
    def harm(self) -> float:
        return fmean(self.harms)

    @property
    def settings(self) -> Settings:
        """Those of the worst seed."""
        return self.runs[self.harms.index(max(self.harms))]


@dataclass
class Findings:
    """What a search has found so far; it is filled batch by batch."""

    clean: Outcome | None = None  # the defense without attack
    trials: list[Trial] = field(default_factory=list)
    confirmed: list[Confirmed] = field(default_factory=list)  # the worst first

    @property
    def clean_error(self) -> float:
        return 0.0 if self.clean is None else late_error(self.clean)

    def worst(self, count: int) -> list[Trial]:
        """The trials with the highest harm, each attack once, whatever its seed."""
        distinct: dict[str, Trial] = {}
        for trial in sorted(self.trials, key=lambda trial: -trial.harm):
            distinct.setdefault(repr(replace(trial.settings, seed=0)), trial)
        return list(distinct.values())[:count]


def late_error(outcome: Outcome) -> float:
    """The error over the second half of a run; the last one in a record that does not have it."""
    return outcome.error if outcome.late_error is None else outcome.late_error


def harm(outcome: Outcome, clean_error: float) -> float:
    """The objective, at most 1: the late error above that without attack, or the attack success if that is higher."""
    success = outcome.asr if outcome.late_asr is None else outcome.late_asr
    above = late_error(outcome) - clean_error  # may be below 0: the sampler learns from that too
    return min(1.0, above if success is None else max(above, success))


def search(
    findings: Findings, base: Settings, axes: Collection[Axis], budget: int, at_once: int, seed: int, simulate: Simulate
) -> None:
    """Fill `findings`. budget: number of trials, one run each    at_once: trials of a batch, which run side by side

    base: defense, data and all that is not searched. The path of the search depends on `seed` and `at_once`.
    """
    for name, number in (("budget", budget), ("at_once", at_once)):
        if number < 1:
            raise ValueError(f"{name} must be 1 or more, got {number}")
    study = make_study(seed)
    for values in known(base, axes):
        study.enqueue_trial(values)
    clean = replace(base, attack="none", attack_options={}, flood=None, seed=SEEDS[0])
    while len(findings.trials) < budget:
        first = len(findings.trials)
        asked = [study.ask() for _ in range(min(at_once, budget - first))]
        many = [replace(suggest(trial, base, axes), seed=SEEDS[trial.number % len(SEEDS)]) for trial in asked]
        if findings.clean is None:
            findings.clean, *outcomes = simulate([clean, *many])
        else:
            outcomes = list(simulate(many))
        for trial, settings, outcome in zip(asked, many, outcomes, strict=True):
            done = Trial(trial.number, settings, outcome, harm(outcome, findings.clean_error))
            study.tell(trial, done.harm)
            findings.trials.append(done)
    confirm(findings, simulate)


def confirm(findings: Findings, simulate: Simulate) -> None:
    """Repeat the worst attacks on seeds that the search did not see, with the test set."""
    worst = findings.worst(CONFIRMED)
    runs = [[replace(trial.settings, seed=seed, holdout=0.0) for seed in CONFIRM_SEEDS] for trial in worst]
    ended = iter(simulate([settings for its in runs for settings in its]))
    for trial, its in zip(worst, runs, strict=True):
        outcomes = [next(ended) for _ in its]
        harms = [harm(outcome, findings.clean_error) for outcome in outcomes]
        findings.confirmed.append(Confirmed(trial, its, outcomes, harms))
    findings.confirmed.sort(key=lambda found: -found.harm)


def make_study(seed: int) -> Any:
    """A study in memory. TPE (Bergstra et al., NeurIPS 2011) over the axes together, each group of axes that occur
    together on its own; trials that still run count as bad ones, so that a batch is not eight times the same."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        text = f"redteam needs the package {error.name}: pip install 'secureafl_ext[redteam]'"
        raise ModuleNotFoundError(text, name=error.name) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=RANDOM_TRIALS, multivariate=True, group=True, constant_liar=True
        )
    return optuna.create_study(direction="maximize", sampler=sampler)
