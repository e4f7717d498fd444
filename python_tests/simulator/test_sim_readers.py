"""Every format is written by hand, from its description, and read back."""

import csv
import gzip
import io
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from data_files import pixels, same, write
from PIL import Image

from secureafl_ext.tasks import datasets, readers

pytestmark = pytest.mark.usefixtures("nowhere")


# idx


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_idx(tmp_path, packed, folder):
    files = {
        "train-images-idx3-ubyte": pixels(7, 28, 28),
        "train-labels-idx1-ubyte": np.arange(7, dtype=np.uint8),
        "t10k-images-idx3-ubyte": pixels(3, 28, 28),
        "t10k-labels-idx1-ubyte": np.array([9, 0, 4], np.uint8),
    }
    for name, values in files.items():
        content = gzip.compress(idx(values)) if packed else idx(values)
        write(tmp_path / "mine" / folder / (name + ".gz" * packed), content)
    images, labels, test_images, test_labels = files.values()
    got = datasets.load("fashion-mnist", tmp_path / "mine")
    assert same(got.train_x, images[:, None]) and same(got.train_y, labels)
    assert same(got.test_x, test_images[:, None]) and same(got.test_y, test_labels)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx(pixels(2, 3, 3))[:-1], "header says (2, 3, 3), 17 bytes follow"),
        (idx(pixels(2, 3)), "not an idx file of bytes in 3 dimensions"),
        (b"\0\0\x0d\x03" + bytes(99), "not an idx file of bytes"),
        (b"", "not an idx file"),
    ],
)
def test_broken_idx_is_refused(tmp_path, content, words):
    write(tmp_path / "x", content)
    with pytest.raises(ValueError) as error:
        readers.idx(tmp_path / "x", 3)
    assert words in str(error.value)


# CIFAR


def python2(rows: np.ndarray, labels: list[int], key: bytes) -> bytes:
    """A batch as Python 2 wrote the official ones, opcode by opcode."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + number(1) + number(rows.shape[0]) + number(rows.shape[1]) + b"\x86" + dtype + b"\x89"
    array += text(rows.tobytes()) + b"tb"
    items = text(b"data") + array + text(key) + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"batch_label") + text(b"batch 1 of 1") + items + b"u."


WRITERS = {
    "python 2": python2,
    **{
        f"protocol {p}": lambda rows, labels, key, p=p: pickle.dumps({"data": rows, key.decode(): labels}, p)
        for p in range(2, 6)
    },
    "labels as an array": lambda rows, labels, key: pickle.dumps({b"data": rows, key: np.array(labels)}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_cifar_python(tmp_path, writer):
    dump = WRITERS[writer]
    rows, labels = pixels(12, 3072), [*range(10), 3, 1]
    for i in range(5):
        write(
            tmp_path / f"cifar-10-batches-py/data_batch_{i + 1}",
            dump(rows[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2], b"labels"),
        )
    write(tmp_path / "cifar-10-batches-py/test_batch", dump(rows[10:], labels[10:], b"labels"))
    got = datasets.load("cifar10", tmp_path)
    assert same(got.train_x, rows[:10].reshape(10, 3, 32, 32)) and same(got.train_y, labels[:10])
    assert same(got.test_x, rows[10:].reshape(2, 3, 32, 32)) and same(got.test_y, labels[10:])
    assert got.classes == 10

    for name, part in (("train", slice(0, 10)), ("test", slice(10, 12)), ("meta", slice(0, 0))):
        write(tmp_path / "cifar-100-python" / name, dump(rows[part], [90 + y for y in labels[part]], b"fine_labels"))
    got = datasets.load("cifar100", tmp_path)
    assert same(got.train_y, [90 + y for y in labels[:10]]) and got.classes == 100


def test_cifar_binary(tmp_path):
    images, labels = pixels(6, 3072), np.array([[9], [1], [2], [3], [4], [5]], np.uint8)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        write(tmp_path / f"cifar-10-batches-bin/{name}.bin", labels[i].tobytes() + images[i].tobytes())
    got = datasets.load("cifar10", tmp_path)
    assert same(got.train_x, images[:5].reshape(5, 3, 32, 32)) and got.train_y.tolist() == [9, 1, 2, 3, 4]
    assert same(got.test_x, images[5:].reshape(1, 3, 32, 32)) and got.test_y.tolist() == [5]

    records = np.concatenate([labels, labels + 80, images], axis=1)  # coarse label, fine label, image
    for name, part in (("train", records[:4]), ("test", records[4:])):
        write(tmp_path / f"cifar-100-binary/{name}.bin", part.tobytes())
    got = datasets.load("cifar100", tmp_path)
    assert same(got.train_x, images[:4].reshape(4, 3, 32, 32)) and got.test_y.tolist() == [84, 85]

    write(tmp_path / "cifar-100-binary/test.bin", records.tobytes()[:-1])
    with pytest.raises(ValueError, match="are not records of 2 \\+ 3072"):
        datasets.load("cifar100", tmp_path)


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        ({"data": Calls(open, "harm", "w")}, "it names _io.open|it names io.open"),
        ({"data": Calls(eval, "open('harm', 'w')")}, "it names builtins.eval"),
        ({"data": Calls(getattr, "", "join")}, "it names builtins.getattr"),
        ({"data": np.array([Calls(open, "harm", "w")])}, "it names _io.open|it names io.open"),
        ({"data": np.array(["text"], object)}, "not of whole numbers"),
        ({"data": np.arange(3).astype(">i8")}, "big-endian"),
        ([1, 2], "a dict of arrays"),
    ],
)
def test_a_pickle_that_names_anything_else_is_refused(tmp_path, hostile, words):
    write(tmp_path / "data_batch_1", pickle.dumps(hostile))
    with pytest.raises(ValueError, match="data_batch_1: refused") as error:
        readers.batch(tmp_path / "data_batch_1")
    assert any(word in str(error.value) for word in words.split("|"))
    assert not (tmp_path / "harm").exists()


def test_a_broken_pickle_is_refused(tmp_path):
    whole = python2(pixels(1, 3072), [1], b"labels")
    for content in (b"", b"\x80", whole[:-700], whole[:20] + b"\xff" + whole[20:]):
        write(tmp_path / "b", content)
        with pytest.raises(ValueError, match="refused"):
            readers.batch(tmp_path / "b")


def test_a_batch_of_other_content_is_refused(tmp_path):
    for name in ("train", "test", "meta"):
        write(tmp_path / name, pickle.dumps({"data": pixels(2, 3072), "labels": [1, 2]}))
    with pytest.raises(ValueError, match="expected the keys data and fine_labels, got data, labels"):
        datasets.load("cifar100", tmp_path)
    write(tmp_path / "train", pickle.dumps({"data": pixels(2, 3071), "fine_labels": [1, 2]}))
    with pytest.raises(ValueError, match="rows of 3072 bytes"):
        datasets.load("cifar100", tmp_path)


# Images


def save(path, image: np.ndarray) -> None:
    """(H, W, 3) or grey (H, W), without loss whatever the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, format="PNG")


