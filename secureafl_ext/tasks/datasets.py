"""The data sets of the paper, found where people keep them, and a small one that needs no file."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import npz, readers
from .readers import Arrays

DEFAULT = "fashion-mnist-small"
VARIABLE = "SECUREAFL_DATA"
# After --data-dir and the variable. Debian's dataset-fashion-mnist lies in the last.
USUAL = ("./data", "~/.cache/secureafl", "~/.cache", "~/data", "~/.keras/datasets", "/usr/share/datasets")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as bytes, on any device, and what makes inputs of them."""

    name: str
    train_x: Tensor  # (N, C, H, W) uint8
    train_y: Tensor  # (N) int64 labels, or float32 values where classes is 0
    test_x: Tensor
    test_y: Tensor
    classes: int  # 0: regression
    scale: Tensor  # (C, 1, 1): an input is pixel * scale + shift
    shift: Tensor  # (C, 1, 1)

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(self.train_x.shape[1:])

    def inputs(self, x: Tensor) -> Tensor:
        """Pixels (B, C, H, W), 0 to 255, as a model wants them: float32, every channel of mean 0 and deviation 1."""
        return torch.addcmul(self.shift, x, self.scale)  # one kernel, the bytes become floats in it

    def train(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of these training samples. `index` on the data's device: nothing waits for it."""
        return self.inputs(self.train_x[index]), self.train_y[index]

    def held_out(self, share: float) -> "Dataset":
        """Without the test set: this share of the training data, the same every time, takes its place.

        Of a regression the last frames, as everywhere; else a random choice.
        """
        order = torch.arange(len(self.train_y))
        if self.classes:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
        held = round(share * len(order))
        rest, test = (part.sort().values.to(self.train_y.device) for part in order.split([len(order) - held, held]))
        parts = {"train_x": self.train_x[rest], "train_y": self.train_y[rest]}
        return replace(self, **parts, test_x=self.train_x[test], test_y=self.train_y[test])

    def to(self, device: torch.device | str) -> "Dataset":
        names = ("train_x", "train_y", "test_x", "test_y", "scale", "shift")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


class Format(NamedTuple):
    label: str
    folders: tuple[str, ...]  # below a place, besides one of the data set's own name
    files: tuple[str, ...]  # there if all of these are, packed by gzip or not
    read: Callable[[Path], Arrays]


class Source(NamedTuple):
    about: str
    mean: tuple[float, ...]  # of pixels between 0 and 1, per channel, over the training set
    std: tuple[float, ...]
    size: readers.Size
    formats: tuple[Format, ...]
    hint: str = ""  # how one comes by it


class Found(NamedTuple):
    name: str
    format: str
    folder: Path


CIFAR10_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10_BINARY = tuple(f"{name}.bin" for name in CIFAR10_TRAIN)

FASHION = Source(
    "28 x 28 grey, 10 kinds of clothing, 60,000 + 10,000",
    (0.2860,),
    (0.3530,),
    readers.FASHION,
    (
        Format(
            "idx",
            ("FashionMNIST/raw",),
            tuple(
                f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images[-.]idx3", "labels[-.]idx1")
            ),
            readers.idx_folder,
        ),
        Format("npz", (), ("fashion_mnist.npz",), npz.fashion_npz),
    ),
    "Debian and Ubuntu: apt install dataset-fashion-mnist",
)

SOURCES = {
    "fashion-mnist": FASHION,
    "cifar10": Source(
        "32 x 32 colour, 10 classes, 50,000 + 10,000",
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        readers.CIFAR,
        (
            Format(
                "python batches",
                ("cifar-10-batches-py",),
                (*CIFAR10_TRAIN, "test_batch"),
                partial(readers.cifar_python, train=CIFAR10_TRAIN, test="test_batch", labels="labels", classes=10),
            ),
            Format(
                "binary batches",
                ("cifar-10-batches-bin",),
                (*CIFAR10_BINARY, "test_batch.bin"),
                partial(readers.cifar_binary, train=CIFAR10_BINARY, test="test_batch.bin", labels=1, classes=10),
            ),
            Format("npz", (), ("cifar10_a.npz", "cifar10_b.npz"), npz.cifar10_npz),
        ),
        "unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz",
    ),
    "cifar100": Source(
        "32 x 32 colour, 100 classes, 50,000 + 10,000",
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        readers.CIFAR,
        (
            Format(
                "python batches",
                ("cifar-100-python",),
                ("train", "test", "meta"),
                partial(readers.cifar_python, train=("train",), test="test", labels="fine_labels", classes=100),
            ),
            Format(
                "binary batches",
                ("cifar-100-binary",),
                ("train.bin", "test.bin"),
                partial(readers.cifar_binary, train=("train.bin",), test="test.bin", labels=2, classes=100),
            ),
        ),
        "unpack cifar-100-python.tar.gz or cifar-100-binary.tar.gz",
    ),
    "tiny-imagenet": Source(
        "64 x 64 colour, 200 classes, 100,000 + 10,000",
        (0.4802, 0.4481, 0.3975),
        (0.2770, 0.2691, 0.2821),
        readers.TINY,
        (
            Format("image folders", ("tiny-imagenet-200",), ("wnids.txt", "train", "val"), readers.tiny_imagenet),
            Format("npz", (), ("tiny_imagenet_*.npz",), npz.tiny_npz),
        ),
        "unpack tiny-imagenet-200.zip",
    ),
    "udacity": Source(
        "32 x 32 colour, the road ahead and the steering (-1 to 1), split by time",
        (0.58, 0.56, 0.47),  # of one recording; others differ little beside the deviation
        (0.18, 0.17, 0.16),
        readers.ROAD,
        (
            Format("driving log", ("data", "track"), ("driving_log.csv", "IMG"), readers.driving_log),
            Format("npz", (), ("udacity*.npz",), npz.udacity_npz),
        ),
        "record with Udacity's simulator, or unpack its sample data: driving_log.csv beside IMG",
    ),
    # 400 + 100 images of each class of Fashion-MNIST, inside the package.
    DEFAULT: FASHION._replace(about="28 x 28 grey, 10 kinds of clothing, 4,000 + 1,000; comes with the package"),
}
EMBEDDED = Found(DEFAULT, "npz in the package", Path(__file__).parent)


def places(data_dir: str | Path | None = None) -> list[tuple[str, Path]]:
    """Where data is looked for, in order: what to call the place, and its path. A place that was named must exist."""
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
    """Every copy of every data set, in the order of the search; `load` takes the first of a name."""
    result = [EMBEDDED]
    for place, path in places(data_dir):
        for name, source in SOURCES.items():
            for form in source.formats if name != DEFAULT else ():
                # Other sets have files of the same names (MNIST is idx too): a folder that only its user named may
                # hold them directly, elsewhere the folder's name has to tell.
                below = ("", name, *form.folders) if place not in USUAL else (name, *form.folders)
                for folder in dict.fromkeys(path / sub for sub in below):
                    if all(readers.find(folder, pattern) for pattern in form.files):
                        result.append(Found(name, form.label, folder))
    return result


def load(name: str = DEFAULT, data_dir: str | Path | None = None) -> Dataset:
    """The data set of that name from the first place that has it; without a name the one in the package."""
    if name not in SOURCES:
        raise ValueError(f"unknown dataset {name!r}; choose from {', '.join(SOURCES)}")
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
        f"dataset {name!r} not found. Searched {searched}. Wanted there, as a folder: {wanted}."
        f" To get it: {source.hint}. Another place: data_dir or {VARIABLE}. Without any file: {DEFAULT!r}"
    )


