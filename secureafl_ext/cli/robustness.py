"""`secureafl robustness`: the table of all attacks and defenses, with the worst attack that a search found."""

import argparse
import shlex
from functools import partial
from pathlib import Path

from ..report import tables
from ..sim import results
from ..sim.options import axis
from ..sim.settings import Settings
from .names import picture_name
from .options import explicit_settings
from .simulate import simulate

SEEDS = 3


def robustness(arguments: argparse.Namespace) -> None:
    """all attacks against all defenses: end and late error, attack success, worst class, worst attack found"""
    from ..report import robustness as report

    explicit, only, out = explicit_settings(arguments), dict(map(axis, arguments.only)), Path(arguments.out)
    table = report.table(Settings(dataset=explicit.get("dataset", arguments.base.dataset)).resolve().dataset)
    if arguments.redteam and not (Path(arguments.redteam) / results.NAME).exists():
        raise ValueError(f"redteam must be a folder with a {results.NAME}, got {arguments.redteam!r}")
    for name in only:
        if name not in table.axes:
            raise ValueError(f"only: {report.NAME} does not vary {name!r}; choose from {', '.join(table.axes)}")
    # Tables of other settings go to files of their own.
    name = picture_name(report.NAME, [], explicit, (*table.axes, "dataset")).removesuffix(".png")
    plan = tables.plan_table(name, arguments.base, explicit, only, arguments.seeds, table)
    command = shlex.join(["secureafl", *arguments.argv])
    publish = partial(report.publish, out, Path(arguments.redteam or out), command)
    tables.make_table(plan, lambda many, varied: simulate(many, arguments, varied), publish, out)
    print(f"{plan.name}: {out / plan.file}.md, {out / plan.file}.png")
