"""Flags of the command line: one for each setting, and those that the simulating commands share."""

import argparse
from typing import Any

from ..sim.options import HELP, KINDS, OPTIONS, from_toml, option, parse
from ..sim.settings import CHOICES, Settings

OUT = "secureafl-results"


def add_settings(parser: argparse.ArgumentParser, base: Settings, without: tuple[str, ...] = ()) -> None:
    """A flag for every setting except `without`; `base` has the defaults of this command."""
    parser.set_defaults(base=base)
    parser.add_argument("--config", metavar="FILE.toml", help="TOML file of settings, named like the flags; flags win")
    parser.add_argument("--out", default=OUT, help="folder for results and pictures (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="run again even if the results file has the run")
    about = "take runs of the results file that other versions of the code made, too"
    parser.add_argument("--any-code", action="store_true", help=about)
    about = "number of worker processes (default: one run at a time; on a GPU eight, in threads)"
    parser.add_argument("--processes", type=int, default=1, help=about)
    parser.add_argument("--tensorboard", metavar="DIR", help="write the curves as TensorBoard event files too")
    group = parser.add_argument_group("settings")
    for name in (name for name in KINDS if name not in without):
        flag, kind, about = f"--{name.replace('_', '-')}", KINDS[name], HELP[name]
        if name in OPTIONS:
            about += f"; may be repeated; see `secureafl list {OPTIONS[name][0]}s`"
            # --attack-option is the usual name, --attack-options the name of the setting.
            group.add_argument(flag[:-1], flag, dest=name, action="append", metavar="NAME=VALUE", help=about)
        elif kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=about)
        else:
            choices = f"; one of {', '.join(CHOICES[name])}" if name in CHOICES else ""
            default = "" if getattr(base, name) is None else f" (default: {getattr(base, name)})"
            group.add_argument(flag, metavar=kind.__name__.upper(), help=about + choices + default)


def add_untuned(parser: argparse.ArgumentParser) -> None:
    about = "use the compared defenses' own defaults instead of the options that were tuned on held-out data"
    parser.add_argument("--untuned", action="store_true", help=about)


def explicit_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings from the file, overridden by the flags. Options are merged one by one."""
    result: dict[str, Any] = from_toml(arguments.config) if arguments.config else {}
    for name in KINDS:
        value = getattr(arguments, name, None)
        if name in OPTIONS and value:
            result[name] = result.get(name, {}) | dict(map(option, value))
        elif value is not None:
            result[name] = value if isinstance(value, bool) else parse(name, value)
    return result
