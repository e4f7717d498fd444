"""Audited: every call is in the log, and a server that is started again loses nothing."""

import os

import pytest
import torch
from audits import calls, lines, start
from engines import ENGINES, D, N, make, run
from killed_server import call
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext import defenses as other_servers
from secureafl_ext.audit import Audited, log, verify
from secureafl_ext.audit.facts import digest
from secureafl_ext.operate import Observer, Watched


@pytest.mark.parametrize("settings", [{}, {"spacing": 2}, {"rule": "support", "memory": 0}], ids=str)
def test_every_upload_has_its_line_before_the_receipt(tmp_path, settings):
    plain, random = make("fused", **settings), torch.Generator().manual_seed(1)
    with Audited(make("fused", **settings), tmp_path, weights=True) as server:
        server.name_client(4, "four\n\x1b[2J")
        for t in range(40):
            client, update = t * t % N, torch.randn(D, generator=random) * (torch.nan if t % 11 == 7 else 1)
            version = max(0, server.version - (9 if t % 13 == 12 else t % 3))
            told, receipt = plain.submit(client, update, version), server.submit(client, update, version)
            assert receipt.reason == told.reason
            line = lines(tmp_path)[-1]
            kind = receipt.reason.partition(":")[0].replace(" ", "_")
            assert (line.kind, line.client, line.trained_on, line.version) == (kind, client, version, plain.version)
            assert repr(line.factor) == repr(float(told.factor)) and line.weight == float(plain.weights()[client])
            assert (line.dtype, line.shape, line.who) == ("float32", (D,), "four  [2J" if client == 4 else "")
        assert {line.kind for line in lines(tmp_path)} >= {"accepted", "rejected", "stale"} | (
            {"too_soon"} if "spacing" in settings else set()
        )
        identical(server.server, plain)
        assert not (tmp_path / "updates").exists()
        assert verify(tmp_path, server.head).kinds["joined"] == 1


def test_watched_can_wrap_it(tmp_path):
    told = []

    class Notes(Observer):
        def verdicts(self, batch):
            told.extend(batch)

    with start(tmp_path) as server, Watched(server, [Notes()], every=0) as watched:
        run(watched, 10)
        watched.leave(1)
        watched.save(tmp_path / "checkpoint")
        assert watched.flush() and watched.recover() == 0
    uploads = lines(tmp_path, "accepted", "rejected", "leave")
    assert [verdict.client for verdict in told] == [line.client for line in uploads] and len(told) == 11


# The round of these is many torch ops.
SLOW = [engine for engine in ENGINES if engine.startswith("composed") or engine.endswith("buckets")]


@pytest.mark.parametrize("engine", [pytest.param(e, marks=[pytest.mark.slow] * (e in SLOW)) for e in ENGINES])
def test_recovered_is_bit_identical(tmp_path, engine):
    twin, path = make(engine), tmp_path / "checkpoint"
    calls(twin, 0, 30)
    with start(tmp_path, engine, rotate=4_000) as server:
        calls(server, 0, 10)
    with start(tmp_path, engine) as server:  # without a checkpoint, from the beginning
        assert server.recover() == 10
        calls(server, 10, 20)
        server.save(path)
        kept = len(list((tmp_path / "updates").iterdir()))
        calls(server, 20, 30)
    with Audited(SecureAFL.load(path), tmp_path, keep="recent") as server:
        assert kept == 0 and server.recover() == 10 and server.recover() == 0
        identical(server.server, twin)
        found = verify(tmp_path, server.head)
        assert found.kinds["recovered"] == 2 and found.files > 1
    assert digest(SecureAFL.load(path).state_dict()) == lines(tmp_path, "state")[-1].state


def test_other_servers_recover_too(tmp_path):
    def judge():
        return other_servers.make("kardam", torch.zeros(D), N, 0.1, 4, None)

    def work(server, first, last):
        for t in range(first, last):
            server.submit(t % N, torch.full((D,), 1 + t / 10), max(0, server.version - t % 3))

    with Audited(judge(), tmp_path, keep="all") as server:
        work(server, 0, 12)
        server.leave(2)  # it has no such method: the log alone knows
        for wrong in (server.leave, server.forget):  # nor does it check its clients
            with pytest.raises(ValueError, match=r"client must lie in 0\.\.4, got -1"):
                wrong(-1)
        server.forget(3)
        state = server.state_dict()
        work(server, 12, 20)
        before = server.server
    again = judge()
    with Audited(again, tmp_path, keep="all") as server:
        server.load_state_dict(state)
        assert server.recover() == 8
        identical(again, before)


def test_no_call_before_recover(tmp_path):
    with start(tmp_path) as server:
        calls(server, 0, 10)
    with start(tmp_path) as server:
        for method in (lambda: call(server, 10), server.state_dict, lambda: server.leave(0)):
            with pytest.raises(ValueError, match=r"has a log, call recover\(\) before any other call"):
                method()
        assert server.version == 0 and server.recover() == 10
        calls(server, 10, 11)


