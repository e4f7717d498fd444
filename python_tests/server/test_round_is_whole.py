"""A round is done as a whole or not at all, whatever interrupts it: a signal between any two lines, or too little
memory."""

import signal
import sys
import threading

import pytest
import torch

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.engines.history import History
from secureafl_ext.rules.mean_steps import MeanSteps

SIZE, CLIENTS, ROUNDS = 70, 4, 9
STEPS = RECOMMENDED | {"quorum": 0.0, "trial": 2}
KINDS = {
    "fused": {},
    "spacing": {"spacing": 2, "factors": "pooled"},
    "a float32 model": {"history_dtype": torch.float64, "memory": 1},
    "pairs of rounds": {"pairs": "rounds", "memory": 1},
    "kinship": {"rule": "kinship", "memory": 0},
    "kinship of plain ops": {"rule": "kinship", "memory": 0, "history_dtype": torch.float64},
    "support of plain ops": {"rule": "support", "memory": 0, "history_dtype": torch.float64},
    "steps": STEPS,
    "steps of plain ops": STEPS | {"history_dtype": torch.float64},
    "sketch": STEPS | {"sketch": 64, "sketch_seed": 3},
    "sketch of plain ops": STEPS | {"sketch": 64, "sketch_seed": 3, "history_dtype": torch.float64},
}


class Interrupted(BaseException):
    """As KeyboardInterrupt: no `except Exception` holds it up."""


def make(kind):
    return SecureAFL(torch.zeros(SIZE), CLIENTS, **KINDS[kind])


def submit(server, i):
    update = torch.randn(SIZE, generator=torch.Generator().manual_seed(i))
    return server.submit(i % CLIENTS, update, server.version)


def state_of(server):
    """What decides the next rounds. A row of `models` that is no longer kept does not."""
    state = server.state_dict()
    rows = len(state["models"])
    kept = [version % rows for version in range(max(0, server.version - rows + 2), server.version + 1)]
    host = vars(server._trials).get("_done") if server._trials else 0  # not in a state, and follows from it
    return {**state, "models": state["models"][kept], "host": host}


def differing(one, other):
    return [name for name, value in one.items() if not torch.equal(*map(torch.as_tensor, (value, other[name])))]


def interrupted(server, i, place):
    """Raise an error at the place-th moment of a round at which Python runs handlers of signals: when a function of
    Python begins, and when one of C has returned. False if the round has no such moment."""
    moments = 0

    def profile(frame, event, function):
        nonlocal moments
        moments += event in ("call", "c_return") and function is not sys.setprofile
        if moments == place:
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(profile)
    try:
        submit(server, i)
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i", [2, 7], ids=["first contact", "refresh"])
def test_a_round_that_a_signal_interrupts_is_whole_or_none(kind, i):
    before, after = make(kind), make(kind)
    for server, rounds in ((before, i), (after, i + 1)):
        for k in range(rounds):
            submit(server, k)
    start, ends = before.state_dict(), [state_of(before), state_of(after)]
    place, server = 0, make(kind)
    while True:
        place += 1 if place < 30 else 11  # not every moment of a long round
        server.load_state_dict(start)
        if not interrupted(server, i, place):
            break
        found = [differing(state_of(server), end) for end in ends]
        assert [] in found, (place, min(found, key=len))
        if place % 20 == 1:  # and it goes on as a server that was not interrupted
            while server.version < ROUNDS:
                submit(server, server.version)
            whole = make(kind)
            for k in range(ROUNDS):
                submit(whole, k)
            assert not differing(state_of(server), state_of(whole)), place
    assert place > 20


@pytest.mark.parametrize(
    ("kind", "owner", "name"),
    [
        *(("sketch", MeanSteps, "refresh"), ("steps of plain ops", MeanSteps, "refresh")),
        *(("steps of plain ops", History, "remember"), ("kinship of plain ops", History, "remember")),
        *(("a float32 model", History, "push"), ("pairs of rounds", History, "remember")),
    ],
)
def test_a_round_without_memory_changes_nothing(kind, owner, name, monkeypatch):
    server = make(kind)
    for i in range(7):
        submit(server, i)
    before = server.state_dict()

    def fails(*_):
        raise MemoryError("too little")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(MemoryError, match="too little"):
            submit(server, 7)
    assert not differing(before, server.state_dict())
    whole = make(kind)
    for one in (server, whole):
        while one.version < ROUNDS:
            submit(one, one.version)
    assert not differing(state_of(server), state_of(whole))


