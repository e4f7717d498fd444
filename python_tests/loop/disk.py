"""A disk that fails: every call with which a checkpoint is written can raise an error, or be the last one of a process.

Files are real. In a power cut, what was not brought to the disk by fsync is lost: the bytes of a file, or its new name.
"""

import builtins
import errno
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT)


class DiskError(OSError):
    """Of the simulation, so that it is not taken for another."""


class Disk:
    """Takes the place of `os` and `open` in checkpoint/files.py. Everything else of `os` is the real one.

    touch: called before each call with its name; may raise    replaced: called when the checkpoint has a new file
    """

    def __init__(self, touch: Callable[[str], None], replaced: Callable[[], None]):
        self.touch, self.replaced = touch, replaced
        self.dead = False  # killed: no call does anything, `finally` blocks cannot clean up
        self.paths: dict[int, str] = {}  # of open files
        self.synced: set[str] = set()
        self.renamed: tuple[str, bytes | None, bool] | None = None  # path, bytes before, whether the new ones are safe

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def open(self, path, flags, mode=0o777):
        self.touch("disk open")
        descriptor = os.open(path, flags, mode)
        self.paths[descriptor] = str(path)
        return descriptor

    def close(self, descriptor):
        self.paths.pop(descriptor, None)
        os.close(descriptor)

    def fsync(self, descriptor):
        self.touch("disk fsync")
        path = self.paths[descriptor]
        self.synced.add(path)
        if self.renamed and os.path.isdir(path):
            self.renamed = None

    def replace(self, old, new):
        self.touch("disk replace")
        before = Path(new).read_bytes() if os.path.exists(new) else None
        os.replace(old, new)
        self.renamed = str(new), before, str(old) in self.synced
        self.synced.discard(str(old))
        self.replaced()

    def open_file(self, descriptor, mode):
        return File(self, builtins.open(descriptor, mode), descriptor)

    def cut_power(self, keep: bool) -> bool:
        """What is left on the disk. keep: the rename is, although no fsync of the folder followed it. Whether it is."""
        renamed, self.renamed = self.renamed, None
        if renamed is None:
            return True
        path, before, safe = renamed
        if keep and not safe:
            Path(path).write_bytes(Path(path).read_bytes()[:-7])
        elif not keep and before is None:
            os.unlink(path)
        elif not keep:
            Path(path).write_bytes(before)
        return keep


class File:
    """A file of which every write can fail."""

    def __init__(self, disk: Disk, file, descriptor: int):
        self.disk, self.file, self.descriptor = disk, file, descriptor
        self.tell, self.seek = file.tell, file.seek

    def write(self, data):
        self.disk.touch("disk write")
        return self.file.write(data)

    def flush(self):
        self.disk.touch("disk flush")
        self.file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.disk.paths.pop(self.descriptor, None)
        self.file.close()


def path_on(disk: Disk) -> type[Path]:
    """Paths whose `unlink` and `iterdir` are calls of this disk."""

    class DiskPath(type(Path())):
        def unlink(self, missing_ok=False):
            disk.touch("disk unlink")
            super().unlink(missing_ok)

        def iterdir(self):
            disk.touch("disk list")
            return super().iterdir()

    return DiskPath


class AtOnce:
    """Takes the place of the threads that hash a checkpoint: a history has one thread."""

    def __init__(self, threads):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments):
        done = Future()
        done.set_result(function(*arguments))
        return done