@pytest.mark.parametrize("layout", ["published", "sorted"])
def test_tiny_imagenet(tmp_path, layout):
    root, images = tmp_path / "tiny-imagenet-200", pixels(6, 64, 64, 3)
    write(root / "wnids.txt", b"n9\nn1\n")  # the order of this file makes the labels
    for i, wnid in enumerate(("n9", "n9", "n1")):
        save(root / f"train/{wnid}/images/{wnid}_{i}.JPEG", images[i])
    write(root / "train/n9/n9_boxes.txt", b"n9_0.JPEG\t0\t0\t63\t63\n")
    save(root / "train/n1/images/n1_3.JPEG", images[3, :, :, 0])
    if layout == "published":
        save(root / "val/images/val_0.JPEG", images[4])
        save(root / "val/images/val_1.JPEG", images[5])
        write(root / "val/val_annotations.txt", b"val_0.JPEG\tn1\t0\t0\t1\t1\nval_1.JPEG\tn9\t0\t0\t1\t1\n")
    else:
        save(root / "val/n1/val_0.JPEG", images[4])
        save(root / "val/n9/images/val_1.JPEG", images[5])
    got = datasets.load("tiny-imagenet", tmp_path)
    expected = images.transpose(0, 3, 1, 2).copy()
    expected[3] = expected[3, :1]  # grey: the same in every channel
    assert same(got.train_x, expected[:4]) and got.train_y.tolist() == [0, 0, 1, 1] and got.classes == 2
    order = [4, 5] if layout == "published" else [5, 4]
    assert same(got.test_x, expected[order]) and got.test_y.tolist() == ([1, 0] if layout == "published" else [0, 1])


