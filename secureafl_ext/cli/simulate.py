"""From the flags of a command to finished runs: settings, progress, the results file."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..defenses.tuned import tuned_options
from ..sim import loop, results, runner
from ..sim.options import prepare, with_tuned_options
from ..sim.outcome import Outcome, Point
from ..sim.results import Record
from ..sim.settings import Settings
from .errors import say
from .options import explicit_settings

Look = Callable[[loop.Rounds, Point], None]


def results_file(arguments: argparse.Namespace) -> Path:
    return Path(arguments.out) / results.NAME


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The defaults of the command, then the explicit settings."""
    return replace(arguments.base, **explicit_settings(arguments))


def tuned(many: list[Settings], arguments: argparse.Namespace) -> list[Settings]:
    """The runs with the tuned options of their defenses, unless --untuned. Explicit options win."""
    return many if arguments.untuned else [with_tuned_options(settings) for settings in many]


def say_tuned(wanted: Sequence[Settings]) -> None:
    """Tell the user which tuned options these runs have."""
    used = {
        f"{settings.defense} {name}={value}": None
        for settings in wanted
        for name, value in tuned_options(settings.defense, settings.dataset).items()
        if settings.defense_options.get(name) == value
    }
    if used:
        say(f"tuned options: {', '.join(used)}; --untuned uses the defaults of each defense")


def outcomes_of(
    many: list[Settings], arguments: argparse.Namespace, varied: list[str], look: Look | None = None
) -> list[Outcome]:
    return [record.outcome for record in simulate(many, arguments, varied, look=look)]


@contextmanager
def watched(arguments: argparse.Namespace, settings: Settings) -> Iterator[Look | None]:
    """The live page of --watch, and the callback of `loop.run` for it; None without the flag."""
    if arguments.watch is None:
        yield None
        return
    if arguments.processes != 1:
        raise ValueError(f"--watch needs --processes 1, got {arguments.processes}")
    from ..sim.live import Live

    title = f"{settings.dataset}, {settings.attack} against {settings.defense}"
    with Live(title, arguments.watch) as live:
        say(f"page: {live.page.url}")
        yield live.look
        live.view.close()
        if sys.stdin is not None and sys.stdin.isatty():
            with suppress(KeyboardInterrupt, EOFError):
                input("The run has ended. The page stays until you press Enter. ")


def simulate(
    many: list[Settings],
    arguments: argparse.Namespace,
    varied: list[str],
    quiet: bool = False,
    look: Look | None = None,
) -> list[Record]:
    """The records of these runs, in order. Runs that this code made and the results file has are not repeated.

    quiet: say nothing about tuned options and known runs, for a search that calls this again and again
    look: of `loop.run`, if there is one run
    """
    from ..report import console
    from .progress import progress
    from .tensorboard import Board

    wanted, path = prepare(many, searched=quiet), results_file(arguments)
    results.ready(path.parent)
    board = Board(Path(arguments.tensorboard)) if arguments.tensorboard else None
    known = [] if arguments.fresh else results.read(path)
    records = results.find(known, wanted, arguments.any_code)
    missing = [i for i in range(len(wanted)) if i not in records]
    if "untuned" in arguments and not quiet:
        say_tuned(wanted)
    if records and not quiet:
        say(f"{len(records)} of {len(wanted)} runs are in {path} already; --fresh runs them again")
    if not quiet and (others := len(results.find(known, wanted, any_code=True)) - len(records)):
        say(f"{others} of {len(wanted)} runs are in {path}, by other code, and run again; --any-code takes them")
    if board:
        for record in records.values():
            board.whole(record.outcome)
    if missing:
        labels = [console.label(wanted[i], varied) for i in missing]
        with progress(labels, [wanted[i].rounds for i in missing]) as (show, finish):

            def watch(i: int, point: Point) -> None:
                show(i, point)
                if board:
                    board.point(wanted[missing[i]], point)

            def done(i: int, outcome: Outcome) -> None:
                records[missing[i]] = results.record(outcome)
                results.append(path, records[missing[i]])
                finish(i, outcome)
                if board:
                    board.finish(outcome)

            if look is None:
                runner.run_many([wanted[i] for i in missing], watch, done, arguments.processes)
            else:
                done(0, loop.run(wanted[missing[0]], partial(watch, 0), look=look))
    return [records[i] for i in range(len(wanted))]
