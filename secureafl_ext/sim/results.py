"""Finished runs as JSON lines: one line has the settings, the curve, the summary, the device and the versions."""

import fcntl
import json
import logging
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy
import torch

import secureafl_ext

from .. import bounded_files
from ..validation import printable
from .code import code
from .loop import Outcome, Point
from .options import KINDS, TYPE_NAMES, fits
from .settings import ADDED, Resolved, Settings, recorded

log = logging.getLogger(__name__)

NAME = "results.jsonl"
MOST_BYTES = 2**30  # of a results file; a run takes a few thousand
MOST_BITS = 64  # of a whole number, as seeds have. Readers convert it to a float, which overflows at 1024 bits
# JSON has no such numbers: they are written as these strings, and read back as numbers.
NOT_FINITE = ("inf", "-inf", "nan")


@dataclass(frozen=True)
class Record:
    outcome: Outcome
    started: str  # UTC, ISO 8601
    commit: str | None  # of the package's source; None if it was built from an archive
    device: str
    versions: dict[str, str]
    code: str | None = None  # hash of the sources that it depends on; None in older records


def record(outcome: Outcome) -> Record:
    """The record of a run that has just ended."""
    began = datetime.now(UTC) - timedelta(seconds=outcome.summary["seconds"])
    device = device_name(outcome.settings.device)
    return Record(outcome, began.isoformat(timespec="seconds"), commit(), device, versions(), code())


def find(known: Sequence[Record], wanted: Sequence[Resolved], any_code: bool = False) -> dict[int, Record]:
    """The newest record of each run that has one, by its place in `wanted`: by this code, or by any. Where the data lie
    makes no difference."""
    by_run = {run_of(record.outcome.settings): record for record in known if any_code or record.code == code()}
    return {i: by_run[run_of(settings)] for i, settings in enumerate(wanted) if run_of(settings) in by_run}


def run_of(settings: Settings) -> object:
    """Equal for equal settings, without the place of the data."""
    return _hashable({name: value for name, value in vars(settings).items() if name != "data_dir"})


def _hashable(value: object) -> object:
    if isinstance(value, dict):
        return tuple((name, _hashable(inner)) for name, inner in sorted(value.items()))
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def append(path: Path, new: Record) -> None:
    """Append a line, and wait until it is on the disk. Cut off a partial line that a crash left.

    A lock lets any number of processes append to one file.
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
            # If the last line can be read, only its newline is missing.
            file.write((b"\n" if rest else b"") + line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:  # a full disk: leave no partial line
            file.truncate(end)
            raise


@contextmanager
def locked(file: IO[bytes], kind: int) -> Iterator[None]:
    """Wait for other processes. The system releases the lock if this process dies."""
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _last_line(file: IO[bytes]) -> bytes:
    """The text after the last newline."""
    start = file.seek(0, os.SEEK_END)
    rest = b""
    while start and b"\n" not in rest:
        before, start = start, max(0, start - 2**16)
        file.seek(start)
        rest = file.read(before - start) + rest
    return rest[rest.rfind(b"\n") + 1 :]


def ready(folder: Path) -> None:
    """Refuse a folder that cannot be written, before the runs."""
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file, locked(file, fcntl.LOCK_EX):
            pass
        if path.exists():
            bounded_files.need_file(path, MOST_BYTES)
            with open(path, "ab+"):
                pass
    except OSError as error:
        raise ValueError(f"out must be a folder for results, got {str(folder)!r}: {error.strerror}") from error


def flat(kept: Record) -> dict[str, Any]:
    """The content of a line: settings, curve, summary, started, commit, device, versions, code."""
    parts = asdict(kept)
    outcome = parts.pop("outcome")
    if kept.code is None:  # an older record stays as it was
        del parts["code"]
    return outcome | {"settings": recorded(outcome["settings"])} | parts


def read(path: Path, warn: Callable[[str], None] = log.warning) -> list[Record]:
    """All records, oldest first; an empty list without a file. A damaged line is left out, with a warning."""
    if not path.exists():
        return []
    bounded_files.need_file(path, MOST_BYTES)
    records = []
    with open(path, "rb") as file, locked(file, fcntl.LOCK_SH):  # no line is half written meanwhile
        for number, line in enumerate(file, 1):
            parts = _parsed(line)
            if parts is not None:
                records.append(_record(parts, f"{path}, line {number}"))
            elif line.endswith(b"\n"):
                warn(f"{path}, line {number} is damaged and is left out: expected a JSON object, got {line[:40]!r}")
            else:
                warn(f"{path}, line {number} is cut short and is left out; the next result replaces it")
    return records


def write_whole(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    replace_text(path, dumps(value, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    with open(new, "x", encoding="utf-8") as file:  # does not follow a link
        file.write(text)
    os.replace(new, path)


def dumps(value: object, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
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
    """`git describe`, if git tracks this file: a package may be installed inside another checkout. Otherwise the commit
    that the package was built from.
    """
    git, here = ["git", "-C", str(Path(__file__).parent)], Path(__file__).name
    try:
        for command in (["ls-files", "--error-unmatch", here], ["describe", "--always", "--dirty"]):
            answer = subprocess.run(git + command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return secureafl_ext.build_info()["commit"]
    return answer.stdout.strip()


def _record(parts: dict[str, Any], where: str) -> Record:
    try:
        curve = [Point(**point) for point in parts.pop("curve")]
        outcome = Outcome(Resolved(**ADDED | parts.pop("settings")), curve, parts.pop("summary"))
        made = Record(outcome, **parts)
        _check(made)
    except (KeyError, TypeError) as error:
        why = printable(str(error), 200)  # with names from the file
        raise ValueError(f"{where} was not written by this version ({why}); choose another folder") from None
    return made


def _check(record: Record) -> None:
    """Check the types, which the readers of a record rely on."""
    settings, summary = record.outcome.settings, record.outcome.summary
    for name, kind in KINDS.items():
        _need(name, getattr(settings, name), kind, optional=name in ("data_dir", "side", "flood"))
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
    _need("code", record.code, str, optional=True)


def _need(name: str, value: object, kind: type, optional: bool = False) -> None:
    if not fits(kind, value) and not (optional and value is None):
        raise TypeError(f"{name} must be {TYPE_NAMES[kind]}")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise TypeError(f"{name} must have at most {MOST_BITS} bits, got {value.bit_length()}")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _plain(value: object) -> object:
    """The value as JSON data: numbers that are not finite become the strings of NOT_FINITE."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _numbers(value: object) -> object:
    """The inverse of `_plain`."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return float(value) if value in NOT_FINITE else value
