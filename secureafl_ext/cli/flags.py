"""Settings on the command line: a flag for each, and what was given of them."""

import argparse

from ..sim.options import HELP, KINDS, OPTIONS, from_toml, option, parse
from ..sim.settings import CHOICES, Settings

OUT = "secureafl-results"


def add(parser: argparse.ArgumentParser, base: Settings, without: tuple[str, ...] = ()) -> None:
    parser.set_defaults(base=base)
    parser.add_argument("--config", metavar="FILE.toml", help="settings by the names of the flags; flags win")
    parser.add_argument("--out", default=OUT, help="folder for results and pictures (default: %(default)s)")
    about = "so many runs at a time, in processes of their own (default: one; on a GPU eight, in threads)"
    parser.add_argument("--processes", type=int, default=1, help=about)
    group = parser.add_argument_group("settings")
    for name in (name for name in KINDS if name not in without):
        flag, kind, about = f"--{name.replace('_', '-')}", KINDS[name], HELP[name]
        if name in OPTIONS:
            about += f", as often as needed; see `secureafl list {OPTIONS[name][0]}s`"
            # Also without the s, as it gives one option at a time.
            group.add_argument(flag[:-1], flag, dest=name, action="append", metavar="NAME=VALUE", help=about)
        elif kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=about)
        else:
            choices = f"; one of {', '.join(CHOICES[name])}" if name in CHOICES else ""
            default = "" if getattr(base, name) is None else f" (default: {getattr(base, name)})"
            group.add_argument(flag, metavar=kind.__name__.upper(), help=about + choices + default)


def given(arguments: argparse.Namespace) -> dict[str, object]:
    """By the file, then by the flags; options one by one."""
    result = from_toml(arguments.config) if arguments.config else {}
    for name in KINDS:
        value = getattr(arguments, name, None)
        if name in OPTIONS and value:
            result[name] = result.get(name, {}) | dict(map(option, value))
        elif value is not None:
            result[name] = value if isinstance(value, bool) else parse(name, value)
    return result
