"""An audited Flower loop that is killed between two events goes on with the same slots, counts and state."""

import random

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import LR, honest, says, server, simulated, start
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext.audit import Audited, log, verify
from secureafl_ext.cli.main import main
from secureafl_ext.operate import Watched

FLEET = {2**63 + 9: honest(1.0, 0.1, 1), 8: honest(1.6, 0.1, 2), 7: says(2)}


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


class Killed(BaseException):
    """Like a kill, no part of the loop handles it."""


def killed_at(loop, number):
    """Run until event `number` is told, and then no further: the loop and its log are left as they are."""
    events = []

    def watch(event):
        events.append(event)
        if len(events) == number:
            raise Killed

    loop.watch = watch
    with pytest.raises(Killed):
        loop.run(10**6)


def audited(folder, plain=None, **settings):
    return Audited(plain or server(), folder, **{"keep": "recent", **settings})


@pytest.mark.parametrize("number", [2, 5, 31, 64, 90])
def test_killed_between_two_events(clock, tmp_path, number):
    path = tmp_path / "loop.safetensors"
    first = audited(tmp_path)
    one, grid, _ = start(FLEET, clock, first, checkpoint=path, every=10)
    grid.nodes = dict(list(FLEET.items())[:2])  # the third joins after the first checkpoint
    one.run(12)
    grid.nodes = FLEET
    killed_at(one, number)
    first.close()
    again, _, _ = start(FLEET, clock, audited(tmp_path), checkpoint=path, every=10)
    identical(again.server.server, first.server)
    assert again.slots.of == one.slots.of == {2**63 + 9: 0, 8: 1, 7: 2}
    for kind in ("accepted", "rejected", "joined", "left", "stale"):
        for node in FLEET:
            assert again.tally.get(node, {}).get(kind, 0) == one.tally[node][kind], (node, kind)
    again.run(again.server.version + 20)
    again.server.close()
    assert verify(tmp_path).kinds["recovered"] == 1
    final, _, _ = start(FLEET, clock, audited(tmp_path), checkpoint=path, every=10)
    identical(final.server.server, again.server.server)
    final.server.close()


def test_nodes_that_come_and_go_keep_their_slots(clock, tmp_path):
    """More nodes than slots, and a kill after every few events: who has which slot is what the loop had."""
    path, dice, nodes = tmp_path / "loop.safetensors", random.Random(3), {}
    kept = None
    for _ in range(12):
        judge = audited(tmp_path, rotate=5_000)
        loop, grid, _ = start({}, clock, judge, checkpoint=path, every=7)
        if kept:
            assert (loop.slots.of, judge.version) == kept[:2]
            assert set(loop._missing) == kept[2]  # those that were present when it was killed
            identical(judge.server, kept[3])
        nodes = {node: honest(1.0 + node / 10, 0.1, node) for node in dice.sample(range(1, 7), 3)}
        grid.nodes = nodes
        killed_at(loop, dice.randint(3, 25))
        kept = dict(loop.slots.of), judge.version, set(loop.slots.present) | loop._missing, judge.server
        judge.close()
    kinds = verify(tmp_path).kinds
    assert kinds["forget"] and kinds["leave"] and kinds["joined"] > 12 and kinds["recovered"] == 11


def test_a_start_model_drawn_at_random_is_recovered_too(clock, tmp_path):
    path = tmp_path / "loop.safetensors"

    def drawn():
        return SecureAFL(torch.randn(14), 3, lr=LR, max_staleness=50, quantile=1.0)

    first = audited(tmp_path, drawn())
    one, _, _ = start(FLEET, clock, first, checkpoint=path, every=100)
    killed_at(one, 15)
    first.close()
    assert 0 < first.version < 100
    with audited(tmp_path, drawn()) as judge:
        again, _, _ = start(FLEET, clock, judge, checkpoint=path)
        identical(again.server.server, first.server)


def test_without_a_checkpoint_the_whole_log_is_repeated(clock, tmp_path):
    first = audited(tmp_path)
    one, _, _ = start(FLEET, clock, first)
    killed_at(one, 25)
    first.close()
    with audited(tmp_path) as judge:
        again, _, _ = start(FLEET, clock, judge)
        identical(judge.server, first.server)
        assert again.slots.of == one.slots.of


def test_checkpoints_let_older_updates_go(clock, tmp_path):
    path, sizes = tmp_path / "loop.safetensors", []
    with audited(tmp_path) as judge, Watched(judge, [], every=0) as watched:
        one, _, _ = start(FLEET, clock, watched, checkpoint=path, every=10)
        one.watch = lambda event: sizes.append(len(list((tmp_path / "updates").iterdir()))) if event.version else None
        one.run(55)
        assert max(sizes) == 10 and not list((tmp_path / "updates").iterdir())
        who = {line.client: line.who for line in log.read(tmp_path) if line.kind == "accepted"}
        assert who == {0: str(2**63 + 9), 1: "8"}


def test_the_command_replays_a_loop(clock, tmp_path, capsys):
    path = tmp_path / "loop.safetensors"
    with audited(tmp_path, keep="all") as judge:
        one, _, _ = start(FLEET, clock, judge, checkpoint=path, every=20)
        killed_at(one, 60)
        version = judge.version
    assert version % 20
    assert main(["audit", "replay", str(tmp_path), "--checkpoint", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{version % 20} uploads decided again, all equal" in said and f"version  {version}\n" in said


def test_a_log_that_does_not_fit_is_refused(clock, tmp_path):
    path = tmp_path / "loop.safetensors"
    with audited(tmp_path / "one") as judge:
        one, _, _ = start(FLEET, clock, judge, checkpoint=path)
        one.run(5)
    with audited(tmp_path / "two") as judge:  # a log of something else
        judge.submit(0, torch.ones(14), 0)
    with (
        audited(tmp_path / "two") as judge,
        pytest.raises(ValueError, match=r"Loop\.load: .*names no state like the server's"),
    ):
        start(FLEET, clock, judge, checkpoint=path)
    with audited(tmp_path / "one") as judge:
        judge.load_state_dict(one.server.server.state_dict())
        judge.recover()
        judge.name_client(1, "Mallory")
    with audited(tmp_path / "one") as judge, pytest.raises(ValueError, match="expected a node id and a slot below 3"):
        start(FLEET, clock, judge, checkpoint=path)


def test_a_server_that_is_not_audited_is_as_before(clock, tmp_path):
    one, _, _ = start(FLEET, clock, checkpoint=tmp_path / "loop.safetensors")
    assert one.audit is not one.server and not (tmp_path / "loop.safetensors").exists()
