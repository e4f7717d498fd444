"""The shards of a checkpoint are untrusted input too: plain names beside the index, which has the digest of each."""

import json

import pytest
from damage import described, tensors_of
from safetensors.torch import save_file
from splits import SETTINGS, history_of_arrivals, replay, start
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext.checkpoint import tensor_file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.safetensors"


def save_small(group, settings, arrivals, path):
    server = start(settings, group, d=11)
    replay(server, arrivals, group)
    server.save(path)


def split_in_two(ranks, path, settings=SETTINGS):
    """A checkpoint of two ranks; its shards."""
    arrivals, *_ = history_of_arrivals(settings, 20, d=11)
    ranks.run(2, save_small, settings, arrivals, path)
    return sorted(file for file in path.parent.iterdir() if file != path)


def rewrite(path, **changes):
    """The index with another header, and a digest that fits it."""
    tensors, about = tensors_of(path), {**described(path), **changes}
    with open(path, "wb") as file:
        tensor_file.dump(file, tensors, {"secureafl": json.dumps(about)})


def test_shards_are_plain_names(ranks, path):
    first, second = split_in_two(ranks, path)
    whole, index, shards = SecureAFL.load(path), path.read_bytes(), described(path)["shards"]
    names = [name for name, _ in shards]
    assert names == [first.name, second.name] and described(path)["format"] == 6
    stem, digest = first.name.removesuffix("0-of-2"), shards[0][1]
    for wrong in (
        [],
        shards[:1],
        shards[::-1],
        [shards[0], shards[0]],
        [[f"../{path.parent.name}/{name}", digest] for name, digest in shards],
        [[str(path.with_name(name)), digest] for name, digest in shards],
        [[f"{stem}{k}-of-100000", digest] for k in range(100_000)],
        [shards[0]] * 100_000,
        [[name, None] for name in names],
        names,
        [[name] for name in names],
        {"0": first.name},
        "x",
        3,
    ):
        path.write_bytes(index)
        rewrite(path, shards=wrong)
        with pytest.raises(ValueError, match="its shards must be 1 to 4096 plain names"):
            SecureAFL.load(path)
    path.write_bytes(index)
    save_file(tensors_of(path), path, {"secureafl": json.dumps({**described(path), "format": 2, "shards": names})})
    identical(SecureAFL.load(path), whole)  # as older versions wrote it


def test_the_index_names_each_shards_digest(ranks, path):
    first, second = split_in_two(ranks, path)
    whole = SecureAFL.load(path)
    for file in (first, second):
        kept = file.read_bytes()
        file.write_bytes(kept[:-3] + bytes([kept[-3] ^ 4]) + kept[-2:])
        with pytest.raises(ValueError, match=rf"{file.name} is no checkpoint, or was changed or damaged: its digest"):
            SecureAFL.load(path)
        file.write_bytes(kept)
    identical(SecureAFL.load(path), whole)
    shard = tensors_of(first)
    with open(first, "wb") as file:
        tensor_file.dump(file, {**shard, "models": shard["models"] + 1}, {})  # whole, but another
    with pytest.raises(ValueError, match="was changed or damaged: its digest must be"):
        SecureAFL.load(path)
    first.unlink()
    with pytest.raises(ValueError, match=rf"must have its shards beside it, got no {first.name}"):
        SecureAFL.load(path)


def digest_of(path):
    with tensor_file.opened(path) as file:
        return file.digest


@pytest.mark.parametrize("rule", ["median", "kinship"])
def test_shards_have_a_centre_if_their_rule_has_one(ranks, path, rule):
    """Only row-wise rules do. The digests fit: whoever writes the shards writes the index too."""
    files = split_in_two(ranks, path, {**SETTINGS, "rule": rule, "memory": 0})
    index, shards = path.read_bytes(), [tensors_of(file) for file in files]
    for changed in (files[:1], files[1:], files):
        for file, tensors in zip(files, shards, strict=True):
            row = {} if rule == "kinship" else {"centre": tensors["models"][0].clone()}
            kept = {name: tensor for name, tensor in tensors.items() if name != "centre"}
            with open(file, "wb") as out:
                tensor_file.dump(out, {**kept, **row} if file in changed else tensors, {})
        path.write_bytes(index)
        rewrite(path, shards=[[file.name, digest_of(file)] for file in files])
        alike = "state must have no other names .*'centre'" if rule == "median" else "state must have centre, got none"
        with pytest.raises(
            ValueError, match=alike if changed == files else "1-of-2 must have tensors like those of the"
        ):
            SecureAFL.load(path)


def load_or_words(group, path):
    try:
        SecureAFL.load(path, process_group=group)
    except ValueError as error:
        return str(error)


def test_a_damaged_shard_is_an_error_on_every_rank(ranks, path):
    _, second = split_in_two(ranks, path)
    data = second.read_bytes()
    second.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    answers = ranks.run(2, load_or_words, path)
    assert "rank 1 raised an error" in answers[0] and "was changed or damaged" in answers[1]
