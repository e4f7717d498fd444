"""Fair turns: a node that answers quickly owns neither the loop nor the model."""

from collections import Counter

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import GOAL, honest, kinds, layout_with, of_flower, says, server, simulated, start, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HONEST, QUICK = range(1, 10), 666


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


def rounds(events):
    """Whose they were, in order."""
    return [event.node for event in events if event.kind in ("accepted", "rejected")]


def slow_fleet(attacker):
    """Nine honest nodes at two seconds, not in step, and one other."""
    return {**{k: honest(2.0 + 0.01 * k, 0.1, k) for k in HONEST}, QUICK: attacker}


def steers(message):
    """Away from the goal, in a millisecond."""
    return [(1e-3, trained(message, lambda model: 3.0 * (GOAL - model) + 1.0))]


def fleet_of(events):
    """staleness of honest rounds, and how many honest replies were too stale for one"""
    mine = [event for event in events if event.node in HONEST]
    return [event.staleness for event in mine if event.kind != "joined"], sum(e.kind == "stale" for e in mine)


@pytest.mark.parametrize("judge", [{}, {"rule": "kinship"}], ids=["median", "kinship"])
def test_one_node_at_a_millisecond_beside_nine_at_two_seconds(clock, judge):
    one, _, events = start(slow_fleet(steers), clock, server(clients=10, **judge), expires=False)
    one.run(400)
    count = Counter(rounds(events))
    assert count[QUICK] <= 400 / 5 + 1  # of five rounds in a row it has one at most
    assert min(count[k] for k in HONEST) >= 30
    staleness, stale = fleet_of(events)
    assert not stale and max(staleness) <= 2 * 10
    assert (one.server.model - GOAL).norm() < 0.2 * GOAL.norm()


def test_one_node_that_sends_nan_every_13_milliseconds(clock):
    poison = says(layout_with(torch.full((4, 3), torch.nan).numpy()), 0.013)
    one, grid, events = start(slow_fleet(poison), clock, server(clients=10, quantile=0.8), expires=False)
    one.run(400)
    assert set(kinds(events, QUICK)) == {"joined", "garbage"}
    assert {event.reason for event in events if event.kind == "garbage"} == {"the update is not finite"}
    assert len([node for _, node, _ in grid.pushed if node == QUICK]) < 20  # in 90 s: it is asked ever more rarely
    assert (one.server.model - GOAL).norm() < 0.2 * GOAL.norm()


@pytest.mark.parametrize(("turns", "gap"), [(0.25, 2), (0.5, 4), (1.0, 9)])
def test_of_gap_plus_one_rounds_in_a_row_all_are_of_different_nodes(clock, turns, gap):
    """So that three quick nodes that collude have three of them at most."""
    quick = {k: honest(1e-3 * k) for k in range(1, 4)}
    slow = {k: honest(2.0 + 0.1 * k) for k in range(4, 11)}
    one, _, events = start(quick | slow, clock, server(clients=10), turns=turns, expires=False)
    one.run(150)
    order = rounds(events)
    windows = [order[i : i + gap + 1] for i in range(len(order) - gap)]
    assert all(len(set(window)) == gap + 1 for window in windows)
    assert any(len(set(order[i : i + gap + 2])) <= gap + 1 for i in range(len(order) - gap - 1))  # no wider than that


def test_without_turns_every_reply_is_answered_at_once(clock):
    one, _, events = start(slow_fleet(honest(1e-3)), clock, server(clients=10), turns=0.0, expires=False)
    one.run(100)
    assert set(rounds(events)) == {QUICK}


def test_a_quick_nodes_replies_wait_and_none_is_thrown_away(clock):
    one, grid, events = start(slow_fleet(honest(1e-3)), clock, server(clients=10), expires=False)
    one.run(100)
    mine = [event for event in events if event.node == QUICK and event.kind != "joined"]
    asked = [message for _, node, message in grid.pushed if node == QUICK]
    assert len(mine) >= 15 and len(asked) <= len(mine) + 1 and one.totals()["stale"] == 0
    assert max(event.staleness for event in mine) <= 5  # no longer than its turn takes


