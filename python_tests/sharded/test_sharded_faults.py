"""Mistakes and faults on one rank: an error on all of them, no hang, and nothing lost."""

import math
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from splits import ROW_KINDS, SETTINGS, D, N, digest, digests, history_of_arrivals, replay, start

from secureafl_ext import SecureAFL
from secureafl_ext.rules.mean_steps import MeanSteps


def mistakes(group, settings, arrivals):
    """Rank 1 errs in every way; what each rank was told, and whether all went on as if nothing had been."""
    server, rank, told = start(settings, group), dist.get_rank(group), {}
    replay(server, arrivals[:20], group)

    def err(name, call, wrong):
        try:
            (wrong if rank == 1 else call)()
        except Exception as error:
            told[name] = f"{type(error).__name__} {error}"

    def out_of_memory():
        server._engine.update_sums = lambda *_: torch.empty(2**60)
        try:
            server.submit(3, good, now)
        finally:
            del server._engine.update_sums

    good, now = torch.ones_like(server.model), server.version
    for name, *wrong in (
        ("shape", 3, torch.ones(D), now),
        ("dtype", 3, good.double(), now),
        ("no tensor", 3, [1.0], now),
        ("client", 4, good, now),
        ("no client", N, good, now),
        ("no number", "3", good, now),
        ("version", 3, good, now - 1),
        ("stale", 3, good, 2),
        ("future", 3, good, now + 1),
    ):
        err(name, lambda: server.submit(3, good, now), lambda wrong=wrong: server.submit(*wrong))
    err("memory", lambda: server.submit(3, good, now), out_of_memory)
    err("call", lambda: server.submit(3, good, now), server.estimates)
    err("forget", lambda: server.forget(3), lambda: server.forget(4))
    err("leave", lambda: server.leave(3), lambda: server.leave(N))
    err("lr", lambda: setattr(server, "lr", 0.1), lambda: setattr(server, "lr", 0.2))
    err("bad lr", lambda: setattr(server, "lr", 0.1), lambda: setattr(server, "lr", math.inf))
    err("path", lambda: server.save("one"), lambda: server.save("other"))
    state = (
        server.state_dict()
    )  # not sooner: the last round's end, which waits for a message, must outlast all of these
    err("state", lambda: server.load_state_dict(state), lambda: server.load_state_dict({**state, "dw": good}))
    err("other state", lambda: server.load_state_dict(state), lambda: server.load_state_dict({**state, "version": 3}))
    whole = torch.zeros(D)
    err("settings", lambda: start(settings, group), lambda: start({**settings, "lr": 0.1}, group))
    err("setting", lambda: start(settings, group), lambda: start({**settings, "lr": math.nan}, group))
    err("slice", lambda: start(settings, group), lambda: SecureAFL(whole, N, **settings, process_group=group))
    err("model", lambda: start(settings, group), lambda: SecureAFL([0.0], N, **settings, process_group=group))
    err("file", lambda: start(settings, group), lambda: SecureAFL.load(os.devnull, process_group=group))
    replay(server, arrivals[20:], group)
    return told, now, digest(server.state_dict())


@pytest.mark.parametrize("kind", [{}, ROW_KINDS["support"]], ids=["median", "support"])
def test_a_mistake_on_one_rank_is_an_error_on_all_and_changes_nothing(ranks, kind):
    settings = {**SETTINGS, **kind}
    arrivals, *_ = history_of_arrivals(settings, 40)
    answers = ranks.run(2, mistakes, settings, arrivals)
    (right, now, _), (wrong, *_) = answers
    first, second = D // 2 + 1, D // 2
    tensor = f"ValueError SecureAFL.submit: update must be a tensor ({second},) float32, got"
    for name, words in {
        "shape": f"{tensor} ({D},) float32",
        "dtype": f"{tensor} ({second},) float64",
        "no tensor": f"{tensor} list",
        "no client": f"ValueError SecureAFL.submit: client must lie in 0..{N - 1}, got {N}",
        "no number": f"ValueError SecureAFL.submit: client must be a whole number in 0..{N - 1}, got '3'",
        "future": "ValueError SecureAFL.submit: version must lie in",
        "memory": "RuntimeError",
        "bad lr": "ValueError SecureAFL: lr must be a finite number, got inf",
        "leave": f"ValueError SecureAFL.leave: client must lie in 0..{N - 1}, got {N}",
        "state": "ValueError SecureAFL.load_state_dict: dw must be",
        "setting": "ValueError SecureAFL: lr must be a finite number, got nan",
        "model": "ValueError SecureAFL: model must be a flat float32 or float64 tensor, got list",
    }.items():
        assert wrong[name].startswith(words), wrong[name]
        assert "rank 1 raised an error, see its own message; nothing has changed on any rank" in right[name]
    for name, words in {
        "client": "SecureAFL.submit: client must be the same on all ranks, got 3 on rank 0, 4 on rank 1; nothing has",
        "version": f"SecureAFL.submit: version must be the same on all ranks, got {now} on rank 0, {now - 1} on rank",
        "stale": f"SecureAFL.submit: version must be the same on all ranks, got {now} on rank 0, 2 on rank 1; nothing",
        "call": "call must be the same on all ranks, got submit on rank 0, estimates on rank 1; nothing has changed",
        "lr": "SecureAFL.lr: settings must be the same on all ranks",
        "forget": "SecureAFL.forget: client must be the same on all ranks, got 3 on rank 0, 4 on rank 1; nothing has",
        "path": "SecureAFL.save: file must be the same on all ranks",
        "other state": "SecureAFL.load_state_dict: version must be the same on all ranks",
        "settings": "SecureAFL: settings must be the same on all ranks",
        "slice": f"SecureAFL: model must be the slices of {first + D} coordinates that shard gives",
    }.items():
        assert words in wrong[name] and words in right[name], (wrong[name], right[name])
    assert (
        wrong["file"].startswith("ValueError SecureAFL.load: /dev/null must be a file")
        and "raised an error" in right["file"]
    )
    assert [state for *_, state in answers] == ranks.run(2, digests, settings, arrivals)


