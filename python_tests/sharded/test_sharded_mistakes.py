"""More mistakes on one rank, and ranks that fail in the middle of a round: an error on all, and nothing is lost."""

import time

import pytest
import torch
import torch.distributed as dist
from splits import ROW_KINDS, SETTINGS, D, N, digest, history_of_arrivals, replay, start

from secureafl_ext import SecureAFL, gather, shard
from secureafl_ext.config import Config
from secureafl_ext.engines.history import History
from secureafl_ext.rules.mean_steps import MeanSteps
from secureafl_ext.rules.support import Support


def told(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def mistakes(group, folder):
    """Rank 1 errs; what each rank was told, and how long all of it took."""
    settings = {**SETTINGS, **ROW_KINDS["steps"]}
    server, other, rank = start(settings, group), start(settings, group), dist.get_rank(group)
    update, model = torch.ones_like(server.model), shard(torch.zeros(D), group)
    wide, config = settings | {"history_dtype": torch.float64}, Config(**settings)

    def make(model, settings):
        return SecureAFL(model, N, **settings, process_group=group)

    def made_from(config):
        return SecureAFL.from_config(model, N, config, group)

    began, answers = time.monotonic(), {}
    for name, right, wrong in (
        ("path", lambda: server.save(folder / "server"), lambda: server.save(None)),
        ("load", lambda: SecureAFL.load(folder / "no", process_group=group), lambda: make(model, settings)),
        ("meta", lambda: make(model, settings), lambda: make(model.to("meta"), settings)),
        ("dtype", lambda: make(model, wide), lambda: make(model.double(), wide)),
        (
            "config",
            lambda: server.from_config(model, N, config, group),
            lambda: server.from_config(model, N, {}, group),
        ),
        ("server", lambda: server.submit(3, update, 0), lambda: other.submit(3, update, 0)),
        ("gathered dtype", lambda: gather(update, group), lambda: gather(update.double(), group)),
        ("gathered shape", lambda: gather(update, group), lambda: gather(update.view(1, -1), group)),
        ("gathered list", lambda: gather(update, group), lambda: gather([1.0], group)),
    ):
        answers[name] = told(wrong if rank == 1 else right)
    answers["after"] = told(lambda: server.submit(3, update, 0)) + told(lambda: other.submit(3, update, 0))
    return answers, time.monotonic() - began, (server.version, other.version)


def test_a_mistake_on_one_rank_is_an_error_on_all(ranks, tmp_path):
    (right, took, versions), (wrong, _, others) = ranks.run(2, mistakes, tmp_path)
    assert took < 10  # not the time-out of the group
    for name, words in {
        "path": "ValueError SecureAFL.save: path must be a str or os.PathLike, got NoneType",
        "meta": "ValueError SecureAFL: model must have values, got a meta tensor",
        "config": "ValueError SecureAFL.from_config: config must be a Config, got dict",
    }.items():
        assert wrong[name] == words
        assert "rank 1 raised an error, see its own message; nothing has changed on any rank" in right[name]
    assert "rank 0 raised an error" in wrong["load"] and "FileNotFoundError" in right["load"]
    got = "got number 1 of the group on rank 0, number 2 of the group on rank 1; nothing has changed"
    for answers in (right, wrong):
        assert answers["dtype"].startswith("ValueError SecureAFL: settings must be the same on all ranks")
        assert f"ValueError SecureAFL.submit: server must be the same on all ranks, {got}" in answers["server"]
        for name in ("dtype", "shape", "list"):
            assert answers[f"gathered {name}"].startswith(
                "ValueError gather: tensor must be a tensor (.., d) whose dtype"
            )
        assert answers["after"] == "nothingnothing"
    assert "got (10006,) float32 on this one" in right["gathered list"]
    assert "got list on this one" in wrong["gathered list"]
    assert versions == others == (1, 1)


def fails_once(group, settings, arrivals, at, owner, name):
    """Rank 1 has too little memory in round `at`. What both are told then, and the state without slices afterwards."""
    server, answers, plain = start(settings, group), [], getattr(owner, name)

    def fails(*_):
        raise MemoryError("too little")

    for i, arrival in enumerate(arrivals):
        if i == at and dist.get_rank(group) == 1:
            setattr(owner, name, fails)
        try:
            replay(server, [arrival], group)
        except Exception as error:
            answers.append((i, f"{type(error).__name__} {error}"))
        finally:
            setattr(owner, name, plain)
        if i == at:
            after = server.version, digest(server._tensors(None))
    return answers, after, (server.version, digest(server._tensors(None)))


def uninterrupted(group, settings, arrivals):
    server = start(settings, group)
    replay(server, arrivals, group)
    return server.version, digest(server._tensors(None))


@pytest.mark.parametrize(
    ("kind", "owner", "name"),
    [
        ("steps", History, "remember"),
        ("steps", MeanSteps, "refresh"),
        ("support", History, "remember"),
        ("support", Support, "refresh"),
    ],
)
def test_a_rank_that_fails_in_a_round_with_a_refresh_undoes_it_on_all(ranks, kind, owner, name):
    settings = {**SETTINGS, **ROW_KINDS[kind]}
    arrivals, *_ = history_of_arrivals(settings, 2 * N)
    arrivals = [(client, update, 0) for client, update, _ in arrivals if update.isfinite().all()]
    arrivals = [(i % N, update, 0) for i, (_, update, _) in enumerate(2 * arrivals)][: 2 * N]
    settings = {**settings, "max_staleness": 99}
    right, wrong = ranks.run(2, fails_once, settings, arrivals, 2 * N - 1, owner, name)
    assert wrong[0] == [(2 * N - 1, "MemoryError too little")]
    assert [i for i, _ in right[0]] == [2 * N - 1] and "rank 1 raised an error, see its own message" in right[0][0][1]
    before = ranks.run(2, uninterrupted, settings, arrivals[:-1])
    assert [right[1], wrong[1]] == before  # versions, histories, the model: as if it had not been tried


def test_a_rank_that_misses_a_round_is_an_error_on_all_from_then_on(ranks):
    settings = {**SETTINGS, **ROW_KINDS["steps"]}
    arrivals, *_ = history_of_arrivals(settings, 6)
    right, wrong = ranks.run(2, fails_once, settings, arrivals, 4, History, "remember")
    words = "the server's version must be the same on all ranks, got 5 on rank 0, 4 on rank 1; a rank failed"
    assert wrong[0][0] == (4, "MemoryError too little")
    for answers in (right[0], wrong[0][1:]):
        assert [i for i, _ in answers] == [5]
        assert words in answers[0][1] and "load the last checkpoint on all of them" in answers[0][1]


def saves_to_a_folder(group, folder):
    server = start(SETTINGS, group)
    words = [told(lambda: server.save(folder / "here")) for _ in range(3)]
    server.save(folder / "file")
    return words


def test_a_save_that_cannot_be_ended_leaves_no_shards(ranks, tmp_path):
    (tmp_path / "here").mkdir()
    right, wrong = ranks.run(2, saves_to_a_folder, tmp_path)
    assert all("IsADirectoryError" in words for words in right) and all("rank 0 raised an error" in w for w in wrong)
    assert sorted(file.name.split(".")[0] for file in tmp_path.iterdir()) == ["file", "file", "file", "here"]
    assert SecureAFL.load(tmp_path / "file").version == 0


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


def interrupted(group, arrivals, at, name):
    """In round `at` a signal's handler raises an error right after this op has returned, on every rank."""
    server, plain = start(SETTINGS, group), getattr(torch.ops.secureafl, name)

    def and_a_signal(*arguments):
        plain(*arguments)
        raise Interrupted

    for i, arrival in enumerate(arrivals):
        if i == at:
            setattr(torch.ops.secureafl, name, and_a_signal)
        try:
            replay(server, [arrival], group)
        except Interrupted:
            pass
        finally:
            setattr(torch.ops.secureafl, name, plain)
    server._agree("estimates", {"version": server.version})  # ends the last round
    return server.version, digest(server._tensors(None))


@pytest.mark.parametrize("name", ["apply_", "renew_"])
def test_a_signal_after_an_op_of_a_split_round_leaves_it_whole(ranks, name):
    """After `apply_` the round is done; `renew_` ends the round before, when the next one has not begun."""
    arrivals, *_ = history_of_arrivals(SETTINGS, 3 * N)
    arrivals = [(client, update, 0) for client, update, _ in arrivals if update.isfinite().all()]
    arrivals = [(i % N, update, max(0, i - 3)) for i, (_, update, _) in enumerate(arrivals)]
    at = 2 * N
    kept = arrivals if name == "apply_" else arrivals[:at]
    assert ranks.run(2, interrupted, arrivals if name == "apply_" else arrivals[: at + 1], at, name) == ranks.run(
        2, interrupted, kept, -1, name
    )


def numpy_model(group):
    model = torch.zeros(D).numpy() if dist.get_rank(group) else shard(torch.zeros(D), group)
    return told(lambda: SecureAFL(model, N, process_group=group))


def test_a_numpy_array_on_one_rank_is_an_error_on_all_at_once(ranks):
    began = time.monotonic()
    right, wrong = ranks.run(2, numpy_model)
    assert time.monotonic() - began < 10
    assert "rank 1 raised an error" in right and "got ndarray" in wrong
