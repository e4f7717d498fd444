"""Whole small files of every format, damaged at random: a valid result or a ValueError that names the file.

SECUREAFL_FUZZ=20000 tries so many of each, other ones every time; CI tries few, always the same.
"""

import gzip
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hostile import at_most, cifar_files, idx_files, npz_files, npz_of, picture, pixels, write
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from secureafl_ext.sim import options, results
from secureafl_ext.sim.loop import Outcome, Point
from secureafl_ext.sim.settings import Settings
from secureafl_ext.tasks import datasets, safe_pickle

TRIES = int(os.environ.get("SECUREAFL_FUZZ", 0))
fuzz = hypothesis_settings(
    max_examples=TRIES or 100,
    derandomize=not TRIES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

# One damage: at a place (a share of the file's length) so many bytes are taken out, and others put in.
PLACE, INSERTED = st.floats(0, 1, exclude_max=True), st.binary(max_size=6)
DAMAGE = st.lists(st.tuples(PLACE, st.integers(0, 40), INSERTED), min_size=1, max_size=4)
CUT = PLACE.map(lambda at: [(at, 10**9, b"")])
FLIP = PLACE.flatmap(lambda at: st.binary(min_size=1, max_size=1).map(lambda byte: [(at, 1, byte)]))
DAMAGES = DAMAGE | CUT | FLIP


@pytest.fixture(autouse=True, scope="module")
def nowhere_else():
    """What this machine has must not decide a test, nor be searched each time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets, "USUAL", ())
        patched.delenv(datasets.VARIABLE, raising=False)
        yield


def damaged(content: bytes, damages: list[tuple[float, int, bytes]]) -> bytes:
    for at, removed, inserted in damages:
        start = int(at * len(content))
        content = content[:start] + inserted + content[start + removed :]
    return content


def load(name: str, files: dict[str, bytes]) -> datasets.Dataset | None:
    """As a user's folder; within 20 MB, and of what is refused the file or the data set is named."""
    with tempfile.TemporaryDirectory() as folder, at_most(20):
        write(Path(folder), files)
        try:
            return datasets.load(name, folder)
        except ValueError as error:
            said = str(error)
            assert (folder in said or f"dataset {name!r}" in said) and len(said) < 1000
        except FileNotFoundError as error:  # a name inside a file that leads to none
            assert folder in str(error.filename or error)
    return None


def check(loaded: datasets.Dataset | None, shape: tuple[int, ...]) -> None:
    if loaded is not None:
        assert loaded.shape == shape and len(loaded.train_x) == len(loaded.train_y) > 0
        assert loaded.classes == 0 or 0 <= int(loaded.train_y.min()) <= int(loaded.train_y.max()) < loaded.classes


IDX, CIFAR, NPZ = idx_files(), cifar_files(), npz_files()
UNPACKED = gzip.decompress(IDX["train-images-idx3-ubyte.gz"])
X, Y = pixels(2, 28, 28), np.arange(2, dtype=np.uint8)


@fuzz
@given(st.sampled_from(sorted(IDX)), DAMAGES)
def test_idx_packed(name, damages):
    check(load("fashion-mnist", IDX | {name: damaged(IDX[name], damages)}), (1, 28, 28))


@fuzz
@given(DAMAGES)
def test_idx_inside_gzip(damages):
    """With a checksum that fits, as somebody who means it would write it."""
    packed = gzip.compress(damaged(UNPACKED, damages), 1)
    check(load("fashion-mnist", IDX | {"train-images-idx3-ubyte.gz": packed}), (1, 28, 28))


@fuzz
@given(st.sampled_from(range(6)), DAMAGES)
def test_cifar_pickle(protocol, damages):
    whole = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 2], "names": ["a", b"b"]}, protocol)
    # Most of a batch is pixels; damages should meet the opcodes around them.
    start, _, end = whole.partition(bytes(6000)) if protocol > 2 else (whole, b"", b"")
    pixels = bytes(6000) if protocol > 2 else b""
    content = damaged(start + end, damages)
    content = content[: len(start)] + pixels + content[len(start) :]
    check(load("cifar100", CIFAR | {"train": content}), (3, 32, 32))


OPCODES = st.sampled_from(sorted(safe_pickle.OPCODES))
CODES = {opcode.name: opcode.code.encode("latin1") for opcode in safe_pickle.pickletools.opcodes}
ARGUMENTS = st.sampled_from([b"", b"\0", b"\1", b"\xff\xff\xff\x7f", b"\4\0\0\0data", b"numpy\nndarray\n", b"1\n"])


@fuzz
@given(st.lists(st.tuples(st.sampled_from(sorted(CODES)) | OPCODES, ARGUMENTS), max_size=40))
def test_pickles_that_nobody_wrote(program):
    content = b"\x80\2" + b"".join(CODES[name] + argument for name, argument in program) + b"."
    check(load("cifar100", CIFAR | {"train": content}), (3, 32, 32))


@fuzz
@given(DAMAGES)
def test_npz_packed(damages):
    check(load("fashion-mnist", {"fashion_mnist.npz": damaged(NPZ["fashion_mnist.npz"], damages)}), (1, 28, 28))


