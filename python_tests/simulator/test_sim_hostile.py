"""Data-set files that somebody else wrote: refused in words, in little memory, and nothing outside them is touched."""

import gzip
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
from hostile import (
    at_most,
    cifar_files,
    idx_files,
    npy,
    npz_files,
    npz_of,
    picture,
    picture_that_claims,
    pixels,
    write,
)

from secureafl_ext.tasks import datasets, readers, safe_pickle

MEGABYTE = 2**20


def refused(folder, name: str) -> str:
    """What is said; it names a file of the folder, or the data set."""
    with at_most(20), pytest.raises(ValueError) as error:
        datasets.load(name, folder)
    said = str(error.value)
    assert str(folder) in said or f"dataset {name!r}" in said
    assert len(said) < 1000
    return said


# Pickles

TEXT = b"X" + struct.pack("<I", MEGABYTE) + b"a" * MEGABYTE + b"q\x00"
ENCODE = b"c_codecs\nencode\nq\x01X\x06\x00\x00\x00latin1q\x02"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\ntR"
DTYPE = b"cnumpy\ndtype\n(X\x02\x00\x00\x00u1tR"


# A pair of the same, of that a pair, and so on: 2 ** 100 ends.
TUPLES = b"K\x01" + b"q\x00h\x00\x86" * 100
LISTS = b"](](K\x01eq\x00" + b"](h\x00h\x00eq\x00" * 100 + b"e"


BOMBS = {
    "a memo of 4 GiB": b"\x80\x02}r\xff\xff\xff\x1f.",
    "a string of 2 GiB": b"\x80\x02}X\xff\xff\xff\x7f.",
    "bytes of 8 EiB": b"\x80\x04}\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a bytearray of 8 EiB": b"\x80\x05}\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a frame of 8 EiB": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
    "a key of shared tuples": b"\x80\x02}" + TUPLES + b"K\x01s.",
    "lists as deep as the file": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "a list inside itself": b"\x80\x02}X\x01\x00\x00\x00a]q\x00h\x00as.",
    "one text, encoded 500 times": b"\x80\x02}(" + TEXT + ENCODE + b"h\x01h\x00h\x02\x86R" * 500 + b"u.",
    "a shape of long numbers": b"\x80\x02" + ARRAY + b"(K\x01(" + (b"\x8a\xff" + b"\x7f" * 255) * 500 + b"t" + DTYPE
    + b"\x89X\x00\x00\x00\x00tb.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_pickle_takes_little(tmp_path, name):
    """An empty batch, or words; never more memory than a few times the file's."""
    (tmp_path / "batch").write_bytes(BOMBS[name])
    with at_most(20):
        try:
            assert isinstance(readers.batch(tmp_path / "batch"), dict)
        except ValueError as error:
            assert str(error).startswith(f"{tmp_path / 'batch'}: refused")


def test_opcodes_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_pickle, "MOST_OPCODES", 1000)
    (tmp_path / "batch").write_bytes(b"\x80\x02}" + b"q\x00" * 998 + b".")
    assert readers.batch(tmp_path / "batch") == {}
    (tmp_path / "batch").write_bytes(b"\x80\x02}" + b"q\x00" * 999 + b".")
    with pytest.raises(ValueError, match=r"batch: refused, .* more than 1000 opcodes"):
        readers.batch(tmp_path / "batch")


@pytest.mark.parametrize("labels", [TUPLES, LISTS, b"](K\x01Ne", b"](X\x01\x00\x00\x00ae"])
def test_labels_that_are_no_list_of_numbers_are_refused(tmp_path, labels):
    """numpy would follow shared lists for ever."""
    files = cifar_files()
    start = pickle.dumps({"data": pixels(2, 3072)}, 2)[:-1]  # without its end
    files["train"] = start + b"X\x0b\x00\x00\x00fine_labels" + labels + b"s."
    write(tmp_path, files)
    assert f"{tmp_path / 'train'}: fine_labels must be a list of whole numbers" in refused(tmp_path, "cifar100")


def test_a_label_too_large_for_any_array_is_refused(tmp_path):
    content = pickle.dumps({"data": pixels(2, 3072), "fine_labels": [1, 10**40]})
    write(tmp_path, cifar_files() | {"train": content})
    assert "fine_labels must be a list of whole numbers" in refused(tmp_path, "cifar100")


