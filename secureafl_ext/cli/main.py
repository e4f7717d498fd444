"""The command `secureafl`. Flags and TOML keys are the fields of Settings."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .. import __version__, build_info
from ..report import paper
from ..sim.options import HELP
from ..sim.runner import SIDE_BY_SIDE
from ..sim.settings import Settings
from . import audit, calibrate, errors
from .commands import (
    COMPARED,
    COMPARED_UNDER,
    UNDEFENDED,
    calibration,
    compare,
    curves,
    paper_tables,
    report,
    run,
    show_results,
    sweep,
)
from .lists import LISTS, show_data, show_list
from .options import OUT, add_settings, add_untuned
from .redteam import BUDGET, redteam
from .robustness import SEEDS, robustness
from .simulate import results_file
from .watch import add_flags, watch

NO_FLAGS = ("command", "parser", "argv", "base", "axes", "what", "folder", "folders")  # of the namespace
CONTINUE = (compare, sweep, calibration, paper_tables, redteam, robustness)  # commands of several runs

Command = Callable[[argparse.Namespace], int | None]


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 1 for a log that is broken or differs, 2 for a mistake of the user, 130 for Ctrl-C, 141 if the
    reader of the output has ended."""
    try:
        code = run_command(argv)
        sys.stdout.flush()  # now: Python's own flush at the end would print the error
        return code
    except BrokenPipeError:  # as in `secureafl list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's flush at the end
        return 141  # 128 + SIGPIPE, as a shell reports it


def run_command(argv: list[str] | None) -> int:
    try:
        arguments = parse_arguments(argv)
    except SystemExit as stop:  # argparse has printed the help or the mistake
        return stop.code if isinstance(stop.code, int) else 0
    try:
        with log_to_stderr():
            return arguments.command(arguments) or 0
    except KeyboardInterrupt:
        if arguments.command in CONTINUE:
            errors.say(
                f"interrupted; finished runs are in {results_file(arguments)}, the same command continues from there"
            )
        else:
            errors.say("interrupted; nothing is kept, start it again")
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        text = errors.message(error)
        if text is None:
            raise
        errors.say(text)
        return 2


class StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        errors.say(record.getMessage())


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Show the library's warnings like the messages of the command."""
    logger, handler = logging.getLogger("secureafl_ext"), StderrHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    arguments, unknown = parser.parse_known_args(argv, argparse.Namespace(argv=argv))
    if arguments.command is sweep:  # argparse takes no positional argument after a flag
        arguments.axes += [text for text in unknown if not text.startswith("-")]
        unknown = [text for text in unknown if text.startswith("-")]
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in vars(arguments) if name not in NO_FLAGS]
        arguments.parser.error(f"unknown argument {unknown[0]!r}; choose from {', '.join(known)}")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("secureafl", description="Asynchronous federated learning under attack.")
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Command, usage: str) -> argparse.ArgumentParser:
        about = (function.__doc__ or "").strip()
        description = f"{about[:1].upper()}{about[1:]}."  # capitalize() would lower the rest
        made = commands.add_parser(name, help=about, description=description, allow_abbrev=False)
        made.usage = f"secureafl {name} {usage}"  # argparse's own would list every setting
        made.set_defaults(command=function, parser=made)
        return made

    made = add("run", run, "[flags]")
    add_untuned(made)
    add_settings(made, Settings())
    made.add_argument("--watch", type=int, metavar="PORT", help="serve a live page of the run; 0: on a free port")

    made = add("compare", compare, "[flags]")
    about = "names with commas between them, or all (default: %(default)s)"
    made.add_argument("--defenses", default=",".join(COMPARED), help=about)
    add_untuned(made)
    add_settings(made, Settings(attack=COMPARED_UNDER), without=("defense",))

    made = add("sweep", sweep, "NAME=VALUE,VALUE,.. [NAME=..] [flags]")
    made.add_argument("axes", nargs="+", metavar="NAME=VALUE,VALUE,..", help="for instance malicious=0,0.1,0.2")
    add_untuned(made)
    add_settings(made, Settings())

    made = add("calibrate", calibration, "[flags]")
    about = "names with commas between them (default: the attacks whose strength the paper does not state)"
    made.add_argument("--attacks", help=about)
    undefended = Settings(dataset=next(iter(calibrate.TARGETS)), defense=UNDEFENDED)
    add_settings(made, undefended, without=("attack", "defense", "defense_options"))

    made = add("paper", paper_tables, "--list | [--table NAME] [--seeds N] [--only NAME=VALUE,VALUE,..] [flags]")
    made.add_argument("--list", action="store_true", help="list the tables and exit")
    made.add_argument("--table", default="main", help="a table, or all those of the data set (default: %(default)s)")
    made.add_argument("--seeds", type=int, default=1, help="runs per cell: seeds 0 to N - 1 (default: %(default)s)")
    made.add_argument("--only", action="append", default=[], help="other values for the rows or columns of the table")
    add_settings(made, Settings(dataset=paper.FASHION), without=("seed",))

    made = add("redteam", redteam, "--defense NAME [--budget RUNS] [--without NAME,NAME,..] [flags]")
    made.add_argument("--budget", type=int, default=BUDGET, help="runs of the search (default: %(default)s)")
    about = "runs that are proposed together and run side by side; another number searches another path"
    made.add_argument("--at-once", type=int, default=SIDE_BY_SIDE, help=f"{about} (default: %(default)s)")
    made.add_argument("--search-seed", type=int, default=0, help="seed of the search (default: %(default)s)")
    made.add_argument("--without", default="", help="settings and options that are not searched, for instance flood")
    add_untuned(made)
    add_settings(made, Settings(holdout=0.25), without=("attack", "seed"))

    made = add("robustness", robustness, "[--only NAME=VALUE,VALUE,..] [--seeds N] [flags]")
    made.add_argument("--seeds", type=int, default=SEEDS, help="runs per cell: seeds 0 to N - 1 (default: %(default)s)")
    made.add_argument("--only", action="append", default=[], help="other defenses or attacks: defense=NAME,NAME,..")
    made.add_argument("--redteam", metavar="FOLDER", help="results folder of `secureafl redteam` (default: --out)")
    add_settings(made, Settings(dataset=paper.FASHION), without=("seed",))

    made = add("report", report, "[FOLDER] [--html FILE]")
    made.add_argument("folder", nargs="?", default=OUT, metavar="FOLDER", help="the folder (default: %(default)s)")
    made.add_argument("--html", metavar="FILE", help="file to write (default: FOLDER/report.html)")

    made = add("curves", curves, "[FOLDER ..] [--only NAME=VALUE,VALUE,..] [--png FILE]")
    made.add_argument("folders", nargs="*", metavar="FOLDER", help=f"folders of results (default: {OUT})")
    about = "runs with these values of a setting; all need the same data set and number of rounds"
    made.add_argument("--only", action="append", default=[], help=about)
    made.add_argument("--png", metavar="FILE", help="file to write (default: curves.png in the first folder)")

    add_flags(add("watch", watch, "URL-or-FILE [--once] [--token TOKEN] [--host HOST] [--port PORT]"))

    made = add("results", show_results, "[FOLDER] [--csv FILE|-] [--parquet FILE]")
    made.add_argument("folder", nargs="?", default=OUT, metavar="FOLDER", help="the folder (default: %(default)s)")
    made.add_argument("--csv", metavar="FILE|-", help="write a CSV file, or to stdout with -")
    made.add_argument("--parquet", metavar="FILE", help="write a Parquet file (needs pandas and pyarrow)")

    audit.add_arguments(add("audit", audit.audit, audit.USAGE))

    add("list", show_list, f"[{'|'.join(LISTS)}]").add_argument("what", nargs="?", choices=LISTS)
    add("data", show_data, "[--data-dir FOLDER]").add_argument("--data-dir", help=HELP["data_dir"])
    return parser


def version() -> str:
    cuda = build_info()["cuda"]
    return f"secureafl {__version__} (torch {torch.__version__}, CUDA: {cuda or 'not built'})"


if __name__ == "__main__":
    sys.exit(main())