@fuzz
@given(st.sampled_from(["x_train", "y_train"]), DAMAGES)
def test_npz_entries(name, damages):
    def entry(array: np.ndarray) -> bytes:
        with tempfile.TemporaryFile() as file:
            np.save(file, array)
            file.seek(0)
            return file.read()

    entries = {"x_train": entry(X), "y_train": entry(Y), "x_test": entry(X), "y_test": entry(Y)}
    # The first 128 bytes describe the array.
    content = damaged(entries[name][:128], damages) + entries[name][128:]
    check(load("fashion-mnist", {"fashion_mnist.npz": npz_of(entries | {name: content})}), (1, 28, 28))


FRAME, LOG = picture(160, 320, 3, kind="JPEG"), b"".join(b"C:\\IMG\\a.jpg,l,r,0.%d,0,0,30\n" % i for i in range(3))


@fuzz
@given(st.booleans(), DAMAGES)
def test_driving_log(of_log, damages):
    log, frame = (damaged(LOG, damages), FRAME) if of_log else (LOG, damaged(FRAME[:2000], damages) + FRAME[2000:])
    check(load("udacity", {"driving_log.csv": log, "IMG/a.jpg": frame}), (3, 32, 32))


TINY = {"wnids.txt": b"n1\nn2\n", "val/val_annotations.txt": b"b.png\tn1\t0\t0\t1\t1\n"}
TINY_IMAGES = dict.fromkeys(("train/n1/images/a.png", "val/images/b.png"), picture(64, 64, 3))


@fuzz
@given(st.sampled_from(sorted(TINY)), DAMAGES)
def test_names_of_classes_and_images(name, damages):
    files = TINY_IMAGES | TINY | {name: damaged(TINY[name], damages)}
    check(load("tiny-imagenet", {f"tiny-imagenet-200/{path}": content for path, content in files.items()}), (3, 64, 64))


TOML = b"""
rounds = 5
lr = 0.5
attack = "gaussian"
estimation_error = true
[attack_options]
std = 3.5
"""


@fuzz
@given(DAMAGES)
def test_settings(damages):
    with tempfile.TemporaryDirectory() as folder, at_most(20):
        path = Path(folder, "a.toml")
        path.write_bytes(damaged(TOML, damages))
        try:
            given = options.from_toml(path)
            options.prepare([Settings(**{"device": "cpu"} | given)], lambda text: None)
        except ValueError as error:
            assert len(str(error)) < 3000


def record(seed: int) -> results.Record:
    chosen = Settings(seed=seed, attack="gaussian", attack_options={"std": 3.0}, device="cpu").resolve()
    outcome = Outcome(chosen, [Point(10, 0.5, None)], {"error": 0.5, "asr": None, "seconds": 1.0})
    return results.Record(outcome, "2026-01-02T03:04:05+00:00", None, "a machine", {"torch": "2"})


RECORDS = [record(seed) for seed in range(3)]
LINES = [results.dumps(results.flat(each)).encode() + b"\n" for each in RECORDS]


@fuzz
@given(st.integers(0, 2), DAMAGES)
def test_results(line, damages):
    """What is damaged is refused or left out; a line that is whole never is, and a later result can be added."""
    content = damaged(LINES[line][:-1], damages).replace(b"\n", b"") + b"\n"
    lines = [*LINES[:line], content, *LINES[line + 1 :]]
    with tempfile.TemporaryDirectory() as folder, at_most(20):
        path = Path(folder, results.NAME)
        path.write_bytes(b"".join(lines))
        warned = []
        try:
            before = results.read(path, warned.append)
        except ValueError as error:
            assert f"{path}, line {line + 1} was not written by this version" in str(error)
            return
        whole = [each for i, each in enumerate(RECORDS) if i != line]
        assert [each for each in before if each in whole] == whole
        assert len(before) + len(warned) == 3
        added = record(9)
        results.append(path, added)
        assert results.read(path, lambda text: None) == [*before, added]


FILES = [*(("fashion-mnist", IDX, name) for name in IDX), ("fashion-mnist", NPZ, *NPZ), ("cifar100", CIFAR, "train")]


@fuzz
@given(st.sampled_from(FILES), st.binary(max_size=200))
def test_bytes_of_no_format(which, content):
    name, files, file = which
    check(load(name, files | {file: content}), (3, 32, 32) if name == "cifar100" else (1, 28, 28))


def test_what_is_not_damaged_is_read():
    for name, files in (("fashion-mnist", IDX), ("fashion-mnist", NPZ), ("cifar100", CIFAR)):
        assert load(name, files) is not None
    assert load("udacity", {"driving_log.csv": LOG, "IMG/a.jpg": FRAME}) is not None
    tiny = {f"tiny-imagenet-200/{path}": content for path, content in (TINY | TINY_IMAGES).items()}
    assert load("tiny-imagenet", tiny) is not None


def test_too_much_memory_is_noticed():
    with pytest.raises(AssertionError, match="MB"), at_most(1):
        bytes(2 * 10**6)
