"""Finished runs as JSON lines: one line is all that is needed to tell what was run, on what, and what came of it."""

import fcntl
import json
import math
import os
import platform
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import IO

import numpy
import torch

import secureafl_ext

from .. import bounded_files
from .loop import Outcome, Point
from .options import CALLED, KINDS, fits
from .settings import Settings

NAME = "results.jsonl"
MOST = 2**30  # bytes of such a file; a run takes a few thousand
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
    """One more line, on the disk when this returns. What a crash left of a line is cut off first.

    Any number of processes may append to one file: the lock lets them in one after the other.
    """
    line = dumps(flat(new)).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file, locked(file, fcntl.LOCK_EX):
        rest = _last_line(file)
        end = file.seek(0, os.SEEK_END)
        if rest and _parsed(rest) is None:
            end -= len(rest)
            file.truncate(end)
            rest = b""
        try:
            # Only the newline was lost where the rest can be read.
            file.write((b"\n" if rest else b"") + line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:  # a full disk: no half line stays behind
            file.truncate(end)
            raise


@contextmanager
def locked(file: IO[bytes], kind: int) -> Iterator[None]:
    """Waits for other processes. The system unlocks the file when this one ends, however it ends."""
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _last_line(file: IO[bytes], step: int = 65536) -> bytes:
    """What stands after the last newline."""
    start = file.seek(0, os.SEEK_END)
    rest = b""
    while start and b"\n" not in rest:
        before, start = start, max(0, start - step)
        file.seek(start)
        rest = file.read(before - start) + rest
    return rest[rest.rfind(b"\n") + 1 :]


def ready(folder: Path) -> None:
    """Refuses a folder to which results could not be written, before they are computed."""
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file, locked(file, fcntl.LOCK_EX):
            pass
        if path.exists():
            bounded_files.need_file(path, MOST)
            with open(path, "ab+"):
                pass
    except OSError as error:
        raise ValueError(f"out must be a folder for results, got {str(folder)!r}: {error.strerror}") from error


def flat(kept: Record) -> dict[str, object]:
    """As it stands in a line: settings, curve, summary, started, commit, device, versions."""
    parts = asdict(kept)
    return parts.pop("outcome") | parts


def read(path: Path, warn: Callable[[str], None] = warnings.warn) -> list[Record]:
    """Every record, oldest first; none where there is no file. A damaged line is left out, with a warning."""
    if not path.exists():
        return []
    bounded_files.need_file(path, MOST)
    records = []
    with open(path, "rb") as file, locked(file, fcntl.LOCK_SH):  # no line is half written meanwhile
        for number, line in enumerate(file, 1):
            parts = _parsed(line)
            if parts is not None:
                records.append(_record(parts, f"{path}, line {number}"))
            elif line.endswith(b"\n"):
                warn(f"{path}, line {number} is damaged and does not count: no JSON object, but {line[:40]!r}")
            else:
                warn(f"{path}, line {number} is cut short and does not count; the next result replaces it")
    return records


def write_whole(path: Path, value: object) -> None:
    """A file of JSON that is there complete or not at all."""
    replace_text(path, dumps(value, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Whoever looks finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    with open(new, "x", encoding="utf-8") as file:  # never through a link that lies there
        file.write(text)
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
        made = Record(outcome, **parts)
        _check(made)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} was not written by this version ({error}); choose another folder") from None
    return made


def _check(record: Record) -> None:
    """Types alone; what reads a record takes them for granted."""
    settings, summary = record.outcome.settings, record.outcome.summary
    for name, kind in KINDS.items():
        _need(name, getattr(settings, name), kind, optional=True)
    for point in record.outcome.curve:
        _need("round", point.round, int)
        _need("error", point.error, float)
        _need("asr", point.asr, float, optional=True)
    _need("summary", summary, dict)
    _need("error", summary["error"], float)
    for name, value in summary.items():
        _need(name, value, bool if isinstance(value, bool) else float, optional=True)
    _need("versions", record.versions, dict)
    texts = {"started": record.started, "device": record.device, **record.versions}
    for name, text in texts.items():
        _need(name, text, str)
    _need("commit", record.commit, str, optional=True)


def _need(name: str, value: object, kind: type, optional: bool = False) -> None:
    if not fits(kind, value) and not (optional and value is None):
        raise TypeError(f"{name} must be {CALLED[kind]}")


def _parsed(line: bytes) -> dict | None:
    try:
        value = loads(line)
    except (ValueError, RecursionError):
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
