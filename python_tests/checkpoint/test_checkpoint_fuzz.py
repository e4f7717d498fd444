"""Damaged checkpoints of every engine: load raises a ValueError or gives the identical state; never anything else."""

import json
import os
import random
import time

import pytest
import torch
from damage import split
from engines import ENGINES, make, run
from peaks import peak, start_peak
from safetensors.torch import load, save
from states import identical

from secureafl_ext import SecureAFL

SECONDS = float(os.environ.get("SECUREAFL_FUZZ_SECONDS", "0.5"))  # for each engine and test
SEED = int(os.environ.get("SECUREAFL_SEED", "1"))
ODD = (0, 1, -1, 3, 4, 255, 2**31, 2**53, 2**63, 10**30, -(2**40), 0.5, float("nan"), float("inf"), True, None, "", "x")
ODD += ([], {}, [[]], {"a": 1}, "../../etc/passwd", "é\0")


def flip(data, dice):
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]


def overwrite(data, dice):
    at, count = dice.randrange(len(data)), dice.randrange(1, 64)
    return data[:at] + dice.randbytes(min(count, len(data) - at)) + data[at + count :]


def cut(data, dice):
    return data[: dice.randrange(len(data))]


def grow(data, dice):
    return data + dice.randbytes(dice.randrange(1, 100))


def move(data, dice):
    """Some bytes are missing, or there twice."""
    at, to = dice.randrange(len(data)), dice.randrange(len(data))
    return data[:at] + data[to:]


def joined(header, body):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def change(tree, dice):
    """Somewhere in it another value, a name more or one less."""
    while isinstance(tree, (dict, list)) and tree:
        key = dice.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if isinstance(tree[key], (dict, list)) and tree[key] and dice.random() < 0.8:
            tree = tree[key]
            continue
        act = dice.randrange(4)
        if act == 0:
            del tree[key]
        elif act == 1 and isinstance(tree, dict):
            tree[dice.choice(("digest", "shards", "format", "gram", "x", str(key) + "_"))] = dice.choice(ODD)
        else:
            tree[key] = dice.choice(ODD)
        return


def header(data, dice):
    tree, body = split(data)
    change(tree, dice)
    return joined(tree, body)


def about(data, dice):
    """What the server says of itself, in the old format half the time: then no digest stands before the checks."""
    tree, body = split(data)
    inner = json.loads(tree["__metadata__"]["secureafl"])
    change(inner, dice)
    if dice.random() < 0.5 and inner.get("format") == 3:
        inner["format"] = 1
        tree["__metadata__"].pop("digest")
    tree["__metadata__"]["secureafl"] = json.dumps(inner)
    return joined(tree, body)


DAMAGE = (flip, flip, overwrite, cut, grow, move, header, about)


def saved(path, engine):
    server = make(engine)
    run(server, 25)
    server.save(path)
    return server


def dice_of(engine):
    return random.Random(f"{SEED} {engine}")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_file_is_refused_or_loads_as_the_same_state(engine, tmp_path):
    path, dice = tmp_path / "server", dice_of(engine)
    server = saved(path, engine)
    data = path.read_bytes()
    before, began, tried, same = start_peak("cpu"), time.monotonic(), 0, 0
    while time.monotonic() - began < SECONDS or tried < 20:
        damaged = dice.choice(DAMAGE)(data, dice)
        if dice.random() < 0.2:
            damaged = dice.choice(DAMAGE[:6])(damaged, dice) if damaged else damaged
        path.write_bytes(damaged)
        tried += 1
        try:
            loaded = SecureAFL.load(path)
        except ValueError as error:
            assert str(error).startswith("SecureAFL") and len(str(error)) < 1000
            continue
        same += 1
        settings_changed = loaded.config != server.config
        assert not settings_changed or b'"digest"' not in damaged  # what no digest guards may be another setting
        if not settings_changed and b'"digest"' in damaged:
            identical(loaded, server)
    assert peak("cpu") - before < 100e6
    print(f"{engine}: {tried} damaged files, {tried - same} refused")


@pytest.mark.parametrize("engine", ENGINES)
def test_damaged_values_without_a_digest_are_refused_or_harmless(engine, tmp_path):
    """Files of format 1: what loads goes on for some rounds, and its model stays finite."""
    path, dice = tmp_path / "server", dice_of(engine)
    saved(path, engine)
    tree, _ = split(path.read_bytes())
    inner = json.loads(tree["__metadata__"]["secureafl"])
    tensors, header = load(path.read_bytes()), {"secureafl": json.dumps({**inner, "format": 1})}
    names = [name for name, tensor in tensors.items() if tensor.numel()]
    began, tried, taken = time.monotonic(), 0, 0
    while time.monotonic() - began < SECONDS or tried < 20:
        damaged = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in dice.choices(names, k=dice.choice((1, 1, 2))):
            if dice.random() < 0.7:
                bits = damaged[name].view(-1).view(torch.uint8)
                bits[dice.randrange(len(bits))] ^= 1 << dice.randrange(8)
            else:
                damaged[name].view(-1)[dice.randrange(damaged[name].numel())] = dice.choice((-1, 0, 1, 5, 100, 1e9))
        path.write_bytes(save(damaged, header))
        tried += 1
        try:
            loaded = SecureAFL.load(path)
        except ValueError as error:
            assert str(error).startswith("SecureAFL")
            continue
        taken += 1
        run(loaded, 8)
        assert loaded.model.isfinite().all()
        again = make(engine)
        again.load_state_dict(loaded.state_dict())  # and is still one that a server takes
    assert tried > taken > 0
    print(f"{engine}: {tried} damaged states, {tried - taken} refused")