def dataset(name: str, arrays: Arrays) -> Dataset:
    """Arrays, as a reader returns them, checked and made tensors."""
    source, classes = SOURCES[name], arrays.classes
    _check(name, "train", arrays.train_x, arrays.train_y, classes, source.size.train)
    _check(name, "test", arrays.test_x, arrays.test_y, classes, source.size.test)
    std = torch.tensor(source.std).view(-1, 1, 1)
    mean = torch.tensor(source.mean).view(-1, 1, 1)
    images = [torch.tensor(x) for x in (arrays.train_x, arrays.test_x)]
    # numpy's astype, as torch knows neither the other order of bytes nor all widths
    labels = [torch.tensor(y.astype(np.int64 if classes else np.float32)) for y in (arrays.train_y, arrays.test_y)]
    return Dataset(name, images[0], labels[0], images[1], labels[1], classes, 1 / (255 * std), -mean / std)


def _check(name: str, part: str, x: np.ndarray, y: np.ndarray, classes: int, samples: int) -> None:
    shape, where = SOURCES[name].size.shape, f"dataset {name!r}: {part} has"
    if x.dtype != np.uint8 or x.shape[1:] != shape:
        raise ValueError(f"{where} images of {x.dtype} and shape {x.shape}, expected uint8 and (N, {shape})")
    if y.ndim != 1 or y.dtype.kind not in ("iu" if classes else "f"):
        raise ValueError(f"{where} labels of {y.dtype} and shape {y.shape}, expected one number per image")
    if len(x) != len(y) or len(y) == 0:
        raise ValueError(f"{where} {len(x)} images and {len(y)} labels")
    if len(x) > samples:
        raise ValueError(f"{where} {len(x)} images, expected at most {samples}")
    if classes and not 0 <= y.min() <= y.max() < classes:
        raise ValueError(f"{where} labels {y.min()} to {y.max()}, expected 0 to {classes - 1}")
    if not np.isfinite(y).all():
        raise ValueError(f"{where} a value that is not finite, expected numbers")
