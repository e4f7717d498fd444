"""`secureafl`: settings in, results out. Flags and TOML keys are the fields of Settings."""

import argparse
import inspect
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from ..defenses import DEFENSES
from ..report import paper, tables
from ..sim import results, runner
from ..sim.loop import Outcome
from ..sim.options import CALLED, HELP, KINDS, OPTIONS, axis, grid, knobs, prepare
from ..sim.results import Record
from ..sim.settings import ARRIVALS, PARTITIONS, Settings
from ..tasks import datasets
from ..tasks.models import MODELS
from . import calibrate, errors, flags

# What `secureafl compare` shows a newcomer: no download, under two minutes on two cores.
COMPARED = ("async-sgd", "zeno++", "secureafl-kin")
COMPARED_UNDER = "gaussian"
UNDEFENDED = calibrate.UNDEFENDED
NO_FLAGS = ("command", "parser", "argv", "base", "axes", "what", "folder")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    try:
        arguments = _arguments(argv)
    except SystemExit as stop:  # argparse has said why: help, or what it cannot read
        return stop.code
    try:
        arguments.command(arguments)
    except KeyboardInterrupt:
        if arguments.command in (compare, sweep, calibration, paper_tables):
            _say(f"interrupted; finished runs are in {_file(arguments)}, the same command goes on from there")
        else:
            _say("interrupted; nothing is kept, start it again")
        return 130
    except Exception as error:
        said = errors.words(error)
        if said is None:
            raise
        _say(said)
        return 2
    return 0


def run(arguments: argparse.Namespace) -> None:
    """one setting: the error as it goes, a summary, a curve"""
    from ..report import console

    outcomes = _outcomes([_settings(arguments)], arguments, ["attack", "defense"], again=True)
    settings = outcomes[0].settings
    _present(
        outcomes, arguments, ["attack", "defense"], console.curves, f"run-{settings.attack}-{settings.defense}.png"
    )


def compare(arguments: argparse.Namespace) -> None:
    """defenses side by side under one attack; without flags a tour on embedded data"""
    from ..report import console

    base = _settings(arguments)
    names = DEFENSES if arguments.defenses == "all" else arguments.defenses.split(",")
    many = [replace(base, defense=name) for name in names]
    if base.attack != "none":  # what the attacked ones are held against
        many.append(replace(base, attack="none", defense=UNDEFENDED))
    outcomes = _outcomes(many, arguments, ["attack", "defense"])
    _present(outcomes, arguments, ["attack", "defense"], console.curves, f"compare-{base.attack}.png")
    print(console.sentence(outcomes))


def sweep(arguments: argparse.Namespace) -> None:
    """a setting over a list of values, or a grid of several"""
    from ..report import console

    axes = dict(map(axis, arguments.axes))
    outcomes = _outcomes(grid(_settings(arguments), axes), arguments, list(axes))
    _present(outcomes, arguments, list(axes), console.against, f"sweep-{'-'.join(axes)}.png")


def calibration(arguments: argparse.Namespace) -> None:
    """strengths that the paper leaves open, fitted to its results without a defense"""
    from ..report import console

    base = _settings(arguments)
    attacks = arguments.attacks.split(",") if arguments.attacks else calibrate.free()
    records = _simulate(calibrate.trials(base, attacks), arguments, ["attack", "attack_options"])
    report = calibrate.report(records)
    kept = Path(arguments.out) / f"calibration-{base.dataset}.json"
    results.write_whole(kept, report)
    console.tell(console.table([record.outcome for record in records], ["attack", "attack_options"]))
    for name, choice in report["chosen"].items():
        print(f"{name}: {console.words(choice['options'])}, {choice['distance']:.3f} from the paper")
    print(f"Results: {_file(arguments)}, {kept}")


