"""Finished runs as JSON lines: one line is all that is needed to tell what was run, on what, and what came of it."""

import json
import math
import os
import platform
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import numpy
import torch

import secureafl_ext

from .loop import Outcome, Point
from .settings import Settings

NAME = "results.jsonl"
# JSON has no such numbers. They are written as these strings, wherever they stand, and read back as numbers.
NOT_FINITE = ("inf", "-inf", "nan")


@dataclass(frozen=True)
class Record:
    outcome: Outcome
    started: str  # UTC, ISO 8601
    commit: str | None  # of the package's source; None where that was an archive
    device: str
    versions: dict[str, str]


def record(outcome: Outcome) -> Record:
    """To be called when the run ends."""
    began = datetime.now(UTC) - timedelta(seconds=outcome.summary["seconds"])
    device = device_name(outcome.settings.device)
    return Record(outcome, began.isoformat(timespec="seconds"), commit(), device, versions())


def append(path: Path, new: Record) -> None:
    """One more line, on the disk when this returns. What a crash left of a line is cut off first."""
    line = dumps(flat(new))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        file.seek(0)
        before = file.read()
        whole = before.rfind(b"\n") + 1
        rest = before[whole:]
        if rest and _parsed(rest) is None:
            file.truncate(whole)
            rest = b""
        # Only the newline was lost where the rest can be read.
        file.write((b"\n" if rest else b"") + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def flat(kept: Record) -> dict[str, object]:
    """As it stands in a line: settings, curve, summary, started, commit, device, versions."""
    parts = asdict(kept)
    return parts.pop("outcome") | parts


def read(path: Path, warn: Callable[[str], None] = warnings.warn) -> list[Record]:
    """Every record, oldest first; none where there is no file. A last line that is cut short is left out."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        parts = _parsed(line)
        if parts is not None:
            records.append(_record(parts, f"{path}, line {number}"))
        elif number == len(lines):
            warn(f"{path}, line {number} is cut short and does not count; the next result replaces it")
        else:
            raise ValueError(f"{path}, line {number} must be a JSON object, got {line[:40]!r}")
    return records


def write_whole(path: Path, value: object) -> None:
    """A file of JSON that is there complete or not at all."""
    replace_text(path, dumps(value, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Whoever looks finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def dumps(value: object, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> object:
    return _numbers(json.loads(text))


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "secureafl_ext": secureafl_ext.__version__,
    }


def spell(versions: dict[str, str]) -> str:
    return " ".join(f"{name} {version}" for name, version in versions.items())


def device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


@cache
def commit() -> str | None:
    """`git describe` where git knows this very file: a package may be installed inside another checkout. Else that of
    the source it was built from.
    """
    git, here = ["git", "-C", str(Path(__file__).parent)], Path(__file__).name
    try:
        for command in (["ls-files", "--error-unmatch", here], ["describe", "--always", "--dirty"]):
            answer = subprocess.run(git + command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return secureafl_ext.build_info()["commit"]
    return answer.stdout.strip()


def _record(parts: dict, where: str) -> Record:
    try:
        curve = [Point(**point) for point in parts.pop("curve")]
        outcome = Outcome(Settings(**parts.pop("settings")), curve, parts.pop("summary"))
        return Record(outcome, **parts)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} was not written by this version ({error}); choose another folder") from None


def _parsed(line: bytes) -> dict | None:
    try:
        value = loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _numbers(value: object) -> object:
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return float(value) if value in NOT_FINITE else value
