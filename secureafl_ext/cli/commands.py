"""The commands that simulate, and those that show results. The docstring of a command is its help text."""

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..defenses import DEFENSES
from ..report import paper, tables
from ..sim import flat_table, results
from ..sim.options import axis, grid
from ..sim.outcome import Outcome
from . import calibrate
from .errors import say
from .lists import print_list
from .names import picture_name
from .options import OUT, explicit_settings
from .simulate import outcomes_of, results_file, settings_of, simulate, tuned, watched

# `secureafl compare` without flags: no download, a few minutes on two cores.
COMPARED = ("async-sgd", "zeno++", "secureafl-support")
COMPARED_UNDER = "gaussian"
UNDEFENDED = calibrate.UNDEFENDED


def run(arguments: argparse.Namespace) -> None:
    """one run: progress, a summary, a curve"""
    from ..report import console

    wanted = tuned([settings_of(arguments)], arguments)
    with watched(arguments, wanted[0]) as look:
        outcomes = outcomes_of(wanted, arguments, ["attack", "defense"], look)
        settings = outcomes[0].settings
        used = ("dataset", "attack", "defense")
        name = picture_name("run", [getattr(settings, each) for each in used], explicit_settings(arguments), used)
        _present(outcomes, arguments, ["attack", "defense"], console.curves, name)


def compare(arguments: argparse.Namespace) -> None:
    """defenses side by side under one attack; without flags a short example on the embedded data"""
    from ..report import console

    base = settings_of(arguments)
    names = list(DEFENSES) if arguments.defenses == "all" else arguments.defenses.split(",")
    many = [replace(base, defense=name) for name in names]
    if base.attack != "none":  # the baseline
        many.append(replace(base, attack="none", defense=UNDEFENDED))
    outcomes = outcomes_of(tuned(many, arguments), arguments, ["attack", "defense"])
    others = [] if names == list(COMPARED) else [arguments.defenses]
    parts, used = [base.dataset, base.attack, *others], ("dataset", "attack")
    name = picture_name("compare", parts, explicit_settings(arguments), used)
    _present(outcomes, arguments, ["attack", "defense"], console.curves, name)
    print(console.sentence(outcomes))


def sweep(arguments: argparse.Namespace) -> None:
    """one setting over a list of values, or a grid of several settings"""
    from ..report import console

    base, axes = settings_of(arguments), dict(map(axis, arguments.axes))
    flags = explicit_settings(argparse.Namespace(**vars(arguments) | {"config": None}))
    for name in axes:
        field, dot, inner = name.partition(".")
        given = flags.get(field, {}) if dot else flags
        if (inner or field) in given:
            raise ValueError(f"{name} must not have a flag, the sweep varies it, got {given[inner or field]!r}")
    outcomes = outcomes_of(tuned(grid(base, axes), arguments), arguments, list(axes))
    used = [*axes, *(name for name in ("dataset", "attack", "defense") if name not in axes)]
    parts = [*axes, *(str(getattr(base, name)) for name in used if name not in axes)]
    name = picture_name("sweep", parts, explicit_settings(arguments), used)
    _present(outcomes, arguments, list(axes), console.against, name)


def calibration(arguments: argparse.Namespace) -> None:
    """fit the attack strengths that the paper does not state to its results without a defense"""
    from ..report import console

    base = settings_of(arguments)
    attacks = arguments.attacks.split(",") if arguments.attacks else calibrate.free()
    records = simulate(calibrate.trials(base, attacks), arguments, ["attack", "attack_options"])
    report = calibrate.report(records)
    kept = Path(arguments.out) / f"calibration-{base.dataset}.json"
    results.write_whole(kept, report)
    console.print_table([record.outcome for record in records], ["attack", "attack_options"])
    for name, choice in report["chosen"].items():
        print(f"{name}: {console.format_value(choice['options'])}, {choice['distance']:.3f} from the paper")
    print(f"Results: {results_file(arguments)}, {kept}")


def paper_tables(arguments: argparse.Namespace) -> None:
    """the paper's tables and figures from scratch, beside its own numbers"""
    if arguments.list:
        print_list(
            "tables", [(name, f"{table.about} [{', '.join(table.datasets)}]") for name, table in paper.TABLES.items()]
        )
        return
    from ..report import markdown

    explicit, only, out = explicit_settings(arguments), dict(map(axis, arguments.only)), Path(arguments.out)
    names = paper.select_tables(arguments.table, explicit.get("dataset", arguments.base.dataset), only)
    plans = [tables.plan_table(name, arguments.base, explicit, only, arguments.seeds) for name in names]
    publish = partial(markdown.publish, out, shlex.join(["secureafl", *arguments.argv]))
    for plan in plans:
        tables.make_table(plan, lambda many, varied: simulate(many, arguments, varied), publish, out)
        print(f"{plan.name}: {out / plan.file}.md")


def report(arguments: argparse.Namespace) -> None:
    """one HTML page of a results folder: tables, pictures, configuration"""
    from ..report import page

    folder = Path(arguments.folder)
    print(f"Report: {page.write(folder, Path(arguments.html or folder / 'report.html'))}")


def curves(arguments: argparse.Namespace) -> None:
    """the curves of recorded runs, a panel per attack, beside the paper's final results"""
    from ..report import curves as report

    folders, only = [Path(folder) for folder in arguments.folders or [OUT]], dict(map(axis, arguments.only))
    for folder in folders:
        _need_results(folder)
    records = [record for folder in folders for record in results.read(folder / results.NAME)]
    picture = Path(arguments.png or folders[0] / report.NAME)
    report.draw(picture, report.select(records, only))
    print(f"Curves: {picture}")


def show_results(arguments: argparse.Namespace) -> None:
    """the runs of a results folder as a table, as CSV or as Parquet, one row per run"""
    _need_results(Path(arguments.folder))
    records = results.read(Path(arguments.folder) / results.NAME)
    if arguments.parquet:
        flat_table.write_parquet(Path(arguments.parquet), records)
        say(f"{len(records)} runs: {arguments.parquet}")
    if arguments.csv == "-":
        flat_table.write_csv(sys.stdout, records)
    elif arguments.csv:
        with open(arguments.csv, "w", newline="", encoding="utf-8") as target:
            flat_table.write_csv(target, records)
        say(f"{len(records)} runs: {arguments.csv}")
    if not (arguments.csv or arguments.parquet):
        from ..report import console

        console.print_table([record.outcome for record in records], ["dataset", "attack", "defense", "seed"])


def _need_results(folder: Path) -> None:
    if not (folder / results.NAME).exists():
        raise ValueError(f"FOLDER must have a {results.NAME}, got {str(folder)!r}")


def _present(
    outcomes: list[Outcome],
    arguments: argparse.Namespace,
    varied: list[str],
    draw: Callable[[Path, list[Outcome], list[str]], None],
    name: str,
) -> None:
    from ..report import console

    picture = Path(arguments.out) / name
    draw(picture, outcomes, varied)
    console.print_table(outcomes, varied)
    for note in console.divergence_notes(outcomes, varied):
        print(note)
    print(f"Results: {results_file(arguments)}, {picture}")
