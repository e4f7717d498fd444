"""Small files of every format, whole ones and such as no one writes by mistake."""

import gzip
import io
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

RANDOM = np.random.default_rng(7)


@contextmanager
def at_most(megabytes: float) -> Iterator[None]:
    """What Python and numpy allocate in between, all at the same time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < megabytes * 1e6, f"{peak / 1e6:.1f} MB"


def pixels(*shape: int) -> np.ndarray:
    return RANDOM.integers(256, size=shape, dtype=np.uint8)


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def idx_files(samples: int = 2) -> dict[str, bytes]:
    """A whole folder of Fashion-MNIST, packed."""
    files = {}
    for part in ("train", "t10k"):
        files[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(pixels(samples, 28, 28)))
        files[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(np.arange(samples, dtype=np.uint8)))
    return files


def cifar_files(samples: int = 2) -> dict[str, bytes]:
    """A whole folder of CIFAR-100, in Python's format."""
    content = pickle.dumps({"data": pixels(samples, 3072), "fine_labels": list(range(samples))}, 2)
    return dict.fromkeys(("train", "test", "meta"), content)


def npz_files(samples: int = 2, **changed: np.ndarray) -> dict[str, bytes]:
    x, y = pixels(samples, 28, 28), np.arange(samples, dtype=np.uint8)
    return {"fashion_mnist.npz": npz({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | changed)}


def npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def picture(*shape: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(*shape)).save(buffer, format=kind)
    return buffer.getvalue()


def picture_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def npz_of(entries: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Entries as they are, whatever they say."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as packed:
        for name, content in entries.items():
            packed.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def npy(head: str, data: bytes = b"", version: int = 1) -> bytes:
    """An array's file with this description of it."""
    text = head.encode() + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
