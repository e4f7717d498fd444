"""Data sets as they lie on disk, to arrays: idx, CIFAR's batches, image folders, driving logs, compact npz files.

Every reader takes a folder and returns Arrays. Nothing is downloaded, and nothing that a file names is called.
"""

import csv
import gzip
import io
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from . import safe_pickle

TINY_SIDE = 64
# A frame of the driving simulator, 320 x 160, has sky above and the bonnet below: rows 60 to 134 are road.
ROAD_TOP, ROAD_BOTTOM = 60 / 160, 135 / 160
ROAD_SIDE = 32  # what is left is shrunk to: the size that ResNet-20 was made for
# Frames follow each other at ten a second: a random test set would have a twin of every frame in the training set.
TEST_SHARE = 0.2


class Arrays(NamedTuple):
    train_x: np.ndarray  # (N, C, H, W) uint8
    train_y: np.ndarray  # (N) labels, or float values where classes is 0
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int  # 0: regression


def find(folder: Path, pattern: str) -> Path | None:
    """The first file of that name, packed by gzip or not."""
    return next(iter(sorted(folder.glob(pattern)) + sorted(folder.glob(pattern + ".gz"))), None)


def need(folder: Path, pattern: str) -> Path:
    path = find(folder, pattern)
    if path is None:
        raise FileNotFoundError(f"{folder}: no file {pattern}")
    return path


