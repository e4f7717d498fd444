"""Data sets: the images in memory, the search for their files, and a small set that is part of the package."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..validation import shown
from . import npz, readers
from .augment import Crops, crops
from .readers import Arrays
from .sources import DEFAULT, SOURCES, Source

VARIABLE = "SECUREAFL_DATA"
# Searched after --data-dir and the variable. Debian's dataset-fashion-mnist is in the last one.
USUAL = ("./data", "~/.cache/secureafl", "~/.cache", "~/data", "~/.keras/datasets", "/usr/share/datasets")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as bytes, on any device, and how they become inputs of a model."""

    name: str
    train_x: Tensor  # (N, C, H, W) uint8
    train_y: Tensor  # (N) int64 labels, or float32 values if classes is 0
    test_x: Tensor
    test_y: Tensor
    classes: int  # 0: regression
    scale: Tensor  # (C, 1, 1): an input is pixel * scale + shift
    shift: Tensor  # (C, 1, 1)
    crops: Crops | None = None  # random crops and flips of the training images

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train_x.shape[1:]
        return channels, height, width

    def inputs(self, x: Tensor) -> Tensor:
        """Pixels (B, C, H, W), 0 to 255, as inputs of a model: float32, each channel with mean 0 and deviation 1."""
        return torch.addcmul(self.shift, x, self.scale)  # one kernel, which also converts bytes to floats

    def train(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of these training samples. `number` must be on the data's device, so that the host never waits."""
        pixels, labels = self.train_pixels(number)
        return self.inputs(pixels), labels

    def train_pixels(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """The images of these training samples, bytes, and their labels. With `crops`: sample + N * variant."""
        if self.crops is None:
            return self.train_x[number], self.train_y[number]
        return self.crops.pixels(number, self.shape), self.train_y[number % len(self.train_y)]

    def reduced(self, side: int) -> "Dataset":
        """Square images of `side` x `side` pixels, each the mean of a square of the original's."""
        height, width = self.shape[1:]
        if height != width or height % side:
            raise ValueError(f"dataset {self.name!r}: side must divide {height} x {width}, got {side}")

        def mean(images: Tensor) -> Tensor:  # in parts: as floats they take four times as much memory
            return torch.cat([F.avg_pool2d(part.float(), height // side).round().byte() for part in images.split(4096)])

        return replace(self, train_x=mean(self.train_x), test_x=mean(self.test_x))

    def augmented(self) -> "Dataset":
        return replace(self, crops=crops(self.train_x))

    def held_out(self, share: float) -> "Dataset":
        """A data set without the test set: this share of the training data, always the same, takes its place.

        For a regression these are the last frames, as in its test set; otherwise a random choice.
        """
        order = torch.arange(len(self.train_y))
        if self.classes:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
        held = round(share * len(order))
        rest, test = (part.sort().values.to(self.train_y.device) for part in order.split([len(order) - held, held]))
        x, y = self.train_x, self.train_y
        return replace(self, train_x=x[rest], train_y=y[rest], test_x=x[test], test_y=y[test])

    def to(self, device: torch.device | str) -> "Dataset":
        return replace(
            self,
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
            scale=self.scale.to(device),
            shift=self.shift.to(device),
        )


class Found(NamedTuple):
    name: str
    format: str
    folder: Path  # of a plug-in: the name of its module


EMBEDDED = Found(DEFAULT, "npz in the package", Path(__file__).parent)


def places(data_dir: str | Path | None = None) -> list[tuple[str, Path]]:
    """The places of the search, in order: a label and a path. A place that the user named must exist."""
    named = [("data_dir", data_dir), (VARIABLE, os.environ.get(VARIABLE) or None)]
    result = []
    for name, folder in named:
        if folder is not None:
            path = Path(folder).expanduser()
            if not path.is_dir():
                raise NotADirectoryError(f"{name}: no folder {str(folder)!r}")
            result.append((name, path))
    return result + [(folder, Path(os.path.expanduser(folder))) for folder in USUAL]


def found(data_dir: str | Path | None = None) -> list[Found]:
    """Every copy of every data set, in the order of the search. `load` takes the first copy of a name."""
    plugged = [Found(name, "plug-in", Path(source.load.__module__)) for name, source in SOURCES.items() if source.load]
    result = [EMBEDDED, *plugged]
    for place, path in places(data_dir):
        for name, source in SOURCES.items():
            for form in source.formats if name != DEFAULT else ():
                # Other data sets have files of the same names (MNIST is idx too). Only a folder that the user named may
                # hold the files directly; elsewhere the name of the folder must identify the data set.
                below = ("", name, *form.folders) if place not in USUAL else (name, *form.folders)
                for folder in dict.fromkeys(path / sub for sub in below):
                    if all(readers.find(folder, pattern) for pattern in form.files):
                        result.append(Found(name, form.label, folder))
    return result


def load(name: str = DEFAULT, data_dir: str | Path | None = None) -> Dataset:
    """The data set of that name, from the first place that has it. Default: the set in the package."""
    if name not in SOURCES:
        raise ValueError(f"unknown dataset {name!r}; choose from {', '.join(SOURCES)}")
    load_plugged = SOURCES[name].load
    if load_plugged is not None:
        return dataset(name, load_plugged(Path(data_dir).expanduser() if data_dir is not None else None))
    if name == DEFAULT:
        return dataset(name, npz.fashion_npz(EMBEDDED.folder, "fashion_mnist_small.npz"))
    copy = next((copy for copy in found(data_dir) if copy.name == name), None)
    if copy is None:
        raise FileNotFoundError(missing(name, data_dir))
    read = next(form.read for form in SOURCES[name].formats if form.label == copy.format)
    return dataset(name, read(copy.folder))


def missing(name: str, data_dir: str | Path | None) -> str:
    source = SOURCES[name]
    searched = ", ".join(label if label in USUAL else f"{path} ({label})" for label, path in places(data_dir))
    wanted = "; ".join(
        f"{form.label}: {', '.join((name, *form.folders))} with {form.files[0]}" for form in source.formats
    )
    return (
        f"dataset {name!r} not found. Searched {searched}. Expected one of these folders there: {wanted}."
        f" To get it: {source.hint}. To search another place: data_dir or {VARIABLE}. Without any file: {DEFAULT!r}"
    )


def dataset(name: str, arrays: Arrays) -> Dataset:
    """The arrays of a reader or a plug-in, checked and converted to tensors."""
    source = SOURCES[name]
    if not isinstance(arrays, Arrays):
        raise ValueError(f"dataset {name!r}: load must return Arrays, got {shown(arrays)}")
    if (arrays.classes == 0) != source.regression:
        raise ValueError(f"dataset {name!r}: regression is {source.regression}, but classes is {arrays.classes}")
    shape = source.size.shape if source.size else np.shape(arrays.train_x)[1:]
    for part, x, y in (("train", arrays.train_x, arrays.train_y), ("test", arrays.test_x, arrays.test_y)):
        most = None if source.size is None else source.size.train if part == "train" else source.size.test
        _check(f"dataset {name!r}: {part} has", x, y, arrays.classes, shape, most)
    mean, std = normalization(name, source, arrays.train_x)
    images = [torch.tensor(x) for x in (arrays.train_x, arrays.test_x)]
    # numpy's astype: torch does not know the other byte order and all widths
    kind = np.int64 if arrays.classes else np.float32
    labels = [torch.tensor(y.astype(kind)) for y in (arrays.train_y, arrays.test_y)]
    return Dataset(name, images[0], labels[0], images[1], labels[1], arrays.classes, 1 / (255 * std), -mean / std)


def normalization(name: str, source: Source, images: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and deviation (C, 1, 1) of pixels between 0 and 1."""
    channels = images.shape[1]
    if source.mean is None or source.std is None:
        pixels = images.swapaxes(0, 1).reshape(channels, -1)
        means, deviations = pixels.mean(1) / 255, pixels.std(1).clip(min=1) / 255
    else:
        means, deviations = np.array(source.mean), np.array(source.std)
        if means.shape != (channels,) or deviations.shape != (channels,) or not (deviations > 0).all():
            expected = f"{channels} numbers each, std positive"
            raise ValueError(f"dataset {name!r}: mean and std must be {expected}, got {source.mean} and {source.std}")
    mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (means, deviations))
    return mean, std


def _check(where: str, x: np.ndarray, y: np.ndarray, classes: int, shape: tuple[int, ...], most: int | None) -> None:
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        raise ValueError(f"{where} {type(x).__name__} and {type(y).__name__}, expected two numpy arrays")
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != shape:
        raise ValueError(f"{where} images of {x.dtype} and shape {x.shape}, expected uint8 and (N, {shape})")
    if y.ndim != 1 or y.dtype.kind not in ("iu" if classes else "f"):
        raise ValueError(f"{where} labels of {y.dtype} and shape {y.shape}, expected one number per image")
    if len(x) != len(y) or len(y) == 0:
        raise ValueError(f"{where} {len(x)} images and {len(y)} labels")
    if most is not None and len(x) > most:
        raise ValueError(f"{where} {len(x)} images, expected at most {most}")
    if classes and not 0 <= y.min() <= y.max() < classes:
        raise ValueError(f"{where} labels {y.min()} to {y.max()}, expected 0 to {classes - 1}")
    if not np.isfinite(y).all():
        raise ValueError(f"{where} a value that is not finite, expected numbers")
