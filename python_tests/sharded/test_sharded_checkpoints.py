"""Checkpoints of a server split over ranks: loaded on any number of them, and whole whatever becomes of one."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from splits import (
    KINDS,
    ROW_KINDS,
    SETTINGS,
    D,
    N,
    agree,
    digest,
    digests,
    history_of_arrivals,
    near,
    replay,
    start,
    whole_state,
)
from states import identical

from secureafl_ext import SecureAFL, shard
from secureafl_ext.checkpoint import files
from secureafl_ext.checkpoint.state import required, table
from secureafl_ext.engines.ranks import SLICED


def save_after(group, settings, arrivals, path):
    server = start(settings, group)
    replay(server, arrivals, group)
    server.save(path)
    return digest(server.state_dict())


def load_and_go_on(group, path, arrivals):
    server = SecureAFL.load(path, process_group=group)
    before = digest(server.state_dict())
    verdicts = replay(server, arrivals, group)
    return before, verdicts, digest(server.state_dict()), whole_state(server, group)


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        *(("median", 2, 3), ("float16", 3, 2), ("float16", 2, 2)),
        *(("support", 2, 3), ("support", 2, 2), ("kinship", 3, 1), ("float64", 1, 2), ("steps", 2, 3)),
    ],
)
def test_saved_on_some_ranks_and_loaded_on_others(ranks, tmp_path, kind, saved, loaded):
    settings, path = {**SETTINGS, **(KINDS | ROW_KINDS)[kind]}, tmp_path / "server.safetensors"
    arrivals, verdicts, whole = history_of_arrivals(settings, 120)
    states = ranks.run(saved, save_after, settings, arrivals[:80], path)
    shards = sorted(file.name for file in tmp_path.iterdir())
    assert len(shards) == 1 + saved and shards[0] == path.name
    answers = ranks.run(loaded, load_and_go_on, path, arrivals[80:])
    for before, went_on, _, state in answers:
        assert [reason for reason, *_ in went_on] == [reason for reason, *_ in verdicts[80:]]
        assert before[0] == states[0][0]
        agree(state, whole.state_dict())
    if saved == loaded:  # as if it had never stopped
        assert [before for before, *_ in answers] == states
        assert [after for *_, after, _ in answers] == ranks.run(saved, digests, settings, arrivals)


@pytest.mark.parametrize("kind", ["median", "support", "steps"])
def test_saved_on_ranks_and_loaded_on_none_and_back(ranks, tmp_path, kind):
    settings, path = {**SETTINGS, **(KINDS | ROW_KINDS)[kind]}, tmp_path / "server.safetensors"
    arrivals, verdicts, whole = history_of_arrivals(settings, 120)
    ranks.run(2, save_after, settings, arrivals[:60], path)
    alone = SecureAFL.load(path)
    for arrival in arrivals[60:90]:
        alone.submit(*arrival)
    alone.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [
        path.name
    ]  # the shards have gone with the file that named them
    identical(SecureAFL.load(path), alone)
    for _, went_on, _, state in ranks.run(2, load_and_go_on, path, arrivals[90:]):
        assert [reason for reason, *_ in went_on] == [reason for reason, *_ in verdicts[90:]]
        agree(state, whole.state_dict())


def load_state_without_products(group, state, arrivals):
    server = start(SETTINGS, group)
    server.load_state_dict({name: shard(value, group) if name in SLICED else value for name, value in state.items()})
    return replay(server, arrivals, group), whole_state(server, group)


def test_products_that_a_state_lacks_are_those_of_all_ranks(ranks):
    """A composed server's state has none."""
    arrivals, verdicts, whole = history_of_arrivals(SETTINGS, 80)
    *_, before = history_of_arrivals(SETTINGS, 60)
    state = {
        name: before.state_dict()[name] for name in (*required(before.config, table(before.config, N, D)), "oldest")
    }
    for went_on, after in ranks.run(2, load_state_without_products, state, arrivals[60:]):
        assert [reason for reason, *_ in went_on] == [reason for reason, *_ in verdicts[60:]]
        near(after, whole.state_dict())


def dies_while_saving(group, path, arrivals, victim, moment):
    """One rank is gone at that moment of its second save."""
    server = start(SETTINGS, group)
    replay(server, arrivals[:20], group)
    server.save(path)
    first = whole_state(server, group)
    replay(server, arrivals[20:], group)
    second = whole_state(server, group)
    if dist.get_rank(group) == victim:
        function, plain = {
            "amid its shard": ("to_disk", None),
            "after its shard": ("write_file", files.write_file),
            "before the index": ("write", None),
            "after the index": ("write", files.write),
        }[moment]

        def last_act(*arguments):
            if plain:
                plain(*arguments)
            os._exit(1)

        setattr(files, function, last_act)
    try:
        server.save(path)
    except RuntimeError as error:
        return str(error), first, second
    return "saved", first, second


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        (1, "amid its shard"),
        (1, "after its shard"),
        (0, "before the index"),
        (0, "after the index"),
    ],
)
def test_a_rank_that_dies_while_saving_leaves_a_whole_checkpoint(ranks, tmp_path, victim, moment):
    path = tmp_path / "server.safetensors"
    arrivals, *_ = history_of_arrivals(SETTINGS, 30)
    began = time.monotonic()
    answers = ranks.run(2, dies_while_saving, path, arrivals, victim, moment)
    assert time.monotonic() - began < 20  # the group's time-out
    assert answers.pop(victim) is None
    words, first, second = answers[0]
    assert "one of them has ended" in words and "load the last checkpoint" in words
    expected = second if moment == "after the index" else first
    found = SecureAFL.load(path).state_dict()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in expected)
    # and the next one that is whole takes away what was left lying
    ranks.run(2, save_after, SETTINGS, arrivals, path)
    assert len(list(tmp_path.iterdir())) == 3


def cannot_write(group, path, arrivals, victim, function):
    server = start(SETTINGS, group)
    replay(server, arrivals[:20], group)
    server.save(path)
    plain = getattr(files, function)

    def full(*_):
        raise OSError(28, "No space left on device")

    if dist.get_rank(group) == victim:
        setattr(files, function, full)
    try:
        with pytest.raises((OSError, ValueError)) as error:
            server.save(path)
    finally:
        setattr(files, function, plain)
    replay(server, arrivals[20:], group)
    return type(error.value).__name__, str(error.value), digest(server.state_dict())


@pytest.mark.parametrize(("victim", "function"), [(1, "to_disk"), (0, "to_disk"), (0, "write")])
def test_a_full_disk_on_one_rank_is_an_error_on_all(ranks, tmp_path, victim, function):
    path = tmp_path / "server.safetensors"
    arrivals, *_ = history_of_arrivals(SETTINGS, 30)
    *_, then = history_of_arrivals(SETTINGS, 20)
    answers = ranks.run(2, cannot_write, path, arrivals, victim, function)
    (kind, words, _), (other_kind, other_words, _) = answers[victim], answers[1 - victim]
    assert kind == "OSError" and "No space left" in words
    assert other_kind == "ValueError" and f"save: rank {victim} raised an error, see its own message" in other_words
    assert [state for *_, state in answers] == ranks.run(2, digests, SETTINGS, arrivals)  # nobody lost anything
    agree(SecureAFL.load(path).state_dict(), then.state_dict())
    if function != "write":
        assert len(list(tmp_path.iterdir())) == 3
