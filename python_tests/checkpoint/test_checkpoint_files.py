"""A checkpoint is untrusted input: its header is held against what is in the file, and all of it has a digest."""

import json
import math
import os

import pytest
import torch
from damage import damages, described, tensors_of
from engines import ENGINES, N, make, run
from peaks import peak, start_peak
from safetensors.torch import save_file
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext.checkpoint import tensor_file


def old_format(path, about=None):
    """The same checkpoint as an older version wrote it: without a digest."""
    about = {**described(path), "format": 1, **(about or {})}
    save_file(tensors_of(path), path, {"secureafl": json.dumps(about)})


def saved(path, engine="fused"):
    server = make(engine)
    run(server, 30)
    server.save(path)
    return server


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.safetensors"


@pytest.mark.parametrize("engine", ENGINES)
def test_others_can_read_the_file_and_older_ones_load(engine, path):
    server = saved(path, engine)
    state, tensors = server.state_dict(), tensors_of(path)
    assert {*tensors, "version", "stale", "too_soon"} == set(state)
    assert all(torch.equal(tensors[name], state[name]) for name in tensors)
    assert oct(os.stat(path).st_mode & 0o777) == "0o600"
    identical(SecureAFL.load(path), server)
    old_format(path)
    identical(SecureAFL.load(path), server)


@pytest.mark.parametrize("engine", ["fused", "paper", "support"])  # test_state_checks has them all, without files
def test_every_value_is_checked_where_there_is_no_digest(engine, path):
    server, refused = saved(path, engine), 0
    for kind, name, bad in damages(server.state_dict(), server.config):
        tensors = {key: value for key, value in bad.items() if isinstance(value, torch.Tensor) and key != 7}
        numbers = {key: bad[key] for key in ("version", "stale", "too_soon") if key in bad}
        if len(tensors) + len(numbers) < len(bad) or any(value.is_meta for value in tensors.values()):
            continue  # nothing that a file could hold
        about = {**described(path), "format": 1, "state": numbers}
        target = path.with_name("damaged")
        save_file({key: value.contiguous() for key, value in tensors.items()}, target, {"secureafl": json.dumps(about)})
        with pytest.raises(ValueError, match="SecureAFL") as refusal:
            SecureAFL.load(target)
        assert name in str(refusal.value), kind
        refused += 1
    assert refused > 60


def in_header(change):
    """The header of a whole file of the old format says something else."""
    return lambda path: old_format(path, change(described(path)))


def with_config(**settings):
    return in_header(lambda about: {"config": {**about["config"], **settings}})


def with_state(**numbers):
    return in_header(lambda about: {"state": {**about["state"], **numbers}})


def no_digest(path):
    save_file(tensors_of(path), path, {"secureafl": json.dumps(described(path))})


def only(text):
    """Nothing but this for a header."""
    return lambda path: path.write_bytes(len(text).to_bytes(8, "little") + text)


def about_only(text):
    return lambda path: save_file({}, path, {"secureafl": text})


def entry(name, **changes):
    """One tensor's entry in the header is another; the bytes stay."""

    def write(path):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header[name].update(changes)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return write


def nothing_behind_it(path):
    """A ring of 10^12 models of no coordinates takes no byte."""
    SecureAFL(torch.zeros(0), N).save(path)
    with_config(max_staleness=10**12 - 2)(path)
    entry("models", shape=[10**12, 0])(path)


def replaced_by(make_other):
    def write(path):
        path.unlink()
        make_other(path)

    return write


