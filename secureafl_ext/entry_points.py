"""Entry points: installed packages that register something when it is first needed."""

import threading
import warnings
from importlib.metadata import EntryPoint, entry_points

from .validation import shown

_loaded: set[str] = set()
_lock = threading.RLock()  # reentrant: a plug-in may make a server


def load_entry_points(group: str) -> None:
    """Call every entry point of a group, once per process. Each names a function without arguments that registers.

    A plug-in that fails gives a warning and nothing else.
    """
    with _lock:
        if group in _loaded:
            return
        _loaded.add(group)
        for point in entry_points(group=group):
            _call(point)


def _call(point: EntryPoint) -> None:
    try:
        function = point.load()
        if not callable(function):
            raise TypeError(f"the entry point must name a function, got {shown(function)}")
        function()
    except Exception as error:
        package = point.dist.name if point.dist else "unknown"
        problem = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"plug-in {point.name!r} of package {package!r} ({point.group}: {point.value}) failed: {problem}",
            RuntimeWarning,
            stacklevel=2,
        )
