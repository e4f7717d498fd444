"""Every data set by name: where its files are, how they are read, and the data sets of plug-ins."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..plugins import Registry, check_about, check_factory
from . import npz, readers
from .readers import Arrays

DEFAULT = "fashion-mnist-small"


class Format(NamedTuple):
    label: str
    folders: tuple[str, ...]  # subfolders to look in, besides one with the data set's name
    files: tuple[str, ...]  # all of these must be there, with or without .gz
    read: Callable[[Path], Arrays]


class Source(NamedTuple):
    about: str
    mean: tuple[float, ...] | None  # of pixels between 0 and 1, per channel, over the training set; None: measured
    std: tuple[float, ...] | None
    size: readers.Size | None  # the largest size that is accepted; None: any
    formats: tuple[Format, ...]
    hint: str = ""  # how to get the files
    regression: bool = False  # float values instead of labels
    load: Callable[[Path | None], Arrays] | None = None  # of a plug-in: it reads the data itself


CIFAR10_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10_BINARY = tuple(f"{name}.bin" for name in CIFAR10_TRAIN)


def cifar_npz(first: str, second: str, classes: int) -> Format:
    return Format("npz", (), (first, second), partial(npz.cifar_npz, first=first, second=second, classes=classes))


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

BUILT_IN = {
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
            cifar_npz("cifar10_a.npz", "cifar10_b.npz", 10),
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
            cifar_npz("cifar100_a.npz", "cifar100_b.npz", 100),
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
        (0.58, 0.56, 0.47),  # of one recording; the means of others differ by little compared with the deviation
        (0.18, 0.17, 0.16),
        readers.ROAD,
        (
            Format("driving log", ("data", "track"), ("driving_log.csv", "IMG"), readers.driving_log),
            Format("npz", (), ("udacity*.npz",), npz.udacity_npz),
        ),
        "record with Udacity's simulator, or unpack its sample data: driving_log.csv beside IMG",
        regression=True,
    ),
    # 400 + 100 images of each class of Fashion-MNIST, inside the package.
    DEFAULT: FASHION._replace(about="28 x 28 grey, 10 kinds of clothing, 4,000 + 1,000; comes with the package"),
}


SOURCES = Registry("dataset", BUILT_IN)


def register_dataset(
    name: str,
    load: Callable[[Path | None], Arrays],
    *,
    about: str,
    regression: bool = False,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> None:
    """Add a data set under a new name. `secureafl run --dataset NAME` then trains on it.

    name: 1 to 40 of a-z, 0-9, + and -    about: one line for `secureafl list`
    load: called as load(data_dir) with the folder of --data-dir or None. It returns Arrays: uint8 images (N, C, H, W)
    and labels 0 to classes - 1, or float values for a regression
    regression: whether `load` returns classes=0
    mean, std: of pixels between 0 and 1, one number per channel, to normalize inputs. Default: of the training images
    """
    check_factory("register_dataset", load, ("data_dir",))
    check_about("register_dataset", about)
    if (mean is None) != (std is None):
        raise ValueError(f"register_dataset: mean and std must be given both or not at all, got {mean} and {std}")
    SOURCES.add(name, Source(about, mean, std, None, (), regression=regression, load=load))
