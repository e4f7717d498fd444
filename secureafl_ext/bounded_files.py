"""Reading of files that may be broken or hostile: up to a limit, with errors that name the file."""

import gzip
import math
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

import numpy as np

PIECE = 2**20  # bytes
HEADER = 10_000  # characters of an array's description in an npz file; numpy writes about a hundred


def contents(path: Path, most: int) -> bytes:
    """The whole file, unpacked if its name ends in .gz. More than `most` bytes raise an error at once."""
    need_file(path, most)
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            data = b"".join(_pieces(file, most + 1))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a whole gzip file: {error}") from error
    if len(data) > most:
        raise ValueError(f"{path}: expected at most {most} bytes{' unpacked' * packed}, got more")
    return data


def _pieces(file: IO[bytes] | gzip.GzipFile | BufferedReader, most: int) -> Iterator[bytes]:
    """In pieces: a single read would allocate `most` bytes, however short the file is."""
    while most > 0 and (piece := file.read(min(most, PIECE))):
        most -= len(piece)
        yield piece


def text(path: Path, most: int) -> str:
    try:
        return contents(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8: {error}") from None


def need_file(path: Path, most: int) -> None:
    """Refuse pipes, which never end, and files above the limit before anything is read."""
    try:
        about = path.stat()
    except ValueError as error:  # a name with a zero byte
        raise ValueError(f"{str(path)!r} is no name of a file: {error}") from None
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path}: expected a file, got a folder, a pipe or a device")
    if about.st_size > most + most // 8 + 65536:  # packing random bytes adds a little
        raise ValueError(f"{path}: expected at most {most} bytes, got {about.st_size}")


def arrays(path: Path, wanted: dict[str, int]) -> dict[str, np.ndarray]:
    """Arrays of an npz file. wanted: the limit in bytes of each, by name. numpy's own reader has no limit."""
    need_file(path, sum(wanted.values()))
    with broken(path, "npz"), zipfile.ZipFile(path) as packed:
        names = set(packed.namelist())
        for name in wanted:
            if f"{name}.npy" not in names:
                got = ", ".join(sorted(names))[:200]
                raise ValueError(f"expected the arrays {', '.join(wanted)}, got {got or 'none'}")
        return {name: _array(packed, name, most) for name, most in wanted.items()}


def _array(packed: zipfile.ZipFile, name: str, most: int) -> np.ndarray:
    entry = packed.getinfo(f"{name}.npy")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"array {name} is packed in a way that numpy does not write")
    with packed.open(entry) as file:
        # Version 1.0 alone: its header length has two bytes, later versions have four.
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"array {name} is of a version that numpy does not write for plain arrays")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=HEADER)
        size = _size(name, shape, dtype, most)
        data = b"".join(_pieces(file, size))
        if len(data) != size:
            raise ValueError(f"array {name} needs {size} bytes, got {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _size(name: str, shape: tuple[int, ...], dtype: np.dtype, most: int) -> int:
    if dtype.kind not in "iufSU" or dtype.itemsize == 0:
        raise ValueError(f"array {name} must be of numbers or text, got {dtype}")
    size = math.prod(shape) * dtype.itemsize
    if not 0 <= size <= most or min(shape, default=0) < 0:
        raise ValueError(f"array {name} must have at most {most} bytes, got the shape {shape} of {dtype}")
    return size


@contextmanager
def broken(path: Path | str, kind: str) -> Iterator[None]:
    """Turn any error of a library on a broken file into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}: not a readable {kind} file: {str(error)[:300] or type(error).__name__}") from error
