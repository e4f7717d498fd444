"""The loop under load: bounded in memory, and fair to slow nodes."""

import random
import re
from collections import Counter

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import of_flower, says, server, simulated, start
from flwr.app import RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT

from secureafl_ext.flower import Queue
from secureafl_ext.flower.inbox import longest_wait
from secureafl_ext.flower.line import Least, Line
from secureafl_ext.flower.slots import Slots
from secureafl_ext.flower.turns import Turns

ROUNDS = ("accepted", "rejected")


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


def rounds(events):
    return [event.node for event in events if event.kind in ROUNDS]


def hangs(message):
    return []


def echoes(seconds):
    """Sends back the model that it got: the cheapest honest node."""
    return lambda message: [(seconds, RecordDict({"arrays": message.content["arrays"]}))]


# Places


def most_held(one, grid):
    """The most messages and replies at a time, at every message that is sent."""
    most, push = Counter(), grid.push_messages

    def pushes(messages):
        most["held"] = max(most["held"], len(one.open) + len(one.answers) + len(messages))
        most["waiting"] = max(most["waiting"], one.queue().waiting)
        return push(messages)

    grid.push_messages = pushes
    return most


def flooded(share=0.94, attackers=2, others=8):
    """Honest nodes at about a second, and so quick ones that without turns they would have this share of the rounds."""
    seconds = attackers / (share / (1 - share) * others)
    quick = {100 + k: echoes(seconds * (1 + 0.01 * k)) for k in range(attackers)}
    return {**{k: echoes(1.0 + 0.01 * k) for k in range(others)}, **quick}


@pytest.mark.parametrize("in_flight", [1, 2, 5, None])
def test_models_held_are_bounded_in_a_flood(clock, in_flight):
    one, grid, _ = start(flooded(), clock, server(clients=10), in_flight=in_flight, expires=False)
    most = most_held(one, grid)
    one.run(100)
    assert most["held"] == (in_flight or 10)  # the bound is used, too
    assert most["waiting"] == (0 if in_flight else 2)  # a node whose turn it is comes first, and need not wait
    assert one.queue().places == (in_flight or 10)


@pytest.mark.parametrize("in_flight", [5, 9, None])
def test_the_share_of_a_flood_is_that_of_its_turns(clock, in_flight):
    """Two of ten nodes, 94 % of the uploads, turns of 0.5: of five rounds in a row they have two at most."""
    one, _, events = start(flooded(), clock, server(clients=10), in_flight=in_flight, expires=False)
    one.run(150)
    quick = sum(node >= 100 for node in rounds(events))
    assert 0.25 * 150 < quick <= 0.4 * 150 + 2
    if in_flight is None:  # then nobody is held up: about as many honest rounds as of eight nodes at a second
        assert 150 - quick > 0.8 * 8 * clock.now


def test_without_turns_it_is_a_flood(clock):
    one, _, events = start(flooded(), clock, server(clients=10), turns=0.0, expires=False)
    one.run(200)
    assert sum(node >= 100 for node in rounds(events)) > 0.9 * 200


def test_a_place_goes_to_a_node_whose_turn_it_is_and_the_last_one_to_no_other():
    turns = Turns(1.0, 4, 2)
    for node in range(3):
        turns.joined(node)
    assert turns.ask(0.0, 0) == [0, 1] and turns.counts() == (1, 0)
    turns.answered(0)
    assert turns.first() == 0
    turns.had_round(0)
    turns.ready(0)
    assert turns.ask(0.0, 1) == [2]  # before 0, which had a round
    turns.answered(2)
    assert turns.first() == 2
    turns.had_round(2)
    turns.ready(2)
    assert turns.ask(0.0, 1) == [0]  # 1 holds the other place in its turn, and 0 is the next
    turns.answered(0)
    assert turns.first() is None
    turns.left(1)
    turns.joined(3)
    assert turns.ask(0.0, 1) == [3]
    turns.failed(3, 0.0)
    assert turns.ask(0.0, 1) == [] and turns.first() == 0  # 3 is not live any more: with 0 and 2, 0 need not wait


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_node_that_joins_takes_no_turn_away_from_one_that_was_asked_in_its_own(clock, in_flight):
    """Otherwise replies that must wait for the newcomers would hold all places, and no newcomer would be asked."""
    one, grid, events = start(
        {1: echoes(1.5), 2: echoes(1.5)}, clock, server(clients=9), turns=1.0, in_flight=in_flight
    )
    one.run(7)
    grid.nodes |= {k: echoes(1.5) for k in range(3, 8)}
    one.patience = 100.0
    one.run(60)
    assert set(rounds(events)[-7:]) == set(range(1, 8))


