"""`secureafl list` and `secureafl data`."""

import argparse
import inspect
from collections.abc import Callable
from dataclasses import fields

from ..sim.options import HELP, KINDS, OPTIONS, TYPE_NAMES, options_of
from ..sim.settings import ARRIVALS, PARTITIONS, Settings
from ..tasks import datasets
from ..tasks.models import MODELS


def show_list(arguments: argparse.Namespace) -> None:
    """all attacks, defenses, data sets, models and settings, one line each"""
    for what in LISTS if arguments.what is None else [arguments.what]:
        print_list(what, LISTS[what]())


def print_list(what: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print(f"{what}:")
    for name, about in rows:
        print(f"  {name:<{width}}  {about}")


def show_data(arguments: argparse.Namespace) -> None:
    """where each data set was found, and how to get the missing ones"""
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
        options = ", ".join(f"{key}={value}" for key, value in options_of(field, name).items())
        rows.append((name, f"{entry.about} [{options}]" if options else entry.about))
    return rows


def _settings() -> list[tuple[str, str]]:
    rows = []
    for field in fields(Settings):
        default = "" if field.name in OPTIONS or field.default is None else f", {field.default}"
        rows.append((field.name, f"{HELP[field.name]} ({TYPE_NAMES[KINDS[field.name]]}{default})"))
    return rows


LISTS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "attacks": lambda: _with_options("attack_options"),
    "defenses": lambda: _with_options("defense_options"),
    "datasets": lambda: [(name, source.about) for name, source in datasets.SOURCES.items()],
    "models": lambda: [(name, (inspect.getdoc(make) or "").partition("\n")[0]) for name, make in MODELS.items()],
    "arrivals": lambda: list(ARRIVALS.items()),
    "partitions": lambda: list(PARTITIONS.items()),
    "settings": _settings,
}