def test_driving_log(tmp_path):
    """Frame i is grey of value 10 i; sky and bonnet are white and must be gone."""
    for i in range(10):
        frame = np.full((160, 320, 3), 255, np.uint8)
        frame[60:135] = 10 * i
        save(tmp_path / f"log/IMG/center_{i}.jpg", frame)
    names = ["center", "left", "right", "steering", "throttle", "brake", "speed"]
    rows = [[f" C:\\Users\\me\\IMG\\center_{i}.jpg", "l", "r", f" {i / 10 - 0.5}", "0", "0", "30"] for i in range(10)]
    rows[3][0] = "/home/me/IMG/center_3.jpg"
    for header in ([names], []):
        with open(tmp_path / "log/driving_log.csv", "w", newline="") as file:
            csv.writer(file).writerows(header + rows)
        got = datasets.load("udacity", tmp_path / "log")
        assert got.classes == 0 and got.shape == (3, 32, 32) and got.train_y.dtype == torch.float32
        assert [int(x.unique()) for x in got.train_x] == [0, 10, 20, 30, 40, 50, 60, 70]
        assert [int(x.unique()) for x in got.test_x] == [80, 90], "the last fifth is the test"
        torch.testing.assert_close(torch.cat([got.train_y, got.test_y]), torch.arange(10) / 10 - 0.5)


def test_a_log_without_steering_is_refused(tmp_path):
    (tmp_path / "IMG").mkdir()
    write(tmp_path / "driving_log.csv", b"a,b,c\na,b,c\n")
    with pytest.raises(ValueError, match="expected rows of centre, left, right, steering"):
        datasets.load("udacity", tmp_path)


def test_images_without_pillow_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'secureafl_ext\[sim\]'"):
        readers.decoder()


# Compact npz files


def joined(images: list[np.ndarray], kind: str) -> tuple[np.ndarray, np.ndarray]:
    parts = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(
            buffer, format=kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {})
        )
        parts.append(buffer.getvalue())
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum([0, *map(len, parts)])


def test_npz(tmp_path):
    for name in ("fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "udacity"):
        (tmp_path / name).mkdir()
    grey, y = pixels(5, 28, 28), np.arange(5, dtype=np.uint8)
    np.savez(tmp_path / "fashion-mnist/fashion_mnist.npz", x_train=grey, y_train=y, x_test=grey[:2], y_test=y[:2])
    got = datasets.load("fashion-mnist", tmp_path)
    assert same(got.train_x, grey[:, None]) and same(got.test_y, y[:2])

    images = pixels(7, 32, 32, 3)
    sheets = [images[:2].reshape(64, 32, 3), images[2:3].reshape(32, 32, 3), images[3:5].reshape(64, 32, 3)]
    (a, a_at), (b, b_at) = joined(sheets[:2], "WEBP"), joined(sheets[2:], "WEBP")
    test, test_at = joined([images[5:].reshape(64, 32, 3)], "WEBP")
    for name, labels in (("cifar10", y), ("cifar100", y + 95)):
        np.savez(tmp_path / name / f"{name}_a.npz", train_webp=a, train_offsets=a_at, train_labels=labels[:3])
        rest = {"test_webp": test, "test_offsets": test_at, "test_labels": labels[:2]}
        np.savez(tmp_path / name / f"{name}_b.npz", train_webp=b, train_offsets=b_at, train_labels=labels[3:], **rest)
        got = datasets.load(name, tmp_path)
        assert same(got.train_x, images[:5].transpose(0, 3, 1, 2))
        assert same(got.test_x, images[5:].transpose(0, 3, 1, 2))
        assert same(got.train_y, labels) and got.classes == int(name.removeprefix("cifar"))

    frames = pixels(5, 32, 32, 3)
    blob, at = joined([frame.repeat(2, 0).repeat(3, 1) for frame in frames], "PNG")
    np.savez(tmp_path / "udacity/udacity_track.npz", jpeg=blob, offsets=at, steering=np.linspace(-1, 1, 5))
    got = datasets.load("udacity", tmp_path)
    assert got.shape == (3, 32, 32) and got.test_y.tolist() == [1.0] and got.classes == 0
    apart = got.train_x.float() - torch.from_numpy(frames[:4]).permute(0, 3, 1, 2)
    assert apart.abs().mean() < 20  # smoothed a little

    small = pixels(3, 64, 64, 3)
    (train, train_at), (val, val_at) = joined(list(small[:2]), "PNG"), joined(list(small[2:]), "PNG")
    np.savez(
        tmp_path / "tiny-imagenet/tiny_imagenet_2.npz",
        **{"train_jpeg": train, "train_offsets": train_at, "train_labels": y[:2], "wnids": np.array(["n1", "n2"])},
        **{"val_jpeg": val, "val_offsets": val_at, "val_labels": y[:1]},
    )
    got = datasets.load("tiny-imagenet", tmp_path)
    assert same(got.train_x, small[:2].transpose(0, 3, 1, 2)) and got.classes == 2