kind = st.sampled_from(["answers", "answers", "hangs", "fails", "later"])


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fleet=st.lists(st.tuples(kind, st.floats(0.5, 2.0)), min_size=1, max_size=5),
    in_flight=st.integers(1, 7),
    turns=st.sampled_from([0.0, 0.4, 0.5, 1.0]),
)
def test_with_any_number_of_places_every_honest_node_has_rounds(monkeypatch, fleet, in_flight, turns):
    clock = simulated(monkeypatch)
    behaves = {"hangs": lambda seconds: hangs, "fails": lambda seconds: says(2, seconds)}
    nodes = {k: behaves.get(kind, echoes)(seconds) for k, (kind, seconds) in enumerate([("answers", 1.0), *fleet])}
    later = {k + 1: nodes.pop(k + 1) for k, (kind, _) in enumerate(fleet) if kind == "later"}
    judge = server(clients=7, max_staleness=200)
    one, grid, events = start(nodes, clock, judge, in_flight=in_flight, turns=turns, ttl=10.0, expires=False)
    most = most_held(one, grid)
    one.run(9)
    grid.nodes |= later
    one.run(60)
    answers = {0, *(k + 1 for k, (kind, _) in enumerate(fleet) if kind in ("answers", "later"))}
    assert set(rounds(events)) == answers and one.totals()["stale"] == 0
    assert most["held"] <= in_flight


# Memory


def tables(part, name=""):
    """(name, entries) of every table of a loop that is not of the server's or the grid's."""
    for key, value in vars(part).items():
        if isinstance(value, (dict, list, set)):
            yield f"{name}{key}", len(value)
        elif isinstance(value, (Turns, Slots, Line, Least)):
            yield from tables(value, f"{name}{key}.")


@pytest.mark.parametrize("in_flight", [3, None])
def test_tables_do_not_grow_with_the_nodes_that_were_there(clock, in_flight):
    """Each second five of twelve nodes are replaced by others, which nobody has seen before."""
    draw = random.Random(0)
    capacity, seen = 10, iter(range(1, 10**6))
    kinds = [echoes(0.1), echoes(0.3), echoes(2.0), says(2, 0.1), hangs, says(of_flower(5), 0.1)]
    one, grid, _ = start(
        {0: echoes(0.1)}, clock, server(clients=capacity), in_flight=in_flight, patience=1e4, expires=False
    )
    names = grid.get_node_ids
    largest = Counter()

    def look():
        for node in draw.sample(sorted(grid.nodes)[1:], min(5, len(grid.nodes) - 1)):
            del grid.nodes[node]
        while len(grid.nodes) < 12:
            grid.nodes[next(seen)] = draw.choice(kinds)
        grid.queue, grid.pushed = grid.queue[-50:], []
        for name, size in tables(one):
            largest[name] = max(largest[name], size)
        return names()

    grid.get_node_ids = look
    while next(seen) < 150:
        one.run(one.server.version + 10)
    assert {"open", "turns._last_round", "turns._ready._early._heap"} < set(largest)
    assert max(largest.values()) <= 2 * (capacity + 12) + 16, largest
    assert max(size for name, size in largest.items() if not name.endswith("_heap")) <= capacity + 12, largest


def test_a_node_that_comes_and_goes_while_places_are_taken_fills_no_memory():
    turns = Turns(0.5, 3, 1)
    turns.joined(1)
    assert turns.ask(0.0, 0) == [1]
    for step in range(1000):
        turns.joined(2)
        assert turns.ask(float(step), 1) == []
        turns.left(2)
    assert max(size for _, size in tables(turns)) <= 20


# Numbers


def test_queue_says_what_waits(clock):
    nodes = {1: echoes(1e-3), 2: echoes(1e-3), **{k: echoes(5.0) for k in range(3, 9)}, 9: says(2, 4.0)}
    one, grid, _ = start(nodes, clock, server(clients=12), in_flight=8)
    seen = []
    one.watch = lambda event: seen.append(one.queue()) if event.kind == "failed" else None
    assert one.queue() == Queue(0, 0, 14 * 4, 0.0, 0, 0, 8) and one.queue().waiting_bytes == 0
    one.run(9)
    assert {queue.open + queue.waiting for queue in seen} <= {7, 8}
    waited = seen[0]
    assert (waited.waiting, waited.waiting_bytes, waited.places) == (1, 14 * 4, 8)
    assert 3.5 < waited.longest_wait < 4.5 and waited.to_ask == 1  # both quick nodes had a round; one has a place
    assert one.queue().paused <= 1 and max(queue.paused for queue in seen) == 0  # told before the pause begins
    grid.refused = {9}
    one.run(30)
    assert one.queue().paused == 1


def test_queue_may_be_asked_by_another_thread():
    """A table that changes while it is looked at."""

    class Changes(dict):
        times = 3

        def values(self):
            self.times -= 1
            if self.times:
                raise RuntimeError("dictionary changed size during iteration")
            return super().values()

    assert longest_wait(Changes(), 1.0) == 0.0


@pytest.mark.parametrize("in_flight", [0, -1, float("nan")])
def test_in_flight_must_be_positive(clock, in_flight):
    with pytest.raises(ValueError, match=f"Loop: in_flight must be a whole number, 1 or more, got {in_flight}"):
        start({}, clock, in_flight=in_flight)


def test_the_benchmark_runs(clock, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import loop_load

    text, _ = loop_load.churn(100, 400)
    assert text.count("\n| ") == 5 and "400 accepted" in text
    assert int(re.search(r"(\d+) forgotten", text)[1]) > 0  # new nodes take the slots of others
    got = loop_load.measure({0: 1.0, 1: 1.0, 2: 0.01}, {0, 1}, 10.0, turns=1.0)
    assert got.nodes == 2 and got.share == pytest.approx(2 / 3, abs=0.05)
