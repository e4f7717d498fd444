"""`secureafl redteam`: search for the attack that hurts a defense most."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from ..redteam import search, space
from ..redteam.search import Findings
from ..sim import results
from ..sim.options import prepare
from ..sim.outcome import Outcome
from ..sim.settings import Settings
from .names import picture_name
from .options import explicit_settings
from .simulate import results_file, say_tuned, settings_of, simulate, tuned
from .spelled import command_line

BUDGET = 200
VARIED = ["attack_options", "flood", "seed"]


def redteam(arguments: argparse.Namespace) -> None:
    """search for the attack that hurts a defense most, and repeat the worst on seeds that the search did not see"""
    from ..report import redteam as report

    base = replace(tuned([settings_of(arguments)], arguments)[0], attack=space.ATTACK)
    prepare([base], searched=True)  # an invalid setting raises here, before any run
    axes = space.axes_for(base, [name for name in arguments.without.split(",") if name])
    say_tuned([base])
    findings, picture = Findings(), _picture(arguments, base)
    budget, at_once, seed = arguments.budget, arguments.at_once, arguments.search_seed
    try:
        search.search(findings, base, axes, budget, at_once, seed, Runs(arguments))
    finally:  # a search that is cut short shows what it has tried
        if findings.trials:
            report.publish(picture, findings, shlex.join(["secureafl", *arguments.argv]), command_line)
    report.print_tables(findings)
    print(report.sentence(findings))
    print(f"To repeat it: {command_line(findings.confirmed[0].settings)}")
    print(f"Results: {results_file(arguments)}, {picture.with_suffix('.md')}, {picture}")


def _picture(arguments: argparse.Namespace, base: Settings) -> Path:
    parts = [base.defense, base.dataset]
    parts += [f"without={arguments.without}"] * bool(arguments.without)
    parts += [f"search-seed={arguments.search_seed}"] * bool(arguments.search_seed)
    name = picture_name("redteam", parts, explicit_settings(arguments), ("defense", "dataset"))
    return Path(arguments.out) / name


class Runs:
    """One outcome per run, in order: from the results file, or simulated."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.known = [] if arguments.fresh else results.read(results_file(arguments))

    def __call__(self, many: list[Settings]) -> list[Outcome]:
        wanted = [prepare([settings], searched=True)[0] for settings in many]
        known = results.find(self.known, wanted, self.arguments.any_code)
        missing: list[Settings] = [settings for i, settings in enumerate(wanted) if i not in known]
        if missing:
            self.known += simulate(missing, self.arguments, VARIED, quiet=True)
            known = results.find(self.known, wanted, self.arguments.any_code)
        return [known[i].outcome for i in range(len(wanted))]
