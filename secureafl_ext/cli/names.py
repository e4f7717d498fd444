"""Names of files and folders: different settings get different names."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from ..sim.results import dumps
from ..sim.settings import Resolved, recorded

LONGEST = 120  # characters
PLACE = ("data_dir", "device")  # settings that do not change the result


def picture_name(command: str, parts: Iterable[str], explicit: dict[str, Any], used: Iterable[str]) -> str:
    """COMMAND-PART-PART-..-SETTING=VALUE.png, with the explicit settings that no part names (not in `used`)."""
    others = [
        f"{inner}={value}"
        for name, setting in explicit.items()
        if name not in (*used, *PLACE)
        for inner, value in (setting.items() if isinstance(setting, dict) else [(name, setting)])
    ]
    return _short("-".join([command, *parts, *others])) + ".png"


def run_name(settings: Resolved) -> str:
    """Readable, and with a checksum of all settings, so that two runs never share it."""
    checksum = hashlib.sha256(dumps(recorded(vars(settings))).encode()).hexdigest()[:8]
    return _safe(f"{settings.dataset}-{settings.attack}-{settings.defense}-seed={settings.seed}-{checksum}")


def _short(name: str) -> str:
    name = _safe(name)
    if len(name) <= LONGEST:
        return name
    checksum = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST - 9]}-{checksum}"


def _safe(name: str) -> str:
    return re.sub(r"[^\w.,=+-]", "_", name)
