"""The kept updates of an audit log: one file per upload, named by the number of its line, which has its hash."""

import os
import re
from pathlib import Path

import torch
from torch import Tensor

from ..bounded_files import contents
from ..checkpoint.files import to_disk
from .facts import sha256
from .line import DTYPES, Line
from .log import open_own, write_all

NAME = re.compile(r"[0-9]{12}\.bin")
REFUSED = ("stale", "too_soon")  # the server does not read the values of such an update


class Updates:
    """sync: wait for the disk after every file"""

    def __init__(self, folder: Path, sync: bool = False):
        self.folder, self.sync = folder / "updates", sync

    def need_own_folder(self) -> None:
        """Refuse a link: the files that it leads to are not the log's to write over or to delete."""
        if self.folder.is_symlink():
            raise ValueError(f"{self.folder}: expected a folder of the audit log, got a symbolic link")

    def put(self, seq: int, data: memoryview) -> None:
        """Write the bytes of the update whose line will have this number.

        An older entry of that name is removed, not written through: a file that a crash left, a link or a pipe.
        """
        self.need_own_folder()
        self.folder.mkdir(exist_ok=True)
        path = self._path(seq)
        path.unlink(missing_ok=True)
        file = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(file, data)
            if self.sync:
                os.fsync(file)
        finally:
            os.close(file)
        if self.sync:
            to_disk(self.folder)

    def has(self, line: Line) -> bool:
        return line.kind in REFUSED or self._path(line.seq).is_file()

    def get(self, line: Line) -> Tensor:
        """(d) the update of this line, if it has the line's hash. Zeros for one that was refused and is not kept."""
        path, dtype = self._path(line.seq), DTYPES[line.dtype]
        if line.kind in REFUSED and not path.exists():
            return torch.zeros(line.shape, dtype=dtype)
        size = line.shape[0] * dtype.itemsize
        try:
            data = bytearray(contents(path, size))
        except FileNotFoundError:
            raise ValueError(f"{path}: expected the update of line {line.seq}, got no file: it was not kept") from None
        if len(data) != size or sha256(data) != line.update:
            raise ValueError(f"{path}: expected the {size} bytes whose hash line {line.seq} has, got others")
        return torch.frombuffer(data, dtype=dtype) if data else torch.zeros(0, dtype=dtype)

    def drop(self, seq: int) -> None:
        self.need_own_folder()
        self._path(seq).unlink(missing_ok=True)

    def drop_before(self, seq: int) -> None:
        self.need_own_folder()
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if NAME.fullmatch(path.name) and int(path.stem) < seq:
                path.unlink(missing_ok=True)

    def _path(self, seq: int) -> Path:
        return self.folder / f"{seq:012d}.bin"