@pytest.mark.parametrize("turns", [0.5, 1.0])
def test_nodes_that_are_equally_quick_do_not_wait_for_each_other(clock, turns):
    one, _, _ = start({k: honest(1.0 + 1e-4 * k) for k in range(10)}, clock, server(clients=10), turns=turns)
    one.run(100)
    assert clock.now < 13  # ten times one second, and pauses


@pytest.mark.parametrize("alone", [1, 2])
def test_small_fleets_train(clock, alone):
    one, _, _ = start({k: honest() for k in range(alone)}, clock)
    one.run(20)
    assert one.server.version == 20 and clock.now < 25


def hangs(message):
    return []


def test_a_hanging_minority_delays_nobody(clock):
    fleet = {k: hangs if k < 4 else honest() for k in range(10)}
    one, _, _ = start(fleet, clock, server(clients=10), ttl=1e4, expires=False)
    one.run(60)
    assert clock.now < 15  # six nodes at a second each


@pytest.mark.parametrize("turns", [0.5, 1.0])
def test_a_hanging_majority_holds_others_up_until_its_ttl_has_passed(clock, turns):
    """Once, and not again each time that they are asked anew."""
    fleet = {k: hangs if k < 7 else honest() for k in range(10)}
    one, _, events = start(fleet, clock, server(clients=10), ttl=50.0, turns=turns, expires=False)
    one.run(60)
    assert 50 < clock.now < 80
    assert one.totals()["vanished"] >= 7 and set(rounds(events)) == {7, 8, 9}


def test_a_node_that_fails_is_not_waited_for(clock):
    fleet = {k: says(2) if k < 9 else honest() for k in range(10)}
    one, _, events = start(fleet, clock, server(clients=10), turns=1.0)
    one.run(20)
    assert rounds(events) == [9] * 20


def test_who_leaves_and_comes_back_gains_no_round(clock):
    """Flower says after each of its rounds that it is gone, and it is seen again a second later."""
    turn = Counter()

    def flaps(message):
        turn["taken"] += 1
        return steers(message) if turn["taken"] % 2 else [(1e-3, of_flower(5))]

    one, _, events = start(slow_fleet(flaps), clock, server(clients=10), expires=False)
    one.run(200)
    assert kinds(events, QUICK).count("left") > 5
    order = rounds(events)
    assert all(len(set(order[i : i + 5])) == 5 for i in range(len(order) - 4))


def test_a_stale_reply_is_no_turn(clock):
    """Whose reply makes no round is asked again as if it had not come: nothing is gained, and nobody waits for ever."""
    fleet = {1: honest(1.0), 2: honest(1.4), 3: honest(30.0)}
    one, _, events = start(fleet, clock, server(max_staleness=3), turns=1.0, ttl=60.0, expires=False)
    one.run(40)
    assert one.server.version == 40
    order = rounds(events)
    assert all(len(set(order[i : i + 3])) == 3 for i in range(len(order) - 2))


node = st.sampled_from(["answers", "hangs", "fails", "both"])


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fleet=st.lists(st.tuples(node, st.floats(1e-3, 5.0)), min_size=1, max_size=8),
    turns=st.floats(0, 1),
    max_staleness=st.integers(0, 20),
)
def test_nobody_waits_for_ever_whoever_hangs_or_fails(monkeypatch, fleet, turns, max_staleness):
    clock = simulated(monkeypatch)

    def behaves(kind, seconds, k):
        def answer(message):
            failing = kind == "both" and hash((k, message.content["config"]["version"])) % 2
            return says(2, seconds)(message) if kind == "fails" or failing else honest(seconds, 0.1, k)(message)

        return hangs if kind == "hangs" else answer

    nodes = {k: behaves(kind, seconds, k) for k, (kind, seconds) in enumerate([("answers", 1.0), *fleet])}
    judge = server(clients=len(nodes), max_staleness=max_staleness)
    one, _, events = start(nodes, clock, judge, turns=turns, ttl=10.0, patience=10.0 * len(nodes) + 100, expires=False)
    one.run(30)
    assert one.server.version == 30 == len(rounds(events))
