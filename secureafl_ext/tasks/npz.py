"""Readers of compact npz files: plain images, or encoded pictures in one array of bytes with offsets."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from .. import bounded_files
from .readers import (
    CIFAR,
    FASHION,
    FRAMES,
    ROAD,
    TINY,
    TINY_CLASSES,
    Arrays,
    Size,
    by_time,
    decode_all,
    decoder,
    need,
    shrunk,
)

LABEL = 8  # bytes of the widest label


class Npz:
    """The wanted arrays of a file. wanted: largest number of bytes by name"""

    def __init__(self, folder: Path, pattern: str, wanted: dict[str, int]):
        self.path = need(folder, pattern)
        self.arrays = bounded_files.arrays(self.path, wanted)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def images(self, name: str) -> np.ndarray:
        """(N, H, W) as (N, 1, H, W)"""
        if self[name].ndim != 3:
            raise ValueError(f"{self.path}: {name} must have shape (N, H, W), got {self[name].shape}")
        return self[name][:, None]

    def pieces(self, images: str, offsets: str) -> list[bytes]:
        """The encoded pictures. Offsets must ascend: otherwise a small file could expand to a large one."""
        blob, at = self[images], self[offsets]
        right = blob.dtype == np.uint8 and blob.ndim == at.ndim == 1 and at.dtype.kind in "iu" and len(at) > 1
        if not right or not (at[0] >= 0 and at[-1] <= blob.size and (at[:-1] <= at[1:]).all()):
            got = f"{at.dtype} {at.shape} into {blob.dtype} {blob.shape}"
            raise ValueError(f"{self.path}: {offsets} must ascend within {images}, an array of bytes, got {got}")
        return [blob[start:end].tobytes() for start, end in pairwise(at.tolist())]


def limits(size: Size, samples: int, images: str, labels: str, offsets: str = "") -> dict[str, int]:
    """The largest number of bytes of these arrays. An encoded picture needs no more bytes than its pixels."""
    most = {images: size.bytes(samples), labels: LABEL * samples}
    return most | ({offsets: LABEL * (samples + 1)} if offsets else {})


def fashion_npz(folder: Path, pattern: str = "fashion_mnist.npz") -> Arrays:
    wanted = limits(FASHION, FASHION.train, "x_train", "y_train") | limits(FASHION, FASHION.test, "x_test", "y_test")
    file = Npz(folder, pattern, wanted)
    return Arrays(file.images("x_train"), file["y_train"], file.images("x_test"), file["y_test"], classes=10)


def cifar_npz(folder: Path, *, first: str, second: str, classes: int) -> Arrays:
    """The second file has the test set too."""
    train = limits(CIFAR, CIFAR.train, "train_webp", "train_labels", "train_offsets")
    test = limits(CIFAR, CIFAR.test, "test_webp", "test_labels", "test_offsets")
    files = [Npz(folder, first, train), Npz(folder, second, train | test)]
    images = [columns(file, "train", CIFAR.train) for file in files]
    labels = [file["train_labels"] for file in files]
    for file, x, y in zip(files, images, labels, strict=True):
        if y.shape != (len(x),):
            raise ValueError(f"{file.path}: train_labels must have shape ({len(x)},), got {y.shape}")
    return Arrays(
        np.concatenate(images),
        np.concatenate(labels),
        columns(files[1], "test", CIFAR.test),
        files[1]["test_labels"],
        classes=classes,
    )


def columns(file: Npz, name: str, samples: int) -> np.ndarray:
    """Pictures of k images of 32 x 32, one below the other, to (N, 3, 32, 32)."""
    decode, sheets, count = decoder(), [], 0
    for i, piece in enumerate(file.pieces(name + "_webp", name + "_offsets")):
        sheet = decode(piece, f"{file.path}, picture {i} of {name}")  # (3, k * 32, 32)
        count += sheet.shape[1] // 32
        if sheet.shape[1] % 32 or sheet.shape[2] != 32 or count > samples:
            got = f"{count} with picture {i}, of {sheet.shape[2]} x {sheet.shape[1]}"
            raise ValueError(f"{file.path}: {name} must have up to {samples} images in columns of 32, got {got}")
        sheets.append(sheet.reshape(3, -1, 32, 32).swapaxes(0, 1))
    return np.concatenate(sheets)


def tiny_npz(folder: Path) -> Arrays:
    parts, wanted = {"train": TINY.train, "val": TINY.test}, {"wnids": TINY_CLASSES * 256}
    for part, samples in parts.items():
        wanted |= limits(TINY, samples, part + "_jpeg", part + "_labels", part + "_offsets")
    file, decode = Npz(folder, "tiny_imagenet_*.npz", wanted), decoder()
    train, test = (
        decode_all(file.pieces(part + "_jpeg", part + "_offsets"), decode, TINY.shape, file.path) for part in parts
    )
    return Arrays(train, file["train_labels"], test, file["val_labels"], classes=file["wnids"].size)


def udacity_npz(folder: Path) -> Arrays:
    file = Npz(folder, "udacity*.npz", limits(ROAD, FRAMES, "jpeg", "steering", "offsets"))
    frames = decode_all(file.pieces("jpeg", "offsets"), decoder(shrunk), ROAD.shape, file.path)  # cropped already
    if file["steering"].dtype.kind not in "iuf":
        raise ValueError(f"{file.path}: steering must be numbers, got {file['steering'].dtype}")
    return by_time(frames, file["steering"].astype(np.float32))
