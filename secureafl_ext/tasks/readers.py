"""Readers of data sets: idx files, CIFAR's batches, image folders, driving logs.

Every reader takes a folder and returns Arrays. It downloads nothing and never calls a function that a file names. Files
are untrusted: a reader reads no more bytes than the data set can have. A file that does not fit raises a ValueError
with the file's name, the expected content and the content that came.
"""

import csv
import io
import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from .. import bounded_files
from . import safe_pickle


class Size(NamedTuple):
    """The largest size of a data set."""

    train: int
    test: int
    shape: tuple[int, int, int]  # of an image

    def bytes(self, samples: int) -> int:
        return samples * math.prod(self.shape)


FASHION = Size(60_000, 10_000, (1, 28, 28))
CIFAR = Size(50_000, 10_000, (3, 32, 32))
TINY, TINY_CLASSES = Size(100_000, 10_000, (3, 64, 64)), 200
FRAMES = 200_000  # of one recording: more than five hours
ROAD = Size(FRAMES, FRAMES, (3, 32, 32))  # the size that ResNet-20 was made for
TEXT = 2**26  # bytes: of names, annotations, a log
# Largest picture in pixels. Only these formats are decoded: decoders of some others start programs.
PIXELS, PICTURES = 2**22, ("JPEG", "PNG", "WEBP")
# A frame of the driving simulator, 320 x 160, has sky above and the bonnet below: rows 60 to 134 are road.
ROAD_TOP, ROAD_BOTTOM = 60 / 160, 135 / 160
# Ten frames a second: a random test set would have almost the same frames as the training set.
TEST_SHARE = 0.2


class Arrays(NamedTuple):
    train_x: np.ndarray  # (N, C, H, W) uint8
    train_y: np.ndarray  # (N) labels, or float values if classes is 0
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int  # 0: regression


def find(folder: Path, pattern: str) -> Path | None:
    """The first file of that name, with or without .gz."""
    return next(iter(sorted(folder.glob(pattern)) + sorted(folder.glob(pattern + ".gz"))), None)


def need(folder: Path, pattern: str) -> Path:
    path = find(folder, pattern)
    if path is None:
        raise FileNotFoundError(f"{folder}: no file {pattern}")
    return path


# idx: Fashion-MNIST as published, and as Debian and torchvision keep it


def idx(path: Path, dims: int, most: int = FASHION.bytes(FASHION.train)) -> np.ndarray:
    """An idx file of at most so many bytes: magic 0, 0, 8 (unsigned byte), dims; the sizes, big-endian; the values."""
    data = bounded_files.contents(path, 4 + 4 * dims + most)
    if data[:4] != bytes([0, 0, 8, dims]) or len(data) < 4 + 4 * dims:
        raise ValueError(f"{path}: not an idx file of bytes in {dims} dimensions")
    shape = struct.unpack_from(f">{dims}I", data, 4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims)
    if values.size != math.prod(shape):
        raise ValueError(f"{path}: header says {shape}, {values.size} bytes follow")
    return values.reshape(shape)


