"""One file of tensors in the safetensors format, with a digest of all that is in it, read without trust.

The digest (SHA-256) is in the file's header and finds damage: a flipped bit, a part that is missing, a file that is
changed while it is read. It does not find forgery: whoever can write the file can write a digest that fits. Keep
checkpoints where only those can write whom you trust.

The safetensors package reads these files. It is not used here: it maps a file into memory, so that a file cut short
meanwhile kills the process; and it writes under a temporary name of its own, which nobody removes after a kill.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 2**24  # bytes
LONGEST_SIDE = 2**20  # of a tensor without values: a length that no bytes in the file stand for
PIECE = 2**23  # bytes that one thread hashes at a time
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: bytes begin to end of what follows the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def dump(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the tensors, on the CPU, and metadata with the digest of both."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    parts = {name: _bytes_of(tensors[name].contiguous()) for name in ordered}
    places, begin = {}, 0
    for name, part in parts.items():
        places[name] = Place(tensors[name].dtype, tuple(tensors[name].shape), begin, begin + len(part))
        begin += len(part)
    with ThreadPoolExecutor(THREADS) as pool:  # hashes while this thread writes
        sums = {name: [pool.submit(_sum, piece) for piece in _pieces(part)] for name, part in parts.items()}
        start = file.tell()
        file.write(_header(metadata, places, "0" * 64))
        for part in parts.values():
            file.write(part)
        file.seek(start)
        file.write(_header(metadata, places, _digest(metadata, places, sums)))


def _header(metadata: dict[str, str], places: Mapping[str, Place], digest: str) -> bytes:
    entries = {name: _listed(place) for name, place in places.items()}
    text = json.dumps({"__metadata__": {**metadata, "digest": digest}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def opened(path: str | os.PathLike) -> Iterator["Reader"]:
    """The file's header is read and checked; an error says what is wrong with it."""
    # Without blocking, or a pipe of that name would keep us for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        yield Reader(Path(path), file)


class Reader:
    """metadata: texts by name, without the digest    places: name -> Place    digest: as the file has it, or None"""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self._file = path, file
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"SecureAFL.load: {path} must be a file that SecureAFL.save wrote, got another thing")
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(about.st_size - 8, LONGEST_HEADER):
            self.refuse(f"its header must have 2 to {LONGEST_HEADER} of its {about.st_size} bytes, got {length}")
        header = self.parse(file.read(length))
        self.metadata = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not all(isinstance(text, str) for text in self.metadata.values()):
            self.refuse("its metadata must be texts")
        self.digest = self.metadata.pop("digest", None)
        self.places = {name: self._place(name, entry, about.st_size) for name, entry in header.items()}
        end = 0
        for place in self._in_order().values():
            if place.begin != end:
                self.refuse(f"its tensors must follow each other, got one at {place.begin} after {end}")
            end = place.end
        if 8 + length + end != about.st_size:
            self.refuse(f"it must have {8 + length + end} bytes, got {about.st_size}")

    def load(self, cuts: Mapping[str, tuple[int, int]], digest: str | None) -> dict[str, Tensor]:
        """All tensors; of those in cuts these coordinates, begin to end of the last dimension, alone.

        Once, from the first byte to the last. An error if all the bytes, and metadata, do not have this digest.
        """
        tensors, sums = {}, {}
        with ThreadPoolExecutor(THREADS) as pool:
            for name, place in self._in_order().items():
                cut = cuts.get(name)
                if cut is None or cut == (0, place.shape[-1]):
                    tensors[name], sums[name] = self._whole(place, pool)
                else:
                    tensors[name], sums[name] = self._cut(place, *cut, pool)
            got = _digest(self.metadata, self.places, sums)
        if digest not in (None, got):
            self.refuse(f"its digest must be {digest[:64]}, got {got}")
        return tensors

    def refuse(self, why: str) -> None:
        raise ValueError(f"SecureAFL.load: {self.path} is no checkpoint, or was changed or damaged: {why}")

    def parse(self, text: str | bytes) -> dict:
        try:
            parsed = json.loads(text if isinstance(text, str) else text.decode())
        except (ValueError, RecursionError) as error:
            self.refuse(f"its header must be JSON, got {type(error).__name__}")
        if not isinstance(parsed, dict):
            self.refuse(f"its header must be a JSON object, got {type(parsed).__name__}")
        return parsed

    def _in_order(self) -> dict[str, Place]:
        return dict(sorted(self.places.items(), key=lambda item: (item[1].begin, item[1].end)))

    def _place(self, name: str, entry: object, most: int) -> Place:
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            lengths = [*shape, begin, end]
            sound = len(entry) == 3 and all(type(length) is int and length >= 0 for length in lengths)
            sound = sound and len(shape) <= 8 and all(length <= max(most, LONGEST_SIDE) for length in lengths)
            sound = sound and end - begin == math.prod(shape) * dtype.itemsize
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            self.refuse(f"its tensor {name[:40]!r} must have dtype, shape and data_offsets that fit")
        return Place(dtype, tuple(shape), begin, end)

    def _whole(self, place: Place, pool: ThreadPoolExecutor) -> tuple[Tensor, list[Future]]:
        tensor, sums = torch.empty(place.shape, dtype=place.dtype), []
        for piece in _pieces(_bytes_of(tensor)):
            self._fill(piece)
            sums.append(pool.submit(_sum, piece))
        return tensor, sums

    def _cut(self, place: Place, begin: int, end: int, pool: ThreadPoolExecutor) -> tuple[Tensor, list[Future]]:
        """Piece by piece: nobody needs room for coordinates that are not its own."""
        width, size = place.shape[-1], place.dtype.itemsize
        tensor, sums = torch.empty(*place.shape[:-1], end - begin, dtype=place.dtype), []
        rows = tensor.view(-1, end - begin) if tensor.numel() else tensor
        for offset in range(0, place.end - place.begin, PIECE):
            buffer = bytearray(min(PIECE, place.end - place.begin - offset))
            self._fill(buffer)
            sums.append(pool.submit(_sum, buffer))
            values, first = torch.frombuffer(buffer, dtype=place.dtype), offset // size
            for row in range(first // width, -(-(first + len(values)) // width) if tensor.numel() else 0):
                low, high = max(row * width + begin, first), min(row * width + end, first + len(values))
                if low < high:
                    start = row * width + begin
                    rows[row, low - start : high - start] = values[low - first : high - first]
            sums[-1].result()
        return tensor, sums

    def _fill(self, piece: bytearray | memoryview) -> None:
        if self._file.readinto(piece) != len(piece):
            self.refuse("it was cut short while it was read")


def _bytes_of(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor: its memory."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _pieces(part: memoryview) -> list[memoryview]:
    return [part[begin : begin + PIECE] for begin in range(0, len(part), PIECE)]


def _sum(piece: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(piece).hexdigest()


def _listed(place: Place) -> dict:
    return {"dtype": NAMES[place.dtype], "shape": list(place.shape), "data_offsets": [place.begin, place.end]}


def _digest(metadata: dict[str, str], places: Mapping[str, Place], sums: Mapping[str, list[Future]]) -> str:
    """Of the pieces' digests and all that the header says."""
    parts = {name: [_listed(place), [future.result() for future in sums[name]]] for name, place in places.items()}
    return _sum(json.dumps([metadata, parts], sort_keys=True).encode())