GADGETS = {
    "defaults of a helper": b"cnumpy.core.numeric\n_frombuffer\nN}X\x0c\x00\x00\x00__defaults__K\x05\x85s\x86b",
    "an attribute of a helper": b"cnumpy.core.numeric\n_frombuffer\n}X\x01\x00\x00\x00aK\x01sb",
    "an attribute of a stand-in": b"cnumpy\ndtype\n}X\x01\x00\x00\x00aK\x01sb",
    "a new object": b"cnumpy\ndtype\n)\x81",
    "an instance": b"(inumpy\ndtype\n",
    "an extension": b"\x82\x01",
    "a persistent name": b"Pname\n",
    "a call of what is not a name": b"K\x01)R",
    "a call with what is no tuple": b"cnumpy\ndtype\n]R",
    "a stand-in appended to": ARRAY + b"K\x01a",
    "a stand-in as a dict": ARRAY + b"K\x01K\x01s",
    "an opcode of later times": b"\x99",
    "a value from an empty stack": b"a",
    "a value from below a mark": b"](a",
    "a list that never began": b"l",
    "what was never kept": b"h\x07",
}


@pytest.mark.parametrize("name", GADGETS)
def test_nothing_real_is_called_or_changed(tmp_path, name):
    before = {key: dict(vars(value)) for key, value in vars(safe_pickle).items() if callable(value)}
    defaults = [getattr(value, "__defaults__", None) for value in vars(safe_pickle).values()]
    (tmp_path / "batch").write_bytes(b"\x80\x02" + GADGETS[name] + b".")
    with pytest.raises(ValueError, match="batch: refused"):
        readers.batch(tmp_path / "batch")
    assert {key: dict(vars(value)) for key, value in vars(safe_pickle).items() if callable(value)} == before
    assert [getattr(value, "__defaults__", None) for value in vars(safe_pickle).values()] == defaults


# gzip and idx


def test_a_bomb_is_unpacked_no_further_than_the_data_set_goes(tmp_path):
    files = idx_files()
    files["train-labels-idx1-ubyte.gz"] = gzip.compress(b"\0\0\x08\x01" + b"\xff" * 4 + bytes(24 * MEGABYTE))
    write(tmp_path, files)
    said = refused(tmp_path, "fashion-mnist")
    assert "train-labels-idx1-ubyte.gz: expected at most 60008 bytes unpacked, got more" in said


@pytest.mark.parametrize("cut", [1, 9, 30, -1, -9])
def test_a_torn_gzip_file_is_refused(tmp_path, cut):
    files = idx_files()
    name = "t10k-images-idx3-ubyte.gz"
    files[name] = files[name][:cut]
    write(tmp_path, files)
    assert f"{name}: not a whole gzip file" in refused(tmp_path, "fashion-mnist")


def test_sizes_that_overflow_are_no_match(tmp_path):
    """2 ** 31 squared, times 4, is 0 in 64 bits."""
    head = b"\0\0\x08\x03" + struct.pack(">III", 2**31, 2**31, 4)
    write(tmp_path, idx_files() | {"train-images-idx3-ubyte.gz": gzip.compress(head)})
    assert "header says (2147483648, 2147483648, 4), 0 bytes follow" in refused(tmp_path, "fashion-mnist")


def test_images_of_another_size_are_refused(tmp_path):
    write(tmp_path, npz_files(x_train=pixels(2, 27, 28)))
    assert "shape (2, 1, 27, 28), expected uint8 and (N, (1, 28, 28))" in refused(tmp_path, "fashion-mnist")


@pytest.mark.parametrize("kind", ["pipe", "folder", "sparse"])
def test_what_is_no_plain_file_of_that_size_is_refused(tmp_path, kind):
    """A pipe would never end, and a sparse file of a terabyte needs no disk."""
    write(tmp_path, idx_files())
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(2**40)
    expected = "got 1099511627776" if kind == "sparse" else "expected a file, got a folder, a pipe or a device"
    assert expected in refused(tmp_path, "fashion-mnist")


# npz


def claimed(shape: str, dtype: str = "|u1") -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"


