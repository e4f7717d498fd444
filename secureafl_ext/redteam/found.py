"""The worst attack that a results file has for a defense."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

from ..sim.options import prepare
from ..sim.outcome import Outcome
from ..sim.results import Record, run_of
from ..sim.settings import Settings
from .search import harm
from .space import ATTACK, unsearched


def worst_found(records: Iterable[Record], base: Settings, seeds: int, clean_error: float) -> list[Outcome]:
    """The runs, one per seed 0 to seeds - 1, of the attack with the highest mean harm; empty if there is none.

    base: the defense and all that is not searched. An attack without a run for each of the seeds does not count.
    """
    (one,) = prepare([replace(unsearched(base), attack=ATTACK, seed=0)])
    wanted = run_of(one)
    found: dict[str, dict[int, Outcome]] = {}  # attack -> seed -> outcome; the last of equal runs counts
    for record in records:
        settings = record.outcome.settings
        if settings.attack == ATTACK and run_of(replace(unsearched(settings), seed=0)) == wanted:
            attack = repr((sorted(settings.attack_options.items()), settings.flood))
            found.setdefault(attack, {})[settings.seed] = record.outcome
    whole = [[runs[seed] for seed in range(seeds)] for runs in found.values() if set(range(seeds)) <= set(runs)]
    return max(whole, key=lambda runs: fmean(harm(run, clean_error) for run in runs), default=[])