def contents(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


# idx: Fashion-MNIST as published, and as Debian and torchvision keep it


def idx(path: Path, dims: int) -> np.ndarray:
    """An idx file of bytes: magic 0, 0, 8 (unsigned byte), dims; the sizes, big-endian; the values."""
    data = contents(path)
    if data[:4] != bytes([0, 0, 8, dims]) or len(data) < 4 + 4 * dims:
        raise ValueError(f"{path}: not an idx file of bytes in {dims} dimensions")
    shape = struct.unpack_from(f">{dims}I", data, 4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims)
    if values.size != np.prod(shape):
        raise ValueError(f"{path}: header says {shape}, {values.size} bytes follow")
    return values.reshape(shape)


def idx_folder(folder: Path) -> Arrays:
    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        images = idx(need(folder, name + "-images[-.]idx3-ubyte"), 3)
        return images[:, None], idx(need(folder, name + "-labels[-.]idx1-ubyte"), 1)

    return Arrays(*part("train"), *part("t10k"), classes=10)


# CIFAR


def batch(path: Path) -> dict[str, Any]:
    try:
        return safe_pickle.loads(contents(path))
    except Exception as error:  # a hostile or broken pickle can fail anywhere
        raise ValueError(
            f"{path}: refused, a CIFAR batch is a dict of arrays, numbers, text and lists alone: {error}"
        ) from error


def cifar_images(rows: np.ndarray, path: Path) -> np.ndarray:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072:
        raise ValueError(f"{path}: expected rows of 3072 bytes, a red, a green and a blue plane of 32 x 32")
    return rows.reshape(-1, 3, 32, 32)


def cifar_python(folder: Path, train: Iterable[str], test: str, labels: str, classes: int) -> Arrays:
    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = need(folder, name)
        values = batch(path)
        if not {"data", labels} <= set(values):
            raise ValueError(f"{path}: expected the keys data and {labels}, got {', '.join(map(str, values))}")
        return cifar_images(values["data"], path), np.asarray(values[labels], np.int64)

    return Arrays(*map(np.concatenate, zip(*map(part, train), strict=True)), *part(test), classes=classes)


def cifar_binary(folder: Path, train: Iterable[str], test: str, labels: int, classes: int) -> Arrays:
    """Records of `labels` bytes, of which the last is the one wanted, and an image."""

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = need(folder, name)
        values = np.frombuffer(contents(path), np.uint8)
        if values.size == 0 or values.size % (labels + 3072):
            raise ValueError(f"{path}: {values.size} bytes are not records of {labels} + 3072")
        rows = values.reshape(-1, labels + 3072)
        return cifar_images(rows[:, labels:], path), rows[:, labels - 1]

    return Arrays(*map(np.concatenate, zip(*map(part, train), strict=True)), *part(test), classes=classes)


# Images


def decoder(edit: Callable[[Any], Any] = lambda image: image) -> Callable[[Path | bytes], np.ndarray]:
    """From a file or its bytes to (C, H, W) uint8, `edit` applied to the picture in between."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images are decoded by Pillow; pip install 'secureafl_ext[sim]'") from error

    def decode(source: Path | bytes) -> np.ndarray:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return np.asarray(edit(image.convert("RGB"))).transpose(2, 0, 1)

    return decode


def decode_all(sources: Sequence[Path | bytes], decode: Callable[[Path | bytes], np.ndarray]) -> np.ndarray:
    first = decode(sources[0])
    out = np.empty((len(sources), *first.shape), np.uint8)

    def place(i: int) -> None:
        out[i] = decode(sources[i])

    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter's lock
        list(pool.map(place, range(len(sources))))
    return out


def tiny_imagenet(folder: Path) -> Arrays:
    """train/WNID/images/*; val as published (one folder, val_annotations.txt) or sorted into val/WNID afterwards."""
    wnids = (folder / "wnids.txt").read_text().split()
    label = {wnid: i for i, wnid in enumerate(wnids)}

    def sorted_into_classes(part: Path) -> list[tuple[Path, int]]:
        return [
            (path, label[wnid])
            for wnid in wnids
            for path in sorted((part / wnid).rglob("*"))
            if path.suffix.lower() in (".jpeg", ".jpg", ".png")
        ]

    notes = folder / "val" / "val_annotations.txt"
    test = sorted_into_classes(folder / "val")
    if not test and notes.exists():
        rows = [line.split("\t") for line in notes.read_text().splitlines()]
        test = [(folder / "val" / "images" / row[0], label[row[1]]) for row in rows]
    train = sorted_into_classes(folder / "train")
    for part, files in (("train", train), ("val", test)):
        if not files:
            raise FileNotFoundError(f"{folder / part}: no images of the {len(wnids)} classes in wnids.txt")
    decode = decoder(lambda image: image.resize((TINY_SIDE, TINY_SIDE)))  # they are of that size: no change
    images = [decode_all([path for path, _ in files], decode) for files in (train, test)]
    labels = [np.array([y for _, y in files]) for files in (train, test)]
    return Arrays(images[0], labels[0], images[1], labels[1], classes=len(wnids))


def by_time(x: np.ndarray, y: np.ndarray) -> Arrays:
    """A recording in the order in which it was made: its end is the test."""
    cut = len(y) - max(1, round(TEST_SHARE * len(y)))
    return Arrays(x[:cut], y[:cut], x[cut:], y[cut:], classes=0)


def road(image: Any) -> Any:
    box = (0, round(ROAD_TOP * image.height), image.width, round(ROAD_BOTTOM * image.height))
    return shrunk(image.crop(box))


def shrunk(image: Any) -> Any:
    return image.resize((ROAD_SIDE, ROAD_SIDE), resample=1)  # 1: Lanczos


def driving_log(folder: Path) -> Arrays:
    """Udacity's simulator: IMG/ and driving_log.csv (centre, left, right, steering, ..), its first line names or not.

    The log holds paths of the machine that recorded, often a Windows one: only the file's name is used.
    """
    path = folder / "driving_log.csv"
    with open(path, newline="") as lines:
        rows = [row for row in csv.reader(lines) if row]
    if rows and rows[0][0].strip() == "center":
        rows = rows[1:]
    if len(rows) < 2:
        raise ValueError(f"{path}: expected two frames or more, got {len(rows)}")
    try:
        steering = np.array([row[3] for row in rows], np.float32)
    except (IndexError, ValueError) as error:
        raise ValueError(f"{path}: expected rows of centre, left, right, steering: {error}") from error
    frames = [folder / "IMG" / PureWindowsPath(row[0].strip()).name for row in rows]
    return by_time(decode_all(frames, decoder(road)), steering)


# Compact npz files: plain arrays, or pictures end to end in one array of bytes with offsets


def npz(folder: Path, pattern: str) -> dict[str, np.ndarray]:
    with np.load(need(folder, pattern), allow_pickle=False) as file:
        return dict(file)


def pieces(values: dict[str, np.ndarray], images: str, offsets: str) -> list[bytes]:
    blob, at = values[images], values[offsets]
    return [blob[start:end].tobytes() for start, end in pairwise(at)]


def fashion_npz(folder: Path, pattern: str = "fashion_mnist.npz") -> Arrays:
    values = npz(folder, pattern)
    (train, train_y), (test, test_y) = ((values["x_" + part], values["y_" + part]) for part in ("train", "test"))
    return Arrays(train[:, None], train_y, test[:, None], test_y, classes=10)


def cifar10_npz(folder: Path) -> Arrays:
    files = [npz(folder, "cifar10_a.npz"), npz(folder, "cifar10_b.npz")]
    decode = decoder()

    def part(values: dict[str, np.ndarray], name: str) -> np.ndarray:
        sheets = [decode(piece) for piece in pieces(values, name + "_webp", name + "_offsets")]  # (3, k * 32, 32) each
        return np.concatenate([sheet.reshape(3, -1, 32, 32).swapaxes(0, 1) for sheet in sheets])

    return Arrays(
        np.concatenate([part(values, "train") for values in files]),
        np.concatenate([values["train_labels"] for values in files]),
        part(files[1], "test"),
        files[1]["test_labels"],
        classes=10,
    )


def tiny_npz(folder: Path) -> Arrays:
    values, decode = npz(folder, "tiny_imagenet_*.npz"), decoder()
    train, test = (decode_all(pieces(values, part + "_jpeg", part + "_offsets"), decode) for part in ("train", "val"))
    return Arrays(train, values["train_labels"], test, values["val_labels"], classes=len(values["wnids"]))


def udacity_npz(folder: Path) -> Arrays:
    values = npz(folder, "udacity*.npz")
    frames = decode_all(pieces(values, "jpeg", "offsets"), decoder(shrunk))  # of the road alone
    return by_time(frames, values["steering"].astype(np.float32))
