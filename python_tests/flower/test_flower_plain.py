"""The loop's quick tables decide as the plain ones, which walk all nodes."""

import random
from collections import Counter

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import START, honest, layout_with, of_flower, says, server, simulated
from memory_grid import MemoryGrid
from plain_loop import PlainLoop, PlainSlots, PlainTurns

from secureafl_ext.flower import Layout, Loop, loop
from secureafl_ext.flower.slots import Slots
from secureafl_ext.flower.turns import Turns

ROUNDS = ("accepted", "rejected")


def hangs(message):
    return []


def test_slots_are_those_of_the_plain_table():
    for seed in range(200):
        draw = random.Random(seed)
        quick, plain = Slots(5), PlainSlots(5)
        if seed % 2:  # a checkpoint may have holes
            taken = dict(zip(range(100, 103), draw.sample(range(5), 3), strict=True))
            for slots in (quick, plain):
                slots.of, slots.away = dict(taken), dict.fromkeys(taken)
        for _ in range(60):
            node = draw.randrange(9)
            if node in quick.of and node not in quick.away and draw.random() < 0.5:
                quick.leave(node)
                plain.leave(node)
            else:
                offered = quick.offer(node)
                assert offered == plain.offer(node)
                assert (quick.of, list(quick.away)) == (plain.of, list(plain.away))  # an offer changes nothing
                assert quick.admit(node) == plain.admit(node) == offered
            assert (quick.of, list(quick.away)) == (plain.of, list(plain.away))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_turns_are_those_of_the_plain_table(share):
    """Random histories: nodes join, leave, answer and fail, at most one message open for each."""
    decided = Counter()
    for seed in range(60):
        draw, capacity, now = random.Random(seed), 8, 0.0
        both = Turns(share, capacity, capacity), PlainTurns(share, capacity, capacity)
        asked, answered, away = [], [], list(range(capacity + 3))

        def tell(what, *about, both=both):
            first, second = (getattr(turns, what)(*about) for turns in both)
            assert first == second, (what, about)
            return first

        for _ in range(300):
            now += draw.choice([0.0, 0.05, 0.3])
            what = draw.choice(["join", "leave", "ask", "ask", "answer", "answer", "fail", "judge", "judge"])
            if what == "join" and len(away) > 3:
                tell("joined", away.pop(draw.randrange(len(away))))
            elif what == "leave" and draw.random() < 0.3 and asked + answered:
                node = draw.choice(asked + answered + list(both[0].to_ask))
                tell("left", node)
                away.append(node)
                asked, answered = ([other for other in nodes if other != node] for nodes in (asked, answered))
            elif what == "ask":
                asked += tell("ask", now, len(asked) + len(answered))
            elif what in ("answer", "fail") and asked:
                node = asked.pop(draw.randrange(len(asked)))
                if what == "fail":
                    tell("failed", node, now)
                else:
                    tell("answered", node)
                    answered.append(node)
            elif what == "judge":
                node = tell("first")
                decided[node is None] += bool(answered)
                if node is not None:
                    answered.remove(node)
                    if draw.random() < 0.8:  # else it is stale
                        tell("had_round", node)
                    tell("ready", node)
            assert both[0].gap() == both[1].gap() and both[0].to_ask == both[1].to_ask
    assert decided[False] > 1000 and (decided[True] > 30) == (share > 0)  # replies waited for their turn


def random_fleet(draw, clock):
    """Nodes of very different speeds, of which some fail, send garbage or hang; they come and go."""
    kinds = [
        lambda seconds: honest(seconds),
        lambda seconds: honest(seconds),
        lambda seconds: says(2, seconds),
        lambda seconds: says(layout_with(b=False), seconds),
        lambda seconds: says(of_flower(5), seconds),  # Flower says that it has left
        lambda seconds: hangs,
    ]
    every = {k: draw.choice(kinds)(10 ** draw.uniform(-3, 1)) for k in range(1, 12)}
    grid = MemoryGrid({0: honest(1.0), **dict(draw.sample(list(every.items()), 6))}, clock, expires=draw.random() < 0.5)
    names = grid.get_node_ids

    def look():
        node = draw.randrange(1, 12)
        if draw.random() < 0.3 and grid.nodes.pop(node, None) is None:
            grid.nodes[node] = every[node]
        return names()

    grid.get_node_ids = look
    return grid


def history(monkeypatch, seed, plain):
    """All events of a run, and all messages."""
    with monkeypatch.context() as patch:
        clock, draw = simulated(patch), random.Random(seed)
        if plain:
            patch.setattr(loop, "Slots", PlainSlots)
            patch.setattr(loop, "Turns", PlainTurns)
        events = []
        grid = random_fleet(draw, clock)
        judge = server(clients=draw.choice([4, 8, 12]), max_staleness=draw.choice([0, 5, 50]))
        about = {"turns": draw.choice([0.0, 0.5, 1.0]), "ttl": 7.0, "patience": 1e4}
        one = (PlainLoop if plain else Loop)(grid, judge, Layout(START), watch=events.append, **about)
        one.run(30)
        told = [(event.kind, event.node, event.slot, event.version, event.staleness) for event in events]
        return told, [(when, node) for when, node, _ in grid.pushed], one.tally, one.server.model


@pytest.mark.parametrize("seed", range(8))
def test_a_run_is_that_of_the_plain_loop(monkeypatch, seed):
    quick, plain = history(monkeypatch, seed, False), history(monkeypatch, seed, True)
    assert quick[:3] == plain[:3] and torch.equal(quick[3], plain[3])
    assert len(rounds_of(quick[0])) == 30


def rounds_of(told):
    return [node for kind, node, *_ in told if kind in ROUNDS]
