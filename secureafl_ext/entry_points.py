"""Entry points: installed packages that register something when it is first needed.

Each entry point names a function without arguments that registers. A plug-in is code and runs with all rights of the
process: install only what you trust.
"""

import threading
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from .validation import printable, shown

# By group: notes what is registered, and returns a function that takes back what has been added since.
undo: dict[str, Callable[[], Callable[[], None]]] = {}

_loaded: set[str] = set()
_lock = threading.RLock()  # reentrant: a plug-in may make a server


class PluginWarning(UserWarning):
    """An installed plug-in failed and was left out."""


def load_entry_points(group: str) -> None:
    """Call every entry point of a group, once per process. A broken one is left out, with all that it registered, and a
    warning names it."""
    with _lock:
        if group in _loaded:
            return
        _loaded.add(group)
        problems = [problem for point in entry_points(group=group) if (problem := _register(group, point))]
    for problem in problems:
        warnings.warn(problem, PluginWarning, stacklevel=2)


def _register(group: str, point: EntryPoint) -> str | None:
    take_back = undo[group]() if group in undo else None
    problem = call_entry_point(point)
    if problem and take_back:
        take_back()
    return problem


def call_entry_point(point: EntryPoint) -> str | None:
    """Call one entry point. If it fails, the text of the problem: one printable line."""
    try:
        function = point.load()
        if not callable(function):
            raise TypeError(f"the entry point must be a function without arguments, got {shown(function)}")
        function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, CancelledError, ..: a plug-in must not end the program
        package = point.dist.name if point.dist else "unknown"
        text = " ".join(f"{type(error).__name__}: {error}"[:300].split())
        return f"plug-in {point.name!r} of the package {package!r} ({point.value}) is left out: {printable(text)}"
    return None