def replaced(**entries: bytes) -> bytes:
    y = npy(claimed("(2,)"), b"\0\1")
    x = npy(claimed("(2, 28, 28)"), bytes(2 * 784))
    return npz_of({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | entries)


LIMIT = "array y_train must have at most 480000 bytes"
NPZ = {  # A function: every test process reads this table, and packing takes seconds.
    "bomb": (lambda: replaced(y_train=npy(claimed("(268435456,)"), bytes(256 * MEGABYTE))), LIMIT),
    "large claim": (replaced(y_train=npy(claimed("(1099511627776,)"))), LIMIT),
    "overflowing claim": (replaced(y_train=npy(claimed("(4294967296, 4294967296)"))), LIMIT),
    "negative claim": (replaced(y_train=npy(claimed("(-1, -2)"), b"\0\1")), LIMIT),
    "less than claimed": (replaced(y_train=npy(claimed("(3,)"), b"\0\1")), "needs 3 bytes, got 2"),
    "objects": (replaced(y_train=npy(claimed("(2,)", "|O"), pickle.dumps([1, 2]))), "must be of numbers or text"),
    "long header": (replaced(y_train=npy(claimed("(2,)") + " " * 20_000, b"\0\1")), "not a readable npz file"),
    "header of 4 GiB": (replaced(y_train=npy(claimed("(2,)"), b"\0\1", 2)), "numpy does not write"),
    "deep header": (replaced(y_train=npy("(" * 5_000, b"\0\1")), "not a readable npz file"),
    "deep numbers": (replaced(y_train=npy("-" * 9_000 + "1", b"\0\1")), "not a readable npz file"),
    "no header": (replaced(y_train=b""), "not a readable npz file"),
    "no zip": (b"PK\3\4" + bytes(100), "not a readable npz file"),
    "nothing": (b"", "not a readable npz file"),
    "other keys": (npz_of({"x": npy(claimed("(2,)"), b"\0\1")}), "expected the arrays x_train, y_train, x_test"),
    "numbers for images": (replaced(x_train=npy(claimed("()"), b"\0")), "x_train must have shape (N, H, W), got ()"),
    "a number for labels": (replaced(y_train=npy(claimed("()"), b"\0")), "expected one number per image"),
    "text for labels": (replaced(y_train=npy(claimed("(2,)", "|S1"), b"ab")), "expected one number per image"),
    "labels of floats": (replaced(y_train=npy(claimed("(2,)", "<f2"), bytes(4))), "expected one number per image"),
    "images of floats": (replaced(x_train=npy(claimed("(2, 28, 28)", "<f2"), bytes(4 * 784))), "images of float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", NPZ)
def test_a_hostile_npz_file_is_refused(tmp_path, name):
    content, expected = NPZ[name]
    write(tmp_path, {"fashion_mnist.npz": content() if callable(content) else content})
    assert expected in refused(tmp_path, "fashion-mnist")


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_packing_that_python_unpacks_without_a_limit_is_refused(tmp_path, kind):
    entries = {name: npy(claimed("(2,)"), bytes(MEGABYTE)) for name in ("x_train", "y_train", "x_test", "y_test")}
    write(tmp_path, {"fashion_mnist.npz": npz_of(entries, kind)})
    assert "packed in a way that numpy does not write" in refused(tmp_path, "fashion-mnist")


def test_big_endian_labels_are_numbers_too(tmp_path):
    write(tmp_path, {"fashion_mnist.npz": replaced(y_train=npy(claimed("(2,)", ">i4"), struct.pack(">ii", 3, 9)))})
    assert datasets.load("fashion-mnist", tmp_path).train_y.tolist() == [3, 9]


# Pictures


def driving(folder, content: bytes, log: bytes = b"a.png,l,r,0\n" * 5) -> None:
    write(folder, {"driving_log.csv": log, "IMG/a.png": content})


PICTURES = {
    "claims of a gigapixel": (picture_that_claims(2**15, 2**15), "pixels"),
    "claims of a terapixel": (picture_that_claims(2**20, 2**20), "pixels"),
    "torn": (picture(160, 320, 3)[:-200], "not a readable image file"),
    "empty": (b"", "not a readable image file"),
    "another kind": (picture(160, 320, 3, kind="BMP"), "not a readable image file"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "not a readable image file"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_hostile_picture_is_refused(tmp_path, name):
    content, expected = PICTURES[name]
    driving(tmp_path, content)
    said = refused(tmp_path, "udacity")
    assert f"{tmp_path / 'IMG' / 'a.png'}: " in said and expected in said


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (b"a.png,l,r,nan\n" * 5, "a value that is not finite"),
        (b"a.png,l,r,0\n", "expected 2 to 200000 frames, got 1"),
        (b"a.png,l,r,0\n" * 200_001, "expected 2 to 200000 frames, got 200001"),
        (b"\xff\xfe", "expected text in UTF-8"),
        (b"a\0.png,l,r,0\n" * 5, "a\\x00.png' is no name of a file"),
        (b"a" * 200_000 + b",l,r,0\n", "not a readable csv file"),
    ],
)
def test_a_hostile_log_is_refused(tmp_path, log, expected, monkeypatch):
    driving(tmp_path, picture(160, 320, 3), log)
    with pytest.raises(ValueError) as error:  # a row of a long log needs more memory than the other tests allow
        datasets.load("udacity", tmp_path)
    assert expected in str(error.value)


@pytest.mark.parametrize("offsets", [[0, 90, 0, 90], [0, 10, 10**9], [-5, 10, 20], [0], [], [[0, 10]], [0.0, 10.0]])
def test_offsets_that_do_not_ascend_are_refused(tmp_path, offsets):
    """Overlapping pieces would make a small file a large one."""
    arrays = {"jpeg": np.zeros(90, np.uint8), "offsets": np.array(offsets), "steering": np.zeros(3)}
    np.savez(tmp_path / "udacity.npz", **arrays)
    assert "offsets must ascend within jpeg" in refused(tmp_path, "udacity")


def test_a_picture_inside_an_array_is_named(tmp_path):
    whole = picture(8, 8, 3)
    blob = np.frombuffer(whole + picture_that_claims(2**15, 2**15), np.uint8)
    offsets = np.array([0, len(whole), len(blob)])
    np.savez(tmp_path / "udacity.npz", jpeg=blob, offsets=offsets, steering=np.zeros(2))
    assert "udacity.npz, picture 1: not a readable image file" in refused(tmp_path, "udacity")


# Names that become paths


def tiny(folder, **changed: bytes) -> None:
    image = picture(64, 64, 3)
    files = {"wnids.txt": b"n1\nn2\n", "train/n1/images/a.png": image, "val/images/b.png": image}
    files["val/val_annotations.txt"] = b"b.png\tn1\t0\t0\n"
    write(folder / "tiny-imagenet-200", files | {name.replace("_", "."): text for name, text in changed.items()})


def test_names_of_classes_lead_nowhere_else(tmp_path):
    write(tmp_path / "secret", {"private.png": picture(64, 64, 3)})
    for names in (b"../../secret\n", b"n1\n..\n", b"n1\n/etc\n", b"n1\nn1\n", b"", b"n " * 201, b"n/1\n", b"\xff\n"):
        tiny(tmp_path, wnids_txt=names)
        assert "wnids.txt: expected" in refused(tmp_path, "tiny-imagenet")


def test_names_of_annotated_images_lead_nowhere_else(tmp_path):
    write(tmp_path / "secret", {"private.png": picture(64, 64, 3)})
    for line in (b"../../../secret/private.png\tn1\n", b"..\tn1\n", b"/etc/x.png\tn1\n", b"b.png\tn9\n", b"b.png\n"):
        tiny(tmp_path)
        write(tmp_path / "tiny-imagenet-200", {"val/val_annotations.txt": b"b.png\tn1\n" + line})
        assert "val_annotations.txt, line 2: expected" in refused(tmp_path, "tiny-imagenet")
    tiny(tmp_path)
    assert len(datasets.load("tiny-imagenet", tmp_path).test_y) == 1


def test_names_of_frames_lead_nowhere_else(tmp_path):
    write(tmp_path / "secret", {"private.png": picture(160, 320, 3)})
    for name in (b"..", b".", b"IMG\\..", b"/"):
        driving(tmp_path / "log", picture(160, 320, 3), name + b",l,r,0\n" + b"a.png,l,r,0\n" * 4)
        assert "expected a file, got a folder" in refused(tmp_path / "log", "udacity")
    driving(tmp_path / "log", picture(160, 320, 3), b"../../secret/private.png,l,r,0\n" * 5)
    with pytest.raises(FileNotFoundError, match=r"IMG/private\.png"):
        datasets.load("udacity", tmp_path / "log")