def test_a_state_that_the_log_does_not_name_is_refused(tmp_path):
    with start(tmp_path) as server:
        calls(server, 0, 5)
    other = make("fused")
    calls(other, 0, 3)
    with Audited(other, tmp_path) as server, pytest.raises(ValueError, match="names no state like the server's"):
        server.recover()


def test_a_new_log_begins_at_any_state(tmp_path):
    """A federation that is not audited from its beginning on; and one that was killed before its first call."""
    older = make("fused")
    calls(older, 0, 10)
    with start(tmp_path) as server:
        server.load_state_dict(older.state_dict())
        server.recover()
    with Audited(make("support"), tmp_path, keep="recent") as server:  # no call is in the log: nothing can be lost
        assert server.recover() == 0
        run(server, 3)
    assert [line.version for line in lines(tmp_path, "state")] == [older.version, 0]


def test_kept_updates(tmp_path):
    sizes = {}
    for keep in ("nothing", "recent", "all"):
        folder = tmp_path / keep
        with start(folder, keep=keep) as server:
            calls(server, 0, 40)
            server.submit(0, torch.ones(D), 0)  # stale: what it holds does not matter
            one = len(list((folder / "updates").iterdir())) if keep != "nothing" else 0
            server.save(tmp_path / "checkpoint")
            run(server, 5)
            after = list((folder / "updates").iterdir()) if keep != "nothing" else []
            assert all(path.stat().st_size == 4 * D for path in after)
            sizes[keep] = one, len(after)
            rounds, uploads = server.version - 5, len(lines(folder, "accepted", "rejected", "stale")) - 5
    assert sizes == {"nothing": (0, 0), "recent": (rounds, 5), "all": (uploads, uploads + 5)} and uploads > rounds


def test_a_state_that_was_not_saved_keeps_the_updates(tmp_path):
    """Killed between `state_dict` and the file: the older checkpoint must still be enough."""
    path = tmp_path / "checkpoint"
    with start(tmp_path) as server:
        calls(server, 0, 10)
        server.save(path)
        calls(server, 10, 20)
        before = server.state_dict()["version"]
        server.state_dict()  # the same state is named once
        calls(server, 20, 22)
        server.checkpointed(before - 1)  # no state of that version was given out: nothing goes
        twin = server.server
    assert len(lines(tmp_path, "state")) == 3
    with Audited(SecureAFL.load(path), tmp_path, keep="recent") as server:
        assert server.recover() == 12
        identical(server.server, twin)


def test_what_is_not_kept_is_given_up_and_the_log_says_so(tmp_path):
    path = tmp_path / "checkpoint"
    with start(tmp_path, keep="nothing") as server:
        calls(server, 0, 10)
        server.save(path)
        calls(server, 10, 30)
    with (
        Audited(SecureAFL.load(path), tmp_path, keep="recent") as server,
        pytest.raises(ValueError, match=r"the update of line \d+ is not kept; .* recover\(give_up=True\)"),
    ):
        server.recover()
    with Audited(SecureAFL.load(path), tmp_path, keep="nothing") as server:
        assert server.recover() == 0
        calls(server, 30, 40)
        server.save(path)
        calls(server, 40, 45)
    with Audited(SecureAFL.load(path), tmp_path, keep="recent") as server:
        server.recover(give_up=True)
        calls(server, 50, 60)
        twin = server.server
    assert [line.count for line in lines(tmp_path, "resumed")] == [20, 5]
    with Audited(SecureAFL.load(path), tmp_path, keep="recent") as server:
        assert server.recover() == 10  # those after the last one, not those that were given up
        identical(server.server, twin)


def test_a_damaged_update_is_refused(tmp_path):
    with start(tmp_path, keep="all") as server:
        calls(server, 0, 10)
    kept = sorted((tmp_path / "updates").iterdir())
    kept[3].write_bytes(bytes(4 * D))
    with start(tmp_path) as server:
        with pytest.raises(ValueError, match=r"expected the 28 bytes whose hash line \d+ has, got others"):
            server.recover()
        with pytest.raises(ValueError, match="call recover"):
            call(server, 10)
    kept[3].write_bytes(bytes(10**6))
    with start(tmp_path) as server, pytest.raises(ValueError, match="expected at most 28 bytes"):
        server.recover()