def paper_tables(arguments: argparse.Namespace) -> None:
    """the paper's tables and figures from scratch, beside its own numbers"""
    if arguments.list:
        _print_list(
            "tables", [(name, f"{table.about} [{', '.join(table.datasets)}]") for name, table in paper.TABLES.items()]
        )
        return
    from ..report import markdown

    given, only, out = flags.given(arguments), dict(map(axis, arguments.only)), Path(arguments.out)
    names = paper.select_tables(arguments.table, given.get("dataset", arguments.base.dataset), only)
    plans = [tables.plan_table(name, arguments.base, given, only, arguments.seeds) for name in names]
    publish = partial(markdown.publish, out, shlex.join(["secureafl", *arguments.argv]))
    for plan in plans:
        tables.make_table(plan, lambda many, varied: _simulate(many, arguments, varied), publish, out)
        print(f"{plan.name}: {out / plan.file}.md")


def report(arguments: argparse.Namespace) -> None:
    """one HTML page of a results folder: tables, pictures, configuration"""
    from ..report import page

    folder = Path(arguments.folder)
    print(f"Report: {page.write(folder, Path(arguments.html or folder / 'report.html'))}")


def show_list(arguments: argparse.Namespace) -> None:
    """what there is to choose from, one line each"""
    for what in LISTS if arguments.what is None else [arguments.what]:
        _print_list(what, LISTS[what]())


def _print_list(what: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print(f"{what}:")
    for name, about in rows:
        print(f"  {name:<{width}}  {about}")


def show_data(arguments: argparse.Namespace) -> None:
    """which data sets were found where, and how to get the others"""
    places, found = datasets.places(arguments.data_dir), datasets.found(arguments.data_dir)
    print("looked in:")
    for name, path in places:
        print(f"  {name if name in datasets.USUAL else f'{path} ({name})'}{'' if path.is_dir() else ': not there'}")
    print("data sets:")
    for name, source in datasets.SOURCES.items():
        copies = [f"{copy.format} in {copy.folder}" for copy in found if copy.name == name]
        print(f"  {name}: {'; '.join(copies) or f'missing. To get it: {source.hint}'}")
    print(f"Another place: --data-dir, or the variable {datasets.VARIABLE}.")


def _with_options(field: str) -> list[tuple[str, str]]:
    rows = []
    for name, entry in OPTIONS[field][1].items():
        options = ", ".join(f"{key}={value}" for key, value in knobs(field, name).items())
        rows.append((name, f"{entry.about} [{options}]" if options else entry.about))
    return rows


def _settings_list() -> list[tuple[str, str]]:
    rows = []
    for field in fields(Settings):
        default = "" if field.name in OPTIONS or field.default is None else f", {field.default}"
        rows.append((field.name, f"{HELP[field.name]} ({CALLED[KINDS[field.name]]}{default})"))
    return rows


LISTS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "attacks": lambda: _with_options("attack_options"),
    "defenses": lambda: _with_options("defense_options"),
    "datasets": lambda: [(name, source.about) for name, source in datasets.SOURCES.items()],
    "models": lambda: [(name, (inspect.getdoc(make) or "").partition("\n")[0]) for name, make in MODELS.items()],
    "arrivals": lambda: list(ARRIVALS.items()),
    "partitions": lambda: list(PARTITIONS.items()),
    "settings": _settings_list,
}


def _outcomes(
    many: list[Settings], arguments: argparse.Namespace, varied: list[str], again: bool = False
) -> list[Outcome]:
    return [record.outcome for record in _simulate(many, arguments, varied, again)]


