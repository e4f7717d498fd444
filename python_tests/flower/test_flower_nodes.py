"""Nodes that join, leave, fall silent and come back: who holds a slot of the loop, and who is asked when."""

from itertools import count

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import honest, kinds, of_flower, says, server, simulated, start

from secureafl_ext.flower.slots import Slots


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


@pytest.mark.parametrize("how", ["its node is gone", "Flower says so"])
def test_a_leave_that_fails_is_told_in_the_next_run(clock, how):
    one, grid, _ = start({9: honest(), 8: honest(), 7: honest()}, clock)
    told, calls = [], count(1)

    def fails_once(client):
        if next(calls) == 1:
            raise OSError("the disk is full")
        told.append(client)

    one.server.leave = fails_once
    one.run(6)
    if how == "its node is gone":
        del grid.nodes[8]
    else:
        grid.nodes[8] = says(of_flower(5), 0.5)
        one.run(8)
    with pytest.raises(OSError, match="the disk is full"):
        one.run(30)
    grid.nodes.pop(8, None)
    assert told == [] and 8 in one._missing and one.turns.gap() == 0
    one.run(40)
    assert told == [one.slots.of[8]] and not one._missing and 8 in one.slots.away
    grid.nodes[8] = honest()
    one.run(60)
    assert one.turns.gap() == 1 and one.tally[8]["joined"] == 2


def test_a_client_that_recovers_is_no_longer_made_to_wait(clock):
    answers = iter([2, 2, 2, None, 2])

    def shaky(message):
        code = next(answers, None)
        return honest()(message) if code is None else [(1.0, code)]

    one, grid, events = start({9: shaky}, clock)
    one.run(5)
    assert kinds(events, 9) == ["joined", *["failed"] * 3, "accepted", "failed", *["accepted"] * 4]
    waits = np.diff([when for when, _, _ in grid.pushed])
    assert waits[2] > 1.3 and waits[3:].max() < 1.3  # after the second breakdown as short as after the first


@pytest.mark.parametrize("expires", [True, False])
def test_who_vanishes_is_noticed_when_its_ttl_has_passed(clock, expires):
    """Whether the grid says so, as Flower's do, or nothing ever comes."""
    one, grid, events = start({9: honest(), 666: lambda message: []}, clock, ttl=5.0, expires=expires)
    one.run(60)
    assert kinds(events, 666)[:3] == ["joined", "vanished", "vanished"]
    assert 666 not in {sent.node for sent in one.open.values() if sent.deadline < clock.now}
    assert one.tally[9]["accepted"] == 60
    first, second = [when for when, node, _ in grid.pushed if node == 666][:2]
    assert 5.0 <= second - first < 6.0


def test_clients_join_and_leave_and_come_back(clock):
    one, grid, events = start({9: honest(), 8: honest()}, clock)
    one.run(6)
    del grid.nodes[8]
    one.run(12)
    assert kinds(events, 8)[-1] == "left" and all(sent.node != 8 for sent in one.open.values())
    grid.nodes |= {8: honest(), 7: honest()}
    one.run(30)
    assert kinds(events, 8).count("joined") == 2 and one.slots.of == {9: 0, 8: 1, 7: 2}
    assert "accepted" in kinds(events, 7) and one.server.seen.tolist() == [True] * 3
    after = [event for event in events if event.node == 8]
    back = max(i for i, event in enumerate(after) if event.kind == "joined")
    assert after[back + 1].reason != "accepted: first contact"  # it is known


def test_an_error_reply_that_the_node_is_gone_counts_as_leaving(clock):
    one, grid, events = start({9: honest(), 8: says(of_flower(5))}, clock)
    one.run(2)
    assert kinds(events, 8)[:2] == ["joined", "left"] and events[-1].slot is not None
    del grid.nodes[8]
    one.run(8)
    assert kinds(events, 8).count("left") <= 3 and one.tally[9]["accepted"] == 8


def test_who_claims_to_have_left_is_asked_ever_more_rarely(clock):
    """Flower's own error code in a reply of the node's: what Flower alone can know, no node is believed."""
    one, grid, events = start({9: honest(1.0), 8: honest(1.3), 6: says(5, 0.01)}, clock)
    one.run(200)
    assert set(kinds(events, 6)) == {"joined", "failed"} and 6 in one.slots.present
    asked = [when for when, node, _ in grid.pushed if node == 6]
    assert clock.now > 100 and len(asked) < 13


def test_who_really_leaves_and_comes_back_is_asked_at_once(clock):
    """It answers nothing before it goes, time and again."""
    one, grid, _ = start({9: honest(), 8: honest(100.0)}, clock, ttl=200.0)
    for rounds in range(3, 60, 6):
        one.run(rounds)
        node = grid.nodes.pop(8)
        one.run(rounds + 3)
        grid.nodes[8], back = node, clock.now
        one.run(rounds + 5)
        assert any(when - back < 1.5 for when, asked, _ in grid.pushed if asked == 8 and when >= back)
    assert set(one.tally[8]) == {"joined", "left"}


def test_with_all_slots_taken_a_newcomer_waits_for_one_who_leaves(clock):
    one, grid, events = start({9: honest(), 8: honest(), 7: honest()}, clock, server(clients=2))
    one.run(10)
    assert kinds(events, 7) == ["waiting"]
    assert "all 2 slots are taken" in next(event.reason for event in events if event.node == 7)
    del grid.nodes[9]
    one.run(20)
    assert kinds(events, 7)[:2] == ["waiting", "joined"] and one.slots.of == {8: 1, 7: 0}
    mine = [event for event in events if event.node == 7][1:]
    assert mine[0].reason == "takes the slot of node 9, which is forgotten"
    assert mine[1].reason == "accepted: first contact"  # what was known of node 9 is not held against it
    assert 9 not in one.tally and one.tally[None]["accepted"] > 0
    grid.nodes[9] = honest()
    one.run(25)
    assert kinds(events, 9)[-1] == "waiting"


def test_the_longest_away_loses_its_slot_first():
    slots = Slots(3)
    assert [slots.admit(node) for node in (1, 2, 3)] == [(0, None), (1, None), (2, None)]
    assert slots.admit(4) is None
    slots.leave(2)
    slots.leave(1)
    assert slots.admit(2) == (1, None)  # back before anybody needed it
    slots.leave(2)
    assert slots.admit(4) == (0, 1) and slots.admit(5) == (1, 2) and slots.admit(6) is None
    assert slots.of == {3: 2, 4: 0, 5: 1} and sorted(slots.present) == [3, 4, 5]


def test_without_clients_it_gives_up_and_says_what_it_saw(clock):
    one, _, _ = start({}, clock, patience=7.0)
    with pytest.raises(TimeoutError, match="no round for 7 s at version 0; 0 nodes are present, 0 messages open"):
        one.run(1)
    assert 7.0 < clock.now < 8.0
