"""Check a whole audit log, and count its lines."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .line import FIRST
from .log import HalfLineError, files_of, read_with_heads


@dataclass
class Summary:
    """The contents of a log whose chain is whole."""

    files: int = 0
    lines: int = 0
    kinds: Counter[str] = field(default_factory=Counter)  # lines by kind
    first: float | None = None  # time of the first line, in seconds since 1970
    last: float | None = None
    head: str = FIRST  # hash of the last line
    half: int = 0  # bytes of a half line at the end: a crash, or a write under way


def verify(folder: str | os.PathLike, expect: str | None = None) -> Summary:
    """The contents of the log. A ValueError if a line was changed, removed, added or moved: with file and line.

    expect: a hash that was noted earlier; an error if no line has it. Without it nobody can tell that lines were cut
    off the end, or that the whole log was written anew.
    """
    found = Summary()

    def half(problem: HalfLineError) -> None:
        found.half = problem.size

    seen = expect is None
    found.files = len(files_of(Path(folder)))
    if not found.files:
        raise ValueError(f"{folder}: expected files of an audit log, got none")
    for line, head in read_with_heads(Path(folder), half=half):
        found.first = line.at if found.first is None else found.first
        found.last, found.head = line.at, head.hash
        found.lines += 1
        found.kinds[line.kind] += 1
        seen = seen or head.hash == expect
    if not seen:
        raise ValueError(f"{folder}: no line has the expected hash {expect!r:.80}: lines were cut off, or written anew")
    return found
