"""Follow: passes the lines of a JSON log to a view, also while the file grows. Damaged lines are counted."""

import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from ..bounded_files import PIECE, need_file
from .json_lines import LONGEST_LINE, Dropped, read_line
from .verdict import Look, Verdict
from .view import View
from .watched import Evaluation

LARGEST_FILE = 2**40  # bytes


class Follow:
    """Reads a file of JsonLog and passes its lines to the view. Close it, or use it in a `with`."""

    def __init__(self, path: Path, view: View):
        self.path, self.view = path, view
        self._file = opened(path)
        self._rest = b""  # the begin of a line whose end has not been read
        self._is_too_long = False  # the last line is, and is skipped

    def step(self) -> bool:
        """Read the new lines, at most to the end of the file. False if there are none."""
        is_new = self._read()
        if self._is_replaced():  # a log that has become too long is renamed, and another one begins
            is_new = self._read() or is_new  # lines written before it was renamed
            try:
                file = opened(self.path)
            except FileNotFoundError:  # it is gone again
                return is_new
            self.close()
            self._file = file
            self._rest, self._is_too_long = b"", False
            is_new = self._read() or is_new
        return is_new

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Follow":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_replaced(self) -> bool:
        try:
            there = os.stat(self.path)
        except OSError:  # between two files
            return False
        here = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or here.st_size < self._file.tell()

    def _read(self) -> bool:
        is_new = False
        while piece := self._file.read(PIECE):
            is_new = True
            verdicts: list[Verdict] = []
            for line in self._lines(piece):
                self._tell(line, verdicts)
            self.view.verdicts(verdicts)
        return is_new

    def _lines(self, piece: bytes) -> Iterator[bytes]:
        """The lines that end in this piece."""
        *whole, rest = (self._rest + piece).split(b"\n")
        if whole and self._is_too_long:
            del whole[0]
            self._is_too_long = False
        yield from whole
        if len(rest) > LONGEST_LINE:
            if not self._is_too_long:
                self.view.damaged()
            self._is_too_long, rest = True, b""
        self._rest = b"" if self._is_too_long else rest

    def _tell(self, line: bytes, verdicts: list[Verdict]) -> None:
        """Pass the content of a line to the view. Verdicts are gathered in `verdicts`, and passed before other news."""
        try:
            what = read_line(line.decode("utf-8"))  # a UnicodeDecodeError is a ValueError too
        except ValueError:
            self.view.damaged()
            return
        if isinstance(what, Verdict):
            verdicts.append(what)
            return
        self.view.verdicts(verdicts)
        verdicts.clear()
        if isinstance(what, Look):
            self.view.look(what)
        elif isinstance(what, Evaluation):
            self.view.evaluated(what.at, what.version, what.error)
        elif isinstance(what, Dropped):
            self.view.dropped(what.count)


def opened(path: Path) -> BufferedReader:
    """The open file. A pipe or a device is refused: it would never end."""
    need_file(path, LARGEST_FILE)
    # Non-blocking: opening a pipe would wait for ever, and it may have come since the look at its name.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path}: expected a file, got a pipe or a device")
    return file
