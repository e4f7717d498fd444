"""Registries: attacks, defenses and data sets by name, and the installed packages that add more.

A package adds to them through an entry point of one of the GROUPS. The entry point names a function without arguments.
The function calls `register_attack`, `register_defense` or `register_dataset`. It runs once, at the first look at any
registry. A plug-in is code and runs with all rights of the process: install only what you trust.
"""

import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter, Signature, signature
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

from .entry_points import PluginWarning, call_entry_point
from .validation import shown

GROUPS = ("secureafl.attacks", "secureafl.defenses", "secureafl.datasets")
# A name becomes part of file names and of comma-separated lists.
NAME = re.compile(r"[a-z0-9][a-z0-9+-]{0,39}")
PLAIN = (bool, int, float, str)  # types of an option that the command line can write

Entry = TypeVar("Entry")

_registries: list["Registry[Any]"] = []
_lock = threading.RLock()  # reentrant: a plug-in may read a registry while it registers
_loaded = False


class Registry(Mapping[str, Entry]):
    """Entries by name: the built-in ones, then the registered ones, in the order of registration.

    The first look loads the installed plug-ins.
    """

    def __init__(self, kind: str, built_in: Mapping[str, Entry]):
        self.kind = kind
        self._built_in, self._added = dict(built_in), dict[str, Entry]()
        _registries.append(self)

    def __getitem__(self, name: str) -> Entry:
        load_plugins()
        return self._added[name] if name in self._added else self._built_in[name]

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter([*self._built_in, *self._added])

    def __len__(self) -> int:
        load_plugins()
        return len(self._built_in) + len(self._added)

    def add(self, name: str, entry: Entry) -> None:
        """Register a new name. Nothing can replace a built-in entry or one that another package registered."""
        who = f"register_{self.kind}"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{who}: name must be 1 to 40 of a-z, 0-9, + and -, a letter or digit first, got {name!r}")
        if name == "all" or name.startswith("secureafl"):
            raise ValueError(f"{who}: name must not be 'all' or begin with 'secureafl', got {name!r}")
        with _lock:
            for taken, owner in ((self._built_in, "built in"), (self._added, "registered already")):
                if name in taken:
                    raise ValueError(f"{who}: name must be new, got {name!r}, which is {owner}")
            self._added[name] = entry

    def remove(self, name: str) -> None:
        """Undo a registration, for example to register a changed version in a notebook."""
        if name not in self._added:
            known = ", ".join(self._added) or "nothing"
            raise ValueError(f"remove: name must be a registered {self.kind} ({known}), got {shown(name)}")
        del self._added[name]


def load_plugins() -> None:
    """Call each installed entry point once. A broken one is left out, and a warning names it."""
    global _loaded
    with _lock:
        if _loaded:
            return
        _loaded = True
        # One function may stand in several groups.
        points = {point.value: point for group in GROUPS for point in entry_points(group=group)}
        problems = [problem for point in points.values() if (problem := _register(point))]
    for problem in problems:
        warnings.warn(problem, PluginWarning, stacklevel=3)


def _register(point: EntryPoint) -> str | None:
    """Call one entry point. If it fails, undo all that it registered and return the problem."""
    before = [dict(registry._added) for registry in _registries]
    problem = call_entry_point(point)
    if problem:
        for registry, added in zip(_registries, before, strict=True):
            registry._added = added
    return problem


# The arguments of register_attack, register_defense and register_dataset


class Options(NamedTuple):
    """The options of a factory: its keyword-only parameters."""

    defaults: dict[str, object]
    optional: dict[str, type]  # types of the options whose default is None


def options_of(factory: Callable[..., object]) -> Options:
    keywords = [p for p in _signature(factory).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    return Options({p.name: p.default for p in keywords}, optional_types({p.name: p.annotation for p in keywords}))


def optional_types(annotations: Mapping[str, object]) -> dict[str, type]:
    """Of those that are annotated `T | None` with a plain type T: T by name."""
    unions = {name: get_args(hint) for name, hint in annotations.items() if get_origin(hint) in (UnionType, Union)}
    types = {name: [kind for kind in kinds if kind is not NoneType] for name, kinds in unions.items()}
    return {name: kinds[0] for name, kinds in types.items() if len(kinds) == 1 and kinds[0] in PLAIN}


def check_factory(who: str, factory: object, arguments: tuple[str, ...]) -> None:
    """Refuse a factory that cannot be called with these positional arguments, or an option without a default."""
    expected = f"{who}: factory must be callable as factory({', '.join(arguments)}, *, options with defaults)"
    if not callable(factory):
        raise ValueError(f"{expected}, got {shown(factory)}")
    try:
        found = _signature(factory)
        found.bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected}, got {shown(factory)}: {error}") from None


def check_about(who: str, about: object) -> None:
    if not isinstance(about, str) or not about.isprintable() or not 1 <= len(about) <= 200:
        raise ValueError(f"{who}: about must be one line of 1 to 200 printable characters, got {shown(about)}")


def _signature(factory: Callable[..., object]) -> Signature:
    try:
        return signature(factory, eval_str=True)  # annotations may be text, by `from __future__ import annotations`
    except NameError:  # a name that only a type checker imports
        return signature(factory)