def _simulate(
    many: list[Settings], arguments: argparse.Namespace, varied: list[str], again: bool = False
) -> list[Record]:
    """In that order. What the results file has is not run, unless `again`; all that runs is added to it."""
    from ..report import console

    wanted, path = prepare(many, _say), _file(arguments)
    results.ready(path.parent)
    known = [] if again else results.read(path, _say)
    records = {
        i: record for i, settings in enumerate(wanted) for record in known if record.outcome.settings == settings
    }
    rest = [i for i in range(len(wanted)) if i not in records]
    if records:
        _say(f"{len(records)} of {len(wanted)} runs are in {path} already")
    if rest:
        labels = [console.label(wanted[i], varied) for i in rest]
        with console.live(labels, [wanted[i].rounds for i in rest]) as (watch, finish):

            def done(i: int, outcome: Outcome) -> None:
                records[rest[i]] = results.record(outcome)
                results.append(path, records[rest[i]])
                finish(i, outcome)

            runner.run_many([wanted[i] for i in rest], watch, done, arguments.processes)
    return [records[i] for i in range(len(wanted))]


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
    console.tell(console.table(outcomes, varied))
    print(f"Results: {_file(arguments)}, {picture}")


def _settings(arguments: argparse.Namespace) -> Settings:
    """The command's own defaults, then what is given."""
    return replace(arguments.base, **flags.given(arguments))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("secureafl", description="Asynchronous federated learning under attack.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], None], usage: str) -> argparse.ArgumentParser:
        about = function.__doc__
        made = commands.add_parser(name, help=about, description=about.capitalize() + ".", allow_abbrev=False)
        made.usage = f"secureafl {name} {usage}"  # argparse's own would list every setting
        made.set_defaults(command=function, parser=made)
        return made

    flags.add(add("run", run, "[flags]"), Settings())

    made = add("compare", compare, "[flags]")
    made.add_argument("--defenses", default=",".join(COMPARED), help="with commas, or all (default: %(default)s)")
    flags.add(made, Settings(attack=COMPARED_UNDER), without=("defense",))

    made = add("sweep", sweep, "NAME=VALUE,VALUE,.. [NAME=..] [flags]")
    made.add_argument("axes", nargs="+", metavar="NAME=VALUE,VALUE,..", help="for instance malicious=0,0.1,0.2")
    flags.add(made, Settings())

    made = add("calibrate", calibration, "[flags]")
    made.add_argument("--attacks", help="with commas (default: those of free strength)")
    undefended = Settings(dataset=next(iter(calibrate.TARGETS)), defense=UNDEFENDED)
    flags.add(made, undefended, without=("attack", "defense", "defense_options"))

    made = add("paper", paper_tables, "--list | [--table NAME] [--seeds N] [--only NAME=VALUE,VALUE,..] [flags]")
    made.add_argument("--list", action="store_true", help="name them all and do nothing")
    made.add_argument("--table", default="main", help="or all those of the data set (default: %(default)s)")
    made.add_argument("--seeds", type=int, default=1, help="runs per cell: seeds 0 to N - 1 (default: %(default)s)")
    made.add_argument("--only", action="append", default=[], help="other values for what a table varies")
    flags.add(made, Settings(dataset=paper.FASHION), without=("seed",))

    made = add("report", report, "FOLDER [--html FILE]")
    made.add_argument("folder", metavar="FOLDER", help="what --out was")
    made.add_argument("--html", metavar="FILE", help="where to write it (default: FOLDER/report.html)")

    add("list", show_list, f"[{'|'.join(LISTS)}]").add_argument("what", nargs="?", choices=LISTS)
    add("data", show_data, "[--data-dir FOLDER]").add_argument("--data-dir", help=HELP["data_dir"])

    argv = sys.argv[1:] if argv is None else argv
    arguments, unknown = parser.parse_known_args(argv, argparse.Namespace(argv=argv))
    if arguments.command is sweep:  # argparse takes no positional after a flag
        arguments.axes += [text for text in unknown if not text.startswith("-")]
        unknown = [text for text in unknown if text.startswith("-")]
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in vars(arguments) if name not in NO_FLAGS]
        arguments.parser.error(f"unknown argument {unknown[0]!r}; choose from {', '.join(known)}")
    return arguments


def _file(arguments: argparse.Namespace) -> Path:
    return Path(arguments.out) / results.NAME


def _say(text: str) -> None:
    print(f"secureafl: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