CALLS = {
    "save": lambda server, path: server.save(path),
    "state_dict": lambda server, path: server.state_dict(),
    "submit": lambda server, path: submit(server, 1),
    "forget": lambda server, path: server.forget(1),
    "leave": lambda server, path: server.leave(1),
    "lr": lambda server, path: setattr(server, "lr", 0.5),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_handler_cannot_call_into_a_round(call, tmp_path, monkeypatch):
    """It would find the history of one version and the model of another, and save them as a checkpoint."""
    server, path = make("fused"), tmp_path / "server"
    for i in range(5):
        submit(server, i)
    server.save(path)
    saved, before = path.read_bytes(), server.state_dict()
    plain = server._engine.round

    def round_with_a_signal(*arguments):
        outcome = plain(*arguments)
        signal.raise_signal(signal.SIGUSR1)
        return outcome

    old = signal.signal(signal.SIGUSR1, lambda *_: CALLS[call](server, path))
    try:
        monkeypatch.setattr(server._engine, "round", round_with_a_signal)
        with pytest.raises(RuntimeError, match=f"SecureAFL.{call}: another call of this thread must have returned"):
            submit(server, 5)
        monkeypatch.undo()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert path.read_bytes() == saved
    assert server.version == 6 and differing(before, server.state_dict())  # the round was done already
    whole = make("fused")
    for i in range(6):
        submit(whole, i)
    assert not differing(state_of(server), state_of(whole))


def test_a_handler_that_saves_does_not_wait_for_a_thread_that_waits_for_it(tmp_path):
    """A thread in `save` waits for the call of the main thread to end; the handler within that call must not wait for
    the thread's `save`."""
    server, told = make("fused"), []
    engine, plain = server._engine, server._engine.round
    saver = threading.Thread(target=lambda: server.save(tmp_path / "thread"), daemon=True)

    def round_with_a_signal(*arguments):
        saver.start()
        while server._save_lock.acquire(blocking=False):  # until the thread holds it
            server._save_lock.release()
        try:
            server.save(tmp_path / "handler")
        except RuntimeError as error:
            told.append(str(error))
        return plain(*arguments)

    engine.round = round_with_a_signal
    main = threading.Thread(target=lambda: submit(server, 0), daemon=True)
    main.start()
    main.join(20)
    saver.join(20)
    assert not main.is_alive() and not saver.is_alive()
    assert len(told) == 1 and SecureAFL.load(tmp_path / "thread").version == 1


def test_what_is_no_path_is_refused_in_words():
    with pytest.raises(ValueError, match=r"^SecureAFL.save: path must be a str or os.PathLike, got NoneType$"):
        make("fused").save(None)
    with pytest.raises(ValueError, match=r"^SecureAFL.load: path must be a str or os.PathLike, got int$"):
        SecureAFL.load(7)


def test_what_is_no_config_is_refused_in_words():
    with pytest.raises(ValueError, match=r"^SecureAFL.from_config: config must be a Config, got dict$"):
        SecureAFL.from_config(torch.zeros(4), 2, {})


def test_a_round_without_memory_half_way_is_the_servers_last(tmp_path, monkeypatch):
    """The op of a fused round on a CPU allocates memory after it has judged. No model of an older version may follow,
    and no checkpoint be replaced."""
    server, path = make("fused"), tmp_path / "server"
    for i in range(14):
        submit(server, i)
    server.save(path)
    saved, good, model = path.read_bytes(), server.state_dict(), server.model.clone()

    def half(*_):
        server._engine.counts[0] += 1
        raise MemoryError("std::bad_alloc")

    with monkeypatch.context() as patch:
        patch.setattr(server._engine, "round", half)
        with pytest.raises(MemoryError):
            submit(server, 14)
    assert server.version == 14 and torch.equal(server.model, model)
    for name, call in CALLS.items():
        with pytest.raises(RuntimeError, match=rf"SecureAFL.{name}: the last round must be whole.*load the last"):
            call(server, path)
    assert path.read_bytes() == saved
    server.load_state_dict(good)
    submit(server, 14)
    whole = make("fused")
    for i in range(15):
        submit(whole, i)
    assert not differing(state_of(server), state_of(whole))


@pytest.mark.parametrize("kind", ["fused", "kinship of plain ops", "a float32 model"])
def test_an_error_before_a_round_is_none_after_one_that_could_not_be_settled(kind, monkeypatch):
    """A count of rounds that is once wrong must not make later errors look like rounds."""
    server = make(kind)
    for i in range(6):
        submit(server, i)
    server._engine.counts[0] += 1  # as after an `enqueue` that was interrupted
    version, model = server.version, server.model.clone()

    def fails(*_):
        raise OSError("before the op")

    monkeypatch.setattr(server._engine, "round", fails)
    with pytest.raises(OSError):
        submit(server, 6)
    assert server.version == version and torch.equal(server.model, model)
