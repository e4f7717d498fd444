"""Entry points: installed packages that register something when it is first needed.

Each entry point names a function without arguments that registers. A plug-in is code and runs with all rights of the
process: install only what you trust.
"""

import threading
import warnings
from importlib.metadata import EntryPoint, entry_points

from .validation import printable, shown

_loaded: set[str] = set()
_lock = threading.RLock()  # reentrant: a plug-in may make a server


class PluginWarning(UserWarning):
    """An installed plug-in failed and was left out."""


def load_entry_points(group: str) -> None:
    """Call every entry point of a group, once per process. A broken one is left out, and a warning names it."""
    with _lock:
        if group in _loaded:
            return
        _loaded.add(group)
        problems = [problem for point in entry_points(group=group) if (problem := call_entry_point(point))]
    for problem in problems:
        warnings.warn(problem, PluginWarning, stacklevel=2)


def call_entry_point(point: EntryPoint) -> str | None:
    """Call one entry point. If it fails, the text of the problem: one printable line."""
    try:
        function = point.load()
        if not callable(function):
            raise TypeError(f"the entry point must be a function without arguments, got {shown(function)}")
        function()
    except (Exception, SystemExit) as error:  # a plug-in may raise anything, and must not end the program
        package = point.dist.name if point.dist else "unknown"
        text = " ".join(f"{type(error).__name__}: {error}"[:300].split())
        return f"plug-in {point.name!r} of the package {package!r} ({point.value}) is left out: {printable(text)}"
    return None