def test_a_full_disk_stops_the_server_before_it_forgets(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with start(tmp_path) as server:
        calls(server, 0, 10)
        state, twin = server.state_dict(), make("fused")
        calls(twin, 0, 10)
        with monkeypatch.context() as patch:
            patch.setattr(server._updates, "put", full)  # no room for the update: there is no round
            with pytest.raises(OSError, match="No space left"):
                server.submit(0, torch.ones(D), server.version)
        identical(server.server, twin)
        server.submit(0, torch.ones(D), server.version)
        with monkeypatch.context() as patch:
            patch.setattr(log, "write_all", full)  # no room for the line: the server is ahead
            with pytest.raises(OSError, match="No space left"):
                server.submit(1, torch.ones(D), server.version)
        ahead = "the server is ahead of its log; load a checkpoint and call recover"
        calls_ = (lambda: server.leave(0), server.recover, lambda: server.submit(1, torch.ones(D), server.version))
        for again in calls_:
            with pytest.raises(ValueError, match=ahead):
                again()
        with pytest.raises(ValueError, match="state must have clock"):
            server.load_state_dict({})  # refused, so the server is still ahead
        for again in calls_:
            with pytest.raises(ValueError, match=ahead):
                again()
        server.load_state_dict(state)
        assert server.recover() == 1 and server.version == lines(tmp_path, "recovered")[-1].version
        twin.submit(0, torch.ones(D), twin.version)
        identical(server.server, twin)


def test_refused_calls_leave_no_line(tmp_path):
    with start(tmp_path) as server:
        server.submit(0, torch.ones(D), 0)
        head = server.head
        for wrong in (
            lambda: server.submit(9, torch.ones(D), 0),
            lambda: server.submit(0, torch.ones(D + 1), 0),
            lambda: server.submit(0, torch.ones(D).double(), 0),
            lambda: server.submit(0, [1.0] * D, 0),
            lambda: server.submit(0, torch.ones(D).to_sparse(), 0),
            lambda: server.submit(0, torch.ones(D).to_mkldnn(), 0),
            lambda: server.submit(0, torch.ones(D), 5),
            lambda: server.forget(-1),
            lambda: server.leave(N),
            lambda: server.name_client(N, "x"),
            lambda: server.enqueue(None, None, None),
        ):
            with pytest.raises(ValueError):
                wrong()
        assert server.head == head and len(list((tmp_path / "updates").iterdir())) == 1
        server.submit(1, torch.ones(D), 1)
        assert not server.capturable and lines(tmp_path)[-1].client == 1


def test_an_update_in_another_layout_is_named(tmp_path):
    with start(tmp_path) as server:
        expected = rf"Audited.submit: update must be a dense tensor \({D},\) float32, got \({D},\) float32 "
        for wrong, name in ((torch.ones(D).to_sparse(), "sparse_coo"), (torch.ones(D).to_mkldnn(), "_mkldnn")):
            with pytest.raises(ValueError, match=f"{expected}{name}$"):
                server.submit(0, wrong, 0)
        server.submit(0, torch._neg_view(torch.ones(D)), 0)  # dense, with a sign that is not in its memory yet
    assert (tmp_path / "updates" / "000000000003.bin").read_bytes() == (-torch.ones(D)).numpy().tobytes()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"keep": "some"}, "keep must be one of nothing, recent, all, got 'some'"),
        ({"rotate": 100}, "rotate must be a whole number of bytes, 1024 or more, got 100"),
        ({"rotate": "1 MB"}, "rotate must be a whole number of bytes, 1024 or more, got '1 MB'"),
    ],
)
def test_wrong_settings(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        start(tmp_path, **settings)


def test_sync_waits_for_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    with start(tmp_path, sync=True) as server:
        server.state_dict()
        synced.clear()
        server.submit(0, torch.ones(D), 0)
    assert [os.path.basename(path) for path in synced] == ["000000000003.bin", "updates", "audit-000000.jsonl"]


@pytest.mark.parametrize("call", ["save", "leave", "submit", "state_dict", "forget"])
def test_a_handler_cannot_call_into_a_call(tmp_path, monkeypatch, call):
    """It would take the place in the log under which the update of the call that it interrupts is kept."""
    judge = Audited(make("fused"), tmp_path / "log", keep="recent")
    inner, told, ones = judge.server.submit, [], torch.ones(len(judge.model))
    arguments = {"save": (tmp_path / "file",), "submit": (2, ones, 0), "state_dict": ()}.get(call, (1,))

    def with_a_signal(*upload):
        try:
            getattr(judge, call)(*arguments)
        except RuntimeError as error:
            told.append(str(error))
        return inner(*upload)

    monkeypatch.setattr(judge.server, "submit", with_a_signal)
    judge.submit(0, ones, 0)
    judge.submit(1, ones, 1)
    assert told == 2 * [told[0]] and told[0].startswith(f"Audited.{call}: another call of this thread must have")
    end = judge.server.state_dict()
    judge.close()
    with Audited(make("fused"), tmp_path / "log", keep="recent") as again:
        assert again.recover() == 2
        assert all(torch.equal(torch.as_tensor(again.state_dict()[k]), torch.as_tensor(v)) for k, v in end.items())


def test_an_error_of_a_handler_after_the_round_is_no_refusal(tmp_path, monkeypatch):
    with Audited(make("fused"), tmp_path, keep="recent") as judge:
        inner, ones = judge.server.submit, torch.ones(len(judge.model))

        def and_a_signal(*upload):
            inner(*upload)
            raise ValueError("of a handler")

        with monkeypatch.context() as patch:
            patch.setattr(judge.server, "submit", and_a_signal)
            with pytest.raises(ValueError, match="of a handler"):
                judge.submit(0, ones, 0)
        with pytest.raises(ValueError, match="ahead of its log"):
            judge.submit(1, ones, 1)