def runs_out_of_memory_in_a_refresh(group, settings, arrivals):
    """Rank 1 fails once, in the first refresh. What each rank is told of that round and of the next one."""
    server, told = start(settings, group), []
    products = MeanSteps.own_products

    def fails(support):
        MeanSteps.own_products = products
        raise MemoryError("too little")

    if dist.get_rank(group) == 1:
        MeanSteps.own_products = fails
    try:
        for arrival in arrivals:
            try:
                replay(server, [arrival], group)
            except Exception as error:
                told.append((server.version, f"{type(error).__name__} {error}"))
    finally:
        MeanSteps.own_products = products
    return told


def test_an_error_of_one_rank_in_a_refresh_is_told_to_all(ranks):
    """Messages of different lengths at a time would end the other process without a word."""
    settings = {**SETTINGS, **ROW_KINDS["steps"]}
    arrivals, *_ = history_of_arrivals(settings, 4 * N)
    right, wrong = ranks.run(2, runs_out_of_memory_in_a_refresh, settings, arrivals)
    assert right[0][1].startswith("ValueError") and "rank 1" in right[0][1]
    assert wrong[0][1] == "MemoryError too little"
    assert right[1:] == wrong[1:]  # they go on together; recorded versions come too early, as one round is missing


def loses_a_rank(group, arrivals, how):
    dist.barrier()  # all are there before the short time-out counts
    group = dist.new_group(timeout=timedelta(seconds=3))
    server = start(SETTINGS, group)
    replay(server, arrivals[:5], group)
    if dist.get_rank(group) == 1:
        if how == "exits":
            os._exit(1)
        if how == "hangs":
            time.sleep(5)
        if how == "raises":
            raise KeyError("of the caller's own")
    version = server.version
    with pytest.raises(RuntimeError, match="a message between the ranks failed: one of them has ended, hangs or"):
        replay(server, arrivals[5:], group)
    return server.version == version


@pytest.mark.parametrize("how", ["exits", "hangs", "raises"])
def test_a_rank_that_is_lost_ends_the_others_within_the_time_out(ranks, how):
    arrivals, *_ = history_of_arrivals(SETTINGS, 10)
    began = time.monotonic()
    answers = ranks.run(3, loses_a_rank, arrivals, how)
    assert time.monotonic() - began < 60  # not the half hour that torch would wait by default
    assert answers[0] is True and answers[2] is True
    assert {"exits": answers[1] is None, "raises": isinstance(answers[1], KeyError), "hangs": True}[how]


# What is not offered


def refusals(group):
    told = []
    for settings in (
        *({"rule": "support"}, {"rule": "centered_clip"}, {"rule": "centered_clip", "memory": 0}),
        *({"pairs": "rounds"}, {"history_dtype": torch.float64}),
    ):
        with pytest.raises(ValueError) as error:
            start({**SETTINGS, **settings}, group)
        told.append(str(error.value))
    server = start(SETTINGS, group)
    with pytest.raises(ValueError) as error:
        server.enqueue(torch.tensor([0]), torch.ones(D), server.model)
    return told, str(error.value), server.capturable, server.version


def test_what_is_not_split_is_refused_in_words(ranks):
    ((told, enqueue, capturable, version),) = ranks.run(1, refusals)
    only = " with memory=3, only with memory=0"
    names = f"rule='support'{only}", "rule='centered_clip'", "rule='centered_clip'", f"pairs='rounds'{only}"
    assert told == [
        f"SecureAFL: process_group does not support {name}" for name in (*names, f"history_dtype=float64{only}")
    ]
    assert enqueue == "SecureAFL.enqueue: not supported with process_group; use submit"
    assert not capturable and version == 0


def test_what_is_no_group_of_ours_is_refused():
    for other in ("gloo", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ValueError, match="process_group must be a group that this process is a member of, got"):
            SecureAFL(torch.zeros(4), 2, process_group=other)
