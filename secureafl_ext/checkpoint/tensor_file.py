"""One file of tensors in the safetensors format, with a digest of its contents. It is read as untrusted input.

The digest (SHA-256, in the header) detects damage: a flipped bit, a missing part, a file that changes while it is read.
It does not detect forgery: an attacker who can write the file can write a matching digest. Keep checkpoints where only
people you trust can write.

The safetensors package can read these files but is not used here. It maps a file into memory, so that a file truncated
meanwhile kills the process; and it writes under a temporary name that nobody removes after a kill.
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
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

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
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 2**24  # bytes
LONGEST_SIDE = 2**20  # of a tensor without values: no bytes in the file bound its lengths
PIECE = 2**23  # bytes hashed at a time by one thread
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Place:
    """Position of a tensor: bytes begin to end after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def dump(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the tensors (on the CPU), the metadata, and the digest of both."""
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
    if len(text) > LONGEST_HEADER:
        raise ValueError(
            f"SecureAFL.save: header must have at most {LONGEST_HEADER} bytes, got {len(text)}: it could not be loaded"
        )
    return len(text).to_bytes(8, "little") + text


@contextmanager
def opened(path: str | os.PathLike) -> Iterator["Reader"]:
    """A reader whose header has been read and checked."""
    # Non-blocking: opening a pipe would wait for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        yield Reader(Path(path), file)


class Reader:
    """metadata: texts by name, without the digest    places: name -> Place    digest: as the file has it, or None"""

    def __init__(self, path: Path, file: BufferedReader):
        self.path, self._file = path, file
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(
                f"SecureAFL.load: {path} must be a file that SecureAFL.save wrote, got a folder, a pipe or a device"
            )
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(about.st_size - 8, LONGEST_HEADER):
            longest = max(min(about.st_size - 8, LONGEST_HEADER), 0)
            self.refuse(f"it must begin with the length of a safetensors header, 2 to {longest}, got {length}")
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
        """All tensors; of those in cuts only coordinates begin to end of the last dimension.

        Reads the file once, from the first byte to the last. An error if it does not have this digest.
        """
        tensors: dict[str, Tensor] = {}
        sums: dict[str, list[Future[str]]] = {}
        with ThreadPoolExecutor(THREADS) as pool:
            for name, place in self._in_order().items():
                cut = cuts.get(name)
                if cut is None or cut == (0, place.shape[-1]):
                    tensors[name], sums[name] = self._whole(place, pool)
                else:
                    tensors[name], sums[name] = self._cut(place, *cut, pool)
            got = _digest(self.metadata, self.places, sums)
        if digest is not None and digest != got:
            self.refuse(f"its digest must be {digest[:64]}, got {got}")
        return tensors

    def refuse(self, why: str) -> NoReturn:
        raise ValueError(f"SecureAFL.load: {self.path} is no checkpoint, or was changed or damaged: {why}")

    def parse(self, text: str | bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(text if isinstance(text, str) else text.decode())
        except (ValueError, RecursionError) as error:
            self.refuse(f"its header must be JSON, got {type(error).__name__}")
        if not isinstance(parsed, dict):
            self.refuse(f"its header must be a JSON object, got {type(parsed).__name__}")
        return parsed

    def _in_order(self) -> dict[str, Place]:
        return dict(sorted(self.places.items(), key=lambda item: (item[1].begin, item[1].end)))

    def _place(self, name: str, entry: Any, most: int) -> Place:
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

    def _whole(self, place: Place, pool: ThreadPoolExecutor) -> tuple[Tensor, list[Future[str]]]:
        tensor, sums = self._allocated(place.shape, place.dtype), []
        for piece in _pieces(_bytes_of(tensor)):
            self._fill(piece)
            sums.append(pool.submit(_sum, piece))
        return tensor, sums

    def _cut(self, place: Place, begin: int, end: int, pool: ThreadPoolExecutor) -> tuple[Tensor, list[Future[str]]]:
        """Piece by piece: a rank needs no memory for the coordinates of others."""
        width, size = place.shape[-1], place.dtype.itemsize
        tensor, sums = self._allocated((*place.shape[:-1], end - begin), place.dtype), []
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

    def _allocated(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype)
        except (RuntimeError, MemoryError) as error:  # torch raises the first
            size = math.prod(shape) * dtype.itemsize
            words = f"must have tensors that fit into memory, got one of {size} bytes"
            raise ValueError(f"SecureAFL.load: {self.path} {words}") from error

    def _fill(self, piece: bytearray | memoryview) -> None:
        if self._file.readinto(piece) != len(piece):
            self.refuse("it was cut short while it was read")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _pieces(part: memoryview) -> list[memoryview]:
    return [part[begin : begin + PIECE] for begin in range(0, len(part), PIECE)]


def _sum(piece: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(piece).hexdigest()


def _listed(place: Place) -> dict:
    return {"dtype": NAMES[place.dtype], "shape": list(place.shape), "data_offsets": [place.begin, place.end]}


def _digest(metadata: dict[str, str], places: Mapping[str, Place], sums: Mapping[str, list[Future[str]]]) -> str:
    """Digest of the pieces' digests and of the header."""
    parts = {name: [_listed(place), [future.result() for future in sums[name]]] for name, place in places.items()}
    return _sum(json.dumps([metadata, parts], sort_keys=True).encode())
