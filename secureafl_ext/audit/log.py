"""The files of an audit log: appended to by one process, rotated, and read as untrusted input."""

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..bounded_files import need_file
from ..checkpoint.files import to_disk
from . import line as lines
from .line import FIRST, LONGEST, Line

NAME = re.compile(r"audit-(\d{6})\.jsonl")
LARGEST_FILE = 2**40  # bytes


class Head(NamedTuple):
    """The end of a chain: the number and the hash of its last line."""

    seq: int
    hash: str


START = Head(0, FIRST)


class HalfLineError(ValueError):
    """A file ends without a line break: a crash, or a write under way. All whole lines have been read."""

    def __init__(self, path: Path, end: int, size: int, head: Head | None):
        super().__init__(f"{path}: {size} bytes of half a line at its end: a crash, or a write under way")
        self.end, self.size = end, size  # bytes of whole lines, bytes of the half one
        self.head = head  # after the whole lines


def name_of(number: int) -> str:
    return f"audit-{number:06d}.jsonl"


def files_of(folder: Path) -> list[Path]:
    """All files of the log, in order: file k is number k. A gap is an error."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected the folder of an audit log, got none")
    numbers = sorted(int(found[1]) for path in folder.iterdir() if (found := NAME.fullmatch(path.name)))
    for expected, number in enumerate(numbers):
        if number != expected:
            raise ValueError(f"{folder / name_of(expected)}: expected a file of the audit log, got none")
    return [folder / name_of(number) for number in numbers]


def read_file(path: Path, head: Head | None = None) -> Iterator[tuple[Line, Head]]:
    """The lines of one file, each checked, with the chain's head after it.

    head: before the file; None: whatever the file names. A half line at the end raises a HalfLineError.
    """
    need_file(path, LARGEST_FILE)
    end, number = 0, 0
    with open(path, "rb") as file:
        while raw := file.readline(LONGEST + 1):
            number += 1
            if not raw.endswith(b"\n") and len(raw) <= LONGEST:
                raise HalfLineError(path, end, len(raw), head)
            try:
                line, head = _checked(raw, head)
                if (line.kind == "file") != (number == 1) or (number == 1 and name_of(line.count) != path.name):
                    raise ValueError("the first line, and no other, must have kind file and the number of the file")
            except ValueError as problem:
                raise ValueError(f"{path}, line {number}: {problem}") from None
            end += len(raw)
            yield line, head


def end_of(path: Path, head: Head | None) -> Head | None:
    """The head after a file whose lines are all whole; `head`, that before the file, if it has no lines."""
    for _, reached in read_file(path, head):
        head = reached
    return head


def _checked(raw: bytes, head: Head | None) -> tuple[Line, Head]:
    """One line, and the head after it."""
    if len(raw) > LONGEST:
        raise ValueError(f"a line must have at most {LONGEST} bytes, got more")
    line, before, hash_ = lines.read(raw)
    if head and before != head.hash:
        raise ValueError(f"the hash before it must be {head.hash}, got {before}: a line is missing, added or moved")
    if head and line.seq != head.seq + 1:
        raise ValueError(f"seq must be {head.seq + 1}, got {line.seq}")
    return line, Head(line.seq, hash_)


def read(folder: Path, first: int = 0) -> Iterator[Line]:
    """All lines from file number `first` on. A half line at the end is left out."""
    for line, _ in read_with_heads(folder, first):
        yield line


def read_with_heads(
    folder: Path, first: int = 0, half: Callable[[HalfLineError], None] | None = None
) -> Iterator[tuple[Line, Head]]:
    """Each line from file number `first` on, with the head after it. half: called for a half line at the end"""
    files, head = files_of(folder), START if first == 0 else None
    for path in files[first:]:
        try:
            for line, reached in read_file(path, head):
                head = reached
                yield line, head
        except HalfLineError as problem:
            if path != files[-1]:
                raise
            if half:
                half(problem)


class Log:
    """The end of a log, open for more lines. One process at a time: the others get an error.

    rotate: bytes after which a new file begins    sync: wait for the disk after every line
    A half line that a crash left is cut off, and a line says so. Any other damage of the last file is an error.
    """

    def __init__(self, folder: Path, rotate: int, sync: bool):
        self.folder, self.rotate, self.sync = folder, rotate, sync
        folder.mkdir(parents=True, exist_ok=True)
        self._file: int | None = None
        self._lock: int | None = open_own(folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            self._lock_folder()
            self._open()
        except BaseException:
            self.close()
            raise

    def append(self, kind: str, **fields: Any) -> Line:
        """The line is in the file when this returns. After an error the file ends as before."""
        self.next_seq()
        return self._append(kind, fields)

    def next_seq(self) -> int:
        """The number of the next line. Begins a new file if the current one is full."""
        if self._file is None:
            raise ValueError(f"{self.folder}: the audit log is closed")
        if self._size >= self.rotate:
            self._begin(self.number + 1)
        return self.head.seq + 1

    def to_disk(self) -> None:
        """Wait until all lines are on the disk: a crash of the machine loses none of them."""
        assert self._file is not None
        os.fsync(self._file)

    def close(self) -> None:
        """Writes nothing: a log that was closed is like one whose process was killed."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    def _lock_folder(self) -> None:
        try:
            assert self._lock is not None
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.folder}: the audit log is in use by another process or object") from None

    def _open(self) -> None:
        self.head, self.number, self._size = START, -1, 0
        files = files_of(self.folder)
        if not files:
            self._begin(0)
            return
        need_file(files[-1], LARGEST_FILE)
        self.number, self._size, half = len(files) - 1, files[-1].stat().st_size, None
        self._file = open_own(files[-1], os.O_WRONLY | os.O_APPEND)
        before = self._last_head(files)
        try:
            head = end_of(files[-1], before)
        except HalfLineError as problem:
            half, head, self._size = problem, problem.head, problem.end
        assert head is not None
        self.head = head
        if half:
            os.ftruncate(self._file, half.end)
        if not self._size:  # a crash came before its first line
            self._append("file", {"count": self.number})
        if half:
            self._append("mended", {"count": half.size})

    def _last_head(self, files: list[Path]) -> Head | None:
        """The head before the last file. None: whatever that file names, since it has a whole line."""
        if len(files) == 1:
            return START
        with open(files[-1], "rb") as file:
            if b"\n" in file.read(LONGEST):
                return None
        head = end_of(files[-2], None)
        if head is None:
            raise ValueError(f"{files[-2]}: expected lines, got an empty file")
        return head

    def _begin(self, number: int) -> None:
        """Begin a file. If its first line cannot be written, it is removed again, and the log ends as before."""
        path = self.folder / name_of(number)
        before = self._file, self.number, self._size, self.head
        file = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        self._file, self.number, self._size = file, number, 0
        try:
            self._append("file", {"count": number})
            if before[0] is not None:  # rare enough: a crash of the machine leaves no gap between two files
                os.fsync(before[0])
            to_disk(self.folder)
        except BaseException:
            self._file, self.number, self._size, self.head = before
            path.unlink()
            os.close(file)
            raise
        if before[0] is not None:
            os.close(before[0])

    def _append(self, kind: str, fields: dict[str, Any]) -> Line:
        assert self._file is not None
        line = Line(self.head.seq + 1, time.time(), kind, **fields)
        raw, hash_ = lines.write(line, self.head.hash)
        if len(raw) > LONGEST:
            raise ValueError(f"{self.folder}: a line must have at most {LONGEST} bytes, got {len(raw)}")
        size = os.fstat(self._file).st_size
        if size != self._size:  # another program wrote, or an interrupt came after the last write
            raise OSError(
                f"{self.folder / name_of(self.number)}: expected {self._size} bytes, got {size}; open it anew"
            )
        try:
            write_all(self._file, raw)
            if self.sync:
                os.fsync(self._file)
        except BaseException:
            with suppress(OSError):  # then it is mended when the log is opened again
                os.ftruncate(self._file, self._size)
            raise
        self.head, self._size = Head(line.seq, hash_), self._size + len(raw)
        return line


def open_own(path: Path, flags: int) -> int:
    """Open a file of the log for writing. A link is refused: it could lead to a file that is not the log's."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path}: expected a file of the audit log, got a symbolic link") from None


def write_all(file: int, data: bytes | memoryview) -> None:
    data = memoryview(data)
    while data:
        data = data[os.write(file, data) :]
