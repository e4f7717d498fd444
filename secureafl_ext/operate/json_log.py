"""JsonLog: an observer that writes lines of JSON. `read_line` is the inverse."""

import io
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ..validation import converted, printable, shown, whole
from .json_lines import LONGEST_NAME, LONGEST_REASON, Dropped, read_line
from .observer import Observer
from .verdict import MEAN_UPDATES, Look, Verdict, finite

__all__ = ["Dropped", "JsonLog", "read_line"]

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # in ASCII, on one line


class JsonLog(Observer):
    """A line of JSON for every verdict, look and evaluation. The documentation's page "Metrics" has the fields.

    target: a path, or a text stream, which is neither rotated nor closed. An existing file is continued.
    rotate: bytes. A file that would grow beyond them becomes PATH.1, the old PATH.1 becomes PATH.2, and so on.
    keep: how many such files stay
    A file is longer than `rotate` only if one batch is, and a reader sees whole lines only: a batch is one write.
    """

    def __init__(self, target: str | os.PathLike[str] | TextIO, *, rotate: int = 2**26, keep: int = 4):
        expected = "a whole number, 1 or more"
        self.rotate = converted("JsonLog", "rotate", rotate, whole, expected, lambda count: count >= 1)
        self.keep = converted("JsonLog", "keep", keep, whole, expected, lambda count: count >= 1)
        self._size, self._torn = 0, False
        self._stream: TextIO | None = None
        self._file: io.FileIO | None = None
        if isinstance(target, (str, os.PathLike)):
            self.path = Path(target)
            self._open()
        elif callable(getattr(target, "write", None)):
            self._stream = target
        else:
            raise ValueError(f"JsonLog: target must be a path or a text stream, got {shown(target)}")

    def verdicts(self, batch: Sequence[Verdict]) -> None:
        self._write(map(verdict_fields, batch))

    def look(self, look: Look) -> None:
        self._write([look_fields(look)])

    def evaluated(self, at: float, version: int, error: float) -> None:
        self._write([{"event": "evaluation", "at": at, "version": version, "error": finite(error)}])

    def dropped(self, count: int) -> None:
        self._write([{"event": "dropped", "at": time.time(), "count": count}])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._stream = None

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        whole_lines = "".join([encode(fields) + "\n" for fields in lines])
        if self._stream is not None:
            self._stream.write(whole_lines)
            self._stream.flush()
        elif self._file is not None:
            self._append(whole_lines.encode("ascii"))

    def _append(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self.rotate:
            self._begin_anew()
        if self._torn:  # the disk was full, or the server was killed: a broken line must not spoil the next one
            data = b"\n" + data
        assert self._file is not None
        self._torn, rest = True, memoryview(data)
        while rest:
            written = self._file.write(rest) or 0
            self._size += written
            rest = rest[written:]
        self._torn = False

    def _begin_anew(self) -> None:
        """If this fails the old file stays open, and the next write tries again."""
        old = self._file
        if self.path.exists():
            for age in range(self.keep - 1, -1, -1):
                if self._aged(age).exists():
                    os.replace(self._aged(age), self._aged(age + 1))
        self._open()
        if old is not None:
            old.close()

    def _open(self) -> None:
        file = io.FileIO(self.path, "a+")  # without a buffer: one write per batch
        self._size = file.seek(0, os.SEEK_END)
        file.seek(max(0, self._size - 1))
        self._torn = file.read(1) not in (b"", b"\n")
        self._file = file

    def _aged(self, age: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{age}") if age else self.path


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "event": "verdict",
        "at": verdict.at,
        "kind": verdict.kind,
        "client": verdict.client,
        "who": printable(verdict.who, LONGEST_NAME),
        "version": verdict.version,
        "staleness": verdict.staleness,
        "factor": finite(verdict.factor),
        "seconds": finite(verdict.seconds),
        "reason": printable(verdict.reason, LONGEST_REASON),
    }


def look_fields(look: Look) -> dict[str, Any]:
    return {
        "event": "look",
        "at": look.at,
        "version": look.version,
        "stats": look.stats,
        "threshold": finite(look.threshold),
        "seen": look.seen.astype(int).tolist(),
        "live": look.live.astype(int).tolist(),
        "present": look.present.astype(int).tolist(),
        "weights": rounded(look.weights, 6),
        "left_out": None if look.left_out is None else look.left_out.astype(int).tolist(),
        **{name: rounded(getattr(look, name), 3) for name in MEAN_UPDATES},
        "queue": None if look.queue is None else asdict(look.queue),
    }


def rounded(values: np.ndarray | None, digits: int) -> list[float | None] | None:
    return None if values is None else [finite(float(f"{value:.{digits}g}")) for value in values.tolist()]
