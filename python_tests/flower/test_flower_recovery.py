"""A Flower loop whose audit log cannot be written, or does not fit: nobody is lost, and nothing changes half-way."""

import errno
import shutil

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import honest, server, simulated, start
from states import identical

from secureafl_ext.audit import Audited, log, verify
from secureafl_ext.operate import Watched

FLEET = {9: honest(1.0, 0.1, 1), 8: honest(1.2, 0.1, 2), 7: honest(1.1, 0.1, 3)}


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


@pytest.fixture
def full(monkeypatch):
    """Call it with a number: the disk is full once so many lines of this kind have been written."""
    append, left = log.Log.append, {}

    def may_fail(self, kind, **fields):
        if kind in left:
            if not left[kind]:
                raise OSError(errno.ENOSPC, "No space left on device")
            left[kind] -= 1
        return append(self, kind, **fields)

    monkeypatch.setattr(log.Log, "append", may_fail)
    return left


def audited(folder, **settings):
    return Audited(server(), folder, **{"keep": "recent", **settings})


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_node_whose_line_cannot_be_written_joins_in_the_next_run(clock, tmp_path, full, first):
    with audited(tmp_path) as judge:
        one, _, _ = start(FLEET, clock, judge)
        full["joined"] = first
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                one.run(5)
        assert len(one.slots.of) == first == len(judge.names) == one.totals().get("joined", 0)
        full.clear()
        one.run(60)
        assert sorted(one.slots.of.values()) == [0, 1, 2] and one.turns.gap() == 1
        assert all(one.tally[node]["joined"] == 1 and one.tally[node]["accepted"] > 15 for node in FLEET)
        assert judge.names == {slot: str(node) for node, slot in one.slots.of.items()}
    assert verify(tmp_path).kinds["joined"] == 3


def test_a_newcomer_whose_line_cannot_be_written_takes_the_slot_in_the_next_run(clock, tmp_path, full):
    with audited(tmp_path) as judge:
        one, grid, _ = start(FLEET, clock, judge)
        one.run(9)
        slot = one.slots.of[8]
        grid.nodes = {9: FLEET[9], 7: FLEET[7], 5: honest(1.3)}
        full["joined"] = 0
        with pytest.raises(OSError, match="No space left"):
            one.run(30)
        assert one.slots.of[8] == slot and 8 in one.slots.away and 5 not in one.slots.of and 8 in one.tally
        full.clear()
        one.run(40)
        assert one.slots.of[5] == slot and 8 not in one.slots.of
        assert 8 not in one.tally and one.tally[5]["accepted"] > 3
        kept, tally = dict(one.slots.of), {node: one.tally[node]["accepted"] for node in (9, 7, 5)}
    with audited(tmp_path) as judge:  # the log says the same
        again, _, _ = start(FLEET, clock, judge)
        assert again.slots.of == kept and {node: again.tally[node]["accepted"] for node in kept} == tally


def test_a_name_whose_line_cannot_be_written_is_not_taken(tmp_path, full):
    with Audited(server(), tmp_path) as judge:
        judge.name_client(0, "old")
        full["joined"] = 0
        for client in (0, 1):
            with pytest.raises(OSError, match="No space left"):
                judge.name_client(client, "new")
        assert judge.names == {0: "old"}
        judge.submit(0, torch.ones(14), 0)
    assert [line.who for line in log.read(tmp_path) if line.kind == "accepted"] == ["old"]


def test_an_update_that_cannot_be_kept_loses_no_node(clock, tmp_path, monkeypatch):
    with audited(tmp_path) as judge:
        one, _, _ = start(FLEET, clock, judge)
        one.run(5)
        with monkeypatch.context() as patch:
            patch.setattr(judge._updates, "put", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(OSError, match="full"):
                one.run(20)
        one.run(50)
        assert min(one.tally[node]["accepted"] for node in FLEET) > 13


# Checkpoints that the log refuses


def further(one, rounds):
    """Without another checkpoint."""
    path, one.path = one.path, None
    one.run(one.server.version + rounds)
    one.path = path


def of_another_log(one, other):
    """The checkpoint of a loop with a log of its own."""
    shutil.copy(other.path, one.path)


def of_a_name_that_is_no_node(one, other):
    """Given after the checkpoint: the log is refused between two of its calls."""
    further(one, 3)
    one.server.name_client(1, "Mallory")
    further(one, 3)


def with_updates_that_are_gone(one, other):
    further(one, 3)
    for update in (one.server.folder / "updates").iterdir():
        update.unlink()


def with_another_update(one, other):
    """The last but one: the difference shows when half of the calls are repeated."""
    further(one, 6)
    last = sorted((one.server.folder / "updates").iterdir())[-2]
    last.write_bytes(bytes(len(last.read_bytes())))


REFUSED = {
    of_another_log: "names no state like the server's",
    of_a_name_that_is_no_node: "expected a node id and a slot below 3",
    with_updates_that_are_gone: "is not kept",
    with_another_update: "expected the 56 bytes whose hash line",
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("how", REFUSED, ids=lambda how: how.__name__)
def test_a_checkpoint_that_the_log_refuses_changes_nothing(clock, tmp_path, how, watched):
    path = tmp_path / "loop.safetensors"
    with audited(tmp_path / "other") as judge:
        other, _, _ = start(FLEET, clock, judge, checkpoint=tmp_path / "other.safetensors")
        other.run(10)
    with audited(tmp_path / "one") as judge, Watched(judge, [], every=0) as outer:
        one, _, _ = start({9: FLEET[9], 8: FLEET[8]}, clock, outer if watched else judge, checkpoint=path, every=5)
        one.run(5)
        how(one, other)
        before = judge.server.state_dict()
        kept = dict(one.slots.of), dict(one.slots.away), dict(one.tally), dict(judge.names)
        with pytest.raises(ValueError, match=f"Loop.load: .*{REFUSED[how]}"):
            one.load()
        assert one.server.version == before["version"]
        after = judge.server.state_dict()
        assert all(torch.equal(torch.as_tensor(after[name]), torch.as_tensor(before[name])) for name in before)
        assert kept == (one.slots.of, one.slots.away, one.tally, judge.names)
        one.path = None
        one.run(one.server.version + 20)  # it takes calls as before
        assert one.server.version == before["version"] + 20
    assert verify(tmp_path / "one").kinds["recovered"] == 1


def test_a_new_loop_with_a_checkpoint_that_the_log_refuses_leaves_the_server_as_it_was(clock, tmp_path):
    path = tmp_path / "loop.safetensors"
    with audited(tmp_path / "other") as judge:
        other, _, _ = start(FLEET, clock, judge, checkpoint=path)
        other.run(10)
    with audited(tmp_path / "one") as judge:
        one, _, _ = start(FLEET, clock, judge)
        one.run(7)
        end = judge.server.state_dict()
    with audited(tmp_path / "one") as judge:
        with pytest.raises(ValueError, match=r"Loop\.load: .*names no state like the server's"):
            start(FLEET, clock, judge, checkpoint=path)
        identical(judge.server, server())
        start(FLEET, clock, judge)  # from the beginning of the log
        assert all(
            torch.equal(torch.as_tensor(judge.server.state_dict()[k]), torch.as_tensor(v)) for k, v in end.items()
        )