LIES = {
    "clients 1e9": (in_header(lambda about: {"clients": 10**9}), r"last_updates must be \(1000000000, 7\)"),
    "clients a float": (
        in_header(lambda about: {"clients": 5.0}),
        "clients must be a whole number, 1 or more, got 5.0",
    ),
    "clients true": (in_header(lambda about: {"clients": True}), "clients must be a whole number, 1 or more, got True"),
    "clients 0": (in_header(lambda about: {"clients": 0}), "clients must be a whole number, 1 or more, got 0"),
    "version -3": (with_state(version=-3), "version must be a whole number, 0 or more"),
    "stale a text": (with_state(stale="0"), "stale must be a whole number"),
    "a state of more": (with_state(x=1), "got 'x'"),
    "a tensor's name": (with_state(pairs=1), "got pairs twice"),
    "max_staleness 1e9": (with_config(max_staleness=10**9), r"models must be \(1000000002, 7\)"),
    "memory 16": (with_config(memory=16), r"dw must be \(5, 16, 7\)"),
    "window 1e15": (with_config(window=10**15), "factors must be .*1000000000000000"),
    "memory a text": (with_config(memory="3"), "memory must be a whole number 0 to 16, got '3'"),
    "lr NaN": (with_config(lr=math.nan), "lr must be a finite number, got nan"),
    "another rule": (with_config(rule="krum"), "state must have centre"),
    "an unknown setting": (with_config(gift=1), "got also gift"),
    "history_dtype": (with_config(history_dtype="int32"), "history_dtype must be one of"),
    "config a list": (in_header(lambda about: {"config": [1]}), "config must be an object, got list"),
    "dtype": (in_header(lambda about: {"dtype": "int8"}), "dtype must be float32 or float64, got 'int8'"),
    "one more": (in_header(lambda about: {"extra": 1}), "header must have config, clients, dtype, state"),
    "format 0": (in_header(lambda about: {"format": 0}), "must have format 1 to 6, got 0"),
    "format true": (in_header(lambda about: {"format": True}), "must have format 1 to 6, got True"),
    "format 5 without digest": (no_digest, "format 5 must come with a digest"),
    "format 2 without shards": (in_header(lambda about: {"format": 2}), "format 2 must come with shards"),
    "format 1 with shards": (in_header(lambda about: {"shards": ["x"]}), "format 1 must come without shards"),
    "deep": (only(b"[" * 10**6), "its header must be JSON, got RecursionError"),
    "deep about": (about_only("[" * 10**6), "its header must be JSON, got RecursionError"),
    "no object": (only(b"[1, 2]"), "its header must be a JSON object, got list"),
    "about no object": (about_only("3"), "its header must be a JSON object, got int"),
    "a large number": (only(b'{"a": 1' + b"0" * 10**6 + b"}"), "its header must be JSON, got ValueError"),
    "no text": (only(b"\xff\xfe{}"), "its header must be JSON, got UnicodeDecodeError"),
    "metadata no texts": (only(b'{"__metadata__": {"secureafl": 3}}'), "its metadata must be texts"),
    "no tensors": (about_only('{"format": 1}'), "it must have models"),
    "empty": (lambda path: path.write_bytes(b""), "a safetensors header"),
    "a longer header than file": (lambda path: path.write_bytes(b"\xff" * 8 + b"{}"), "a safetensors header"),
    "a shape too large": (entry("models", shape=[2**70, 0]), "'models' must have dtype, shape"),
    "a shape below 0": (entry("models", shape=[-6, -7]), "'models' must have dtype, shape"),
    "a shape of text": (entry("models", shape="67"), "'models' must have dtype, shape"),
    "an unknown dtype": (entry("pairs", dtype="I128"), "'pairs' must have dtype, shape"),
    "a dtype that is a list": (entry("pairs", dtype=[]), "'pairs' must have dtype, shape"),
    "another dtype": (entry("pairs", dtype="F64"), "was changed or damaged: its digest must be"),
    "another shape": (entry("models", shape=[7, 6]), "must have the same last length"),
    "offsets elsewhere": (entry("pairs", data_offsets=[0, 40]), "must follow each other"),
    "nothing behind it": (nothing_behind_it, "'models' must have dtype, shape"),
    "a folder": (replaced_by(os.mkdir), "directory"),
    "a pipe": (replaced_by(os.mkfifo), r"must be a file that SecureAFL\.save wrote"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_before_memory_is_asked_for(lie, path):
    damage, words = LIES[lie]
    saved(path)
    damage(path)
    before = start_peak("cpu")
    with pytest.raises((ValueError, IsADirectoryError), match=words):
        SecureAFL.load(path)
    assert peak("cpu") - before < 60e6


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flipped_bit_of_any_tensor_is_found(engine, path):
    server = saved(path, engine)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    with tensor_file.opened(path) as file:
        places = [place for place in file.places.values() if place.begin < place.end]
    for place in places:
        for at in {place.begin, (place.begin + place.end) // 2, place.end - 1}:
            flipped = bytearray(data)
            flipped[start + at] ^= 1 << (at % 8)
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match="was changed or damaged: its digest must be"):
                SecureAFL.load(path)
    path.write_bytes(data)
    identical(SecureAFL.load(path), server)


def test_tensors_are_hashed_in_pieces_and_cut_out_of_them(tmp_path, monkeypatch):
    """Pieces that end within a row, and cuts that begin and end in any of them."""
    monkeypatch.setattr(tensor_file, "PIECE", 64)
    random = torch.Generator().manual_seed(0)
    cut = {"x": torch.randn(3, 2, 37, generator=random), "y": torch.randn(5, 37, generator=random).half()}
    cut["none"] = torch.zeros(4, 0, 37)
    tensors = {**cut, "one": torch.tensor(3), "flags": torch.rand(9, generator=random) > 0.5}
    with open(tmp_path / "file", "wb") as file:
        tensor_file.dump(file, tensors, {"about": "nothing"})
    assert all(torch.equal(value, tensors[name]) for name, value in tensors_of(tmp_path / "file").items())
    for begin, end in [(0, 37), (0, 1), (36, 37), (5, 30), (12, 12), (0, 0)]:
        with tensor_file.opened(tmp_path / "file") as file:
            got = file.load(dict.fromkeys(cut, (begin, end)), file.digest)
        for name, value in tensors.items():
            expected = value[..., begin:end] if name in cut else value
            assert torch.equal(got[name], expected) and got[name].dtype == value.dtype, name


def test_a_file_of_an_older_version_goes_on_as_the_papers_server(path):
    """Formats 1 had one list of factors, no turns, and settings that were the paper's without saying so."""
    server = saved(path, "paper")
    tensors, about = tensors_of(path), described(path)
    del tensors["turns"], about["state"]["too_soon"]
    for name in ("factors", "on_reject", "spacing"):
        del about["config"][name]
    for name in ("factors", "recorded"):
        tensors[name] = tensors[name][0].clone()
    save_file(tensors, path, {"secureafl": json.dumps({**about, "format": 1})})
    older = SecureAFL.load(path)
    assert older.config == server.config
    run(server, 20), run(older, 20)
    theirs, ours = server.state_dict(), older.state_dict()
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(ours[name])) for name, value in theirs.items())


def test_a_link_is_replaced_by_a_file_and_what_it_led_to_stays(tmp_path):
    other, path = tmp_path / "other", tmp_path / "link"
    other.write_text("mine")
    path.symlink_to(other)
    SecureAFL(torch.zeros(4), 2).save(path)
    assert not path.is_symlink() and other.read_text() == "mine" and SecureAFL.load(path).version == 0