def idx_folder(folder: Path) -> Arrays:
    def part(name: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
        images = idx(need(folder, name + "-images[-.]idx3-ubyte"), 3, FASHION.bytes(samples))
        return images[:, None], idx(need(folder, name + "-labels[-.]idx1-ubyte"), 1, samples)

    return Arrays(*part("train", FASHION.train), *part("t10k", FASHION.test), classes=10)


# CIFAR


def batch(path: Path) -> dict[str, Any]:
    # Beside an image there are two labels and a file name.
    data = bounded_files.contents(path, CIFAR.train * (math.prod(CIFAR.shape) + 256))
    try:
        return safe_pickle.loads(data)
    except Exception as error:  # a hostile or broken pickle can fail anywhere
        raise ValueError(
            f"{path}: refused, a CIFAR batch is a dict of arrays, numbers, text and lists alone: {str(error)[:300]}"
        ) from error


def whole_numbers(values: Any, path: Path, name: str) -> np.ndarray:
    """A list of nothing but whole numbers, or an array of them."""
    if isinstance(values, list) and all(type(value) is int and abs(value) < 2**31 for value in values):
        values = np.array(values, np.int64)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
        raise ValueError(f"{path}: {name} must be a list of whole numbers, got something else")
    return values


def cifar_images(rows: np.ndarray, path: Path) -> np.ndarray:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072:
        raise ValueError(f"{path}: expected rows of 3072 bytes, a red, a green and a blue plane of 32 x 32")
    return rows.reshape(-1, 3, 32, 32)


def cifar_python(folder: Path, train: Iterable[str], test: str, labels: str, classes: int) -> Arrays:
    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = need(folder, name)
        values = batch(path)
        if not {"data", labels} <= set(values):
            raise ValueError(f"{path}: expected the keys data and {labels}, got {', '.join(values)[:200]}")
        return cifar_images(values["data"], path), whole_numbers(values[labels], path, labels)

    return Arrays(*joined(map(part, train)), *part(test), classes=classes)


def joined(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def cifar_binary(folder: Path, train: Iterable[str], test: str, labels: int, classes: int) -> Arrays:
    """Records of `labels` label bytes, of which the last one counts, and an image."""

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = need(folder, name)
        values = np.frombuffer(bounded_files.contents(path, CIFAR.train * (labels + 3072)), np.uint8)
        if values.size == 0 or values.size % (labels + 3072):
            raise ValueError(f"{path}: {values.size} bytes are not records of {labels} + 3072")
        rows = values.reshape(-1, labels + 3072)
        return cifar_images(rows[:, labels:], path), rows[:, labels - 1]

    return Arrays(*joined(map(part, train)), *part(test), classes=classes)


# Images


Decode = Callable[[Path | bytes, Path | str], np.ndarray]


def decoder(edit: Callable[[Any], Any] = lambda image: image) -> Decode:
    """A function of a file or its bytes, and of its name for errors, that returns (C, H, W) uint8. edit: changes the
    picture before that"""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images are decoded by Pillow; pip install 'secureafl_ext[sim]'") from error

    def decode(source: Path | bytes, name: Path | str) -> np.ndarray:
        if isinstance(source, Path):
            bounded_files.need_file(source, 4 * PIXELS)
        file = source if isinstance(source, Path) else io.BytesIO(source)
        with bounded_files.broken(name, "image"), Image.open(file, formats=PICTURES) as image:
            if image.width * image.height > PIXELS:  # from the header: nothing is decoded yet
                raise ValueError(f"expected at most {PIXELS} pixels, got {image.width} x {image.height}")
            return np.asarray(edit(image.convert("RGB"))).transpose(2, 0, 1)

    return decode


def decode_all(sources: Sequence[Path | bytes], decode: Decode, shape: tuple[int, int, int], where: Path) -> np.ndarray:
    out = np.empty((len(sources), *shape), np.uint8)

    def place(i: int) -> None:
        source = sources[i]
        name = f"{where}, picture {i}" if isinstance(source, bytes) else source
        image = decode(source, name)
        if image.shape != shape:
            raise ValueError(f"{name}: expected the shape {shape}, got {image.shape}")
        out[i] = image

    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter's lock
        list(pool.map(place, range(len(sources))))
    return out


def tiny_imagenet(folder: Path) -> Arrays:
    """train/WNID/images/*; val as published (one folder, val_annotations.txt) or sorted into val/WNID afterwards."""
    wnids = bounded_files.text(folder / "wnids.txt", TEXT).split()
    # The names become parts of paths: a slash or dots would lead out of the folder.
    odd = [wnid for wnid in wnids if not re.fullmatch(r"\w{1,64}", wnid)]
    if odd or not 1 <= len(wnids) <= TINY_CLASSES or len(set(wnids)) < len(wnids):
        got = f"{odd[0][:64]!r}" if odd else f"{len(wnids)} names, {len(set(wnids))} different"
        raise ValueError(f"{folder / 'wnids.txt'}: expected up to {TINY_CLASSES} names of classes, got {got}")
    label = {wnid: i for i, wnid in enumerate(wnids)}

    def sorted_into_classes(part: Path, samples: int) -> list[tuple[Path, int]]:
        found = (
            (path, label[wnid])
            for wnid in wnids
            for path in sorted((part / wnid).rglob("*"))
            if path.suffix.lower() in (".jpeg", ".jpg", ".png")
        )
        return list(islice(found, samples + 1))

    notes = folder / "val" / "val_annotations.txt"
    test = sorted_into_classes(folder / "val", TINY.test)
    if not test and notes.exists():
        test = [(folder / "val" / "images" / name, label[wnid]) for name, wnid in annotated(notes, label)]
    train = sorted_into_classes(folder / "train", TINY.train)
    for part, files, samples in (("train", train, TINY.train), ("val", test, TINY.test)):
        if not files:
            raise FileNotFoundError(f"{folder / part}: no images of the {len(wnids)} classes in wnids.txt")
        if len(files) > samples:
            raise ValueError(f"{folder / part}: expected at most {samples} images, got more")
    decode = decoder(lambda image: image.resize(TINY.shape[1:]))  # no change: they have that size
    images = [decode_all([path for path, _ in files], decode, TINY.shape, folder) for files in (train, test)]
    labels = [np.array([y for _, y in files]) for files in (train, test)]
    return Arrays(images[0], labels[0], images[1], labels[1], classes=len(wnids))


def annotated(notes: Path, known: Iterable[str]) -> list[tuple[str, str]]:
    """The file name and the class of each line. The name must not be a path."""
    rows = []
    for number, line in enumerate(bounded_files.text(notes, TEXT).splitlines(), 1):
        name, wnid = [*line.split("\t"), ""][:2]
        if wnid not in known or not re.fullmatch(r"\w[\w.-]{0,99}", name):
            raise ValueError(f"{notes}, line {number}: expected a file's name and a known class, got {line[:80]!r}")
        rows.append((name, wnid))
    return rows


def by_time(x: np.ndarray, y: np.ndarray) -> Arrays:
    """A recording in its order of time. The end is the test set."""
    cut = len(y) - max(1, round(TEST_SHARE * len(y)))
    return Arrays(x[:cut], y[:cut], x[cut:], y[cut:], classes=0)


def road(image: Any) -> Any:
    box = (0, round(ROAD_TOP * image.height), image.width, round(ROAD_BOTTOM * image.height))
    return shrunk(image.crop(box))


def shrunk(image: Any) -> Any:
    return image.resize(ROAD.shape[1:], resample=1)  # 1: Lanczos


def driving_log(folder: Path) -> Arrays:
    """Udacity's simulator: IMG/ and driving_log.csv (centre, left, right, steering, ..), with or without a header.

    The log has paths of the recording machine, often of Windows: only the file's name is used.
    """
    path = folder / "driving_log.csv"
    try:
        rows = [row for row in csv.reader(io.StringIO(bounded_files.text(path, TEXT), newline="")) if row]
    except csv.Error as error:
        raise ValueError(f"{path}: not a readable csv file: {error}") from error
    if rows and rows[0][0].strip() == "center":
        rows = rows[1:]
    if not 2 <= len(rows) <= FRAMES:
        raise ValueError(f"{path}: expected 2 to {FRAMES} frames, got {len(rows)}")
    try:
        steering = np.array([row[3] for row in rows], np.float32)
    except (IndexError, ValueError) as error:
        raise ValueError(f"{path}: expected rows of centre, left, right, steering: {error}") from error
    frames = [folder / "IMG" / PureWindowsPath(row[0].strip()).name for row in rows]
    return by_time(decode_all(frames, decoder(road), ROAD.shape, folder), steering)
