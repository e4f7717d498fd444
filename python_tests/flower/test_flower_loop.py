"""The loop's bookkeeping on a grid in memory; test_flower_app runs it on Flower itself."""

import logging
import math
from collections import Counter
from itertools import count

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import GOAL, LR, honest, kinds, layout_with, says, server, simulated, start, trained
from flwr.app import MetricRecord
from loop.server import PlainServer
from memory_grid import MemoryGrid
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext.flower import KINDS
from secureafl_ext.flower.events import LEVELS


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


def test_the_model_of_an_honest_fleet_reaches_its_goal(clock):
    one, _, events = start({9: honest(1.0), 8: honest(1.7), 7: honest(2.9)}, clock)
    one.run(150)
    assert one.server.version == 150
    assert torch.allclose(one.server.model, GOAL, atol=1e-3)
    assert torch.allclose(one.state_dict()["w"].flatten(), GOAL[:12], atol=1e-3) and one.state_dict()["count"] == 5
    assert Counter(event.kind for event in events) == one.totals() == {"joined": 3, "accepted": 150}
    assert one.tally[9]["accepted"] > one.tally[8]["accepted"] > one.tally[7]["accepted"]  # nobody waits for the slow


def test_each_reply_is_a_round_of_the_server_in_order_of_arrival(clock):
    """The same updates given to a server by hand: models agree bit for bit."""
    one, grid, events = start({9: honest(1.0, 0.1, 1), 8: honest(1.6, 0.1, 2)}, clock, server(quantile=0.5))
    one.run(20)
    assert one.totals()["rejected"] > 2
    again = server(quantile=0.5)
    slots = {9: 0, 8: 1}
    clients = {9: honest(noise=0.1, seed=1), 8: honest(noise=0.1, seed=2)}
    answers = {9: [], 8: []}
    for _, node, message in grid.pushed:
        answers[node].append((message, clients[node](message)[0][1]))
    for event in events:
        if event.kind in ("accepted", "rejected"):
            message, content = answers[event.node].pop(0)
            version = message.content["config"]["version"]
            update = (again.model_at(version) - one.layout.read(content["arrays"])) / LR
            receipt = again.submit(slots[event.node], update, version)
            assert bool(receipt.accepted) == (event.kind == "accepted")
            assert (receipt.staleness, receipt.version) == (event.staleness, event.version)
            assert receipt.reason == event.reason
            assert float(receipt.factor) == event.factor or math.isnan(event.factor)
    identical(again, one.server)


def test_who_answers_gets_the_new_model_at_once(clock):
    """Two replies in one pull: the first client's next message must not wait for the second's verdict."""
    one, grid, events = start({9: honest(1.0), 8: honest(1.0)}, clock)
    one.run(2)
    assert [message.content["config"]["version"] for _, _, message in grid.pushed[:3]] == [0, 0, 1]
    later = grid.pushed[2][2].content["arrays"]
    assert torch.equal(one.layout.read(later), one.server.model_at(1))
    assert [event.version for event in events if event.kind == "accepted"] == [1, 2]


@pytest.mark.parametrize("claimed", [None, 0.0, -1e300, math.nan])
def test_replies_of_one_pull_are_taken_in_the_order_in_which_their_messages_were_sent(clock, claimed):
    """Whichever way round the grid hands them out, and whatever time their senders claim."""

    def lies(message):
        def change(reply):
            reply.metadata.__dict__["_created_at"] = claimed
            reply.__dict__["_content"] = honest()(message)[0][1]
            return reply

        return [(1.06, change)]

    nodes = {9: honest(1.05), 8: honest(1.07), 7: lies}
    for order in ((9, 8, 7), (8, 7, 9)):
        one, _, events = start({node: nodes[node] for node in order}, clock)
        one.run(3)
        assert [event.node for event in events if event.kind == "accepted"] == list(order)


def test_a_reply_is_divided_by_the_lr_that_its_message_had(clock):
    """A schedule sets lr while messages are open: clients step by the one, the server by the other."""
    given = []

    def answer(message):
        given.append(message.content["config"]["lr"])
        return [(1.0, trained(message, lambda model: torch.ones(14)))]

    one, _, _ = start({9: answer, 8: answer}, clock)
    submit, updates = one.server.submit, []
    one.server.submit = lambda client, update, version: (
        updates.append(update.clone()) or submit(client, update, version)
    )
    for rounds, lr in ((3, 0.01), (6, 1.0), (10, LR)):
        one.run(rounds)
        one.server.lr = lr
    one.run(12)
    assert set(given) == {0.01, 1.0, LR} and len(updates) == 12
    assert torch.allclose(torch.stack(updates), torch.ones(12, 14), rtol=1e-3)


@pytest.mark.parametrize("lr", [0.0, -0.1, math.nan])
@pytest.mark.parametrize("when", ["between two runs", "within a run"])
def test_without_a_positive_lr_nothing_is_sent_or_judged_and_nobody_is_lost(clock, lr, when):
    judge = PlainServer(torch.zeros(14), 3, LR, 50)  # it lets any lr be set
    one, grid, events = start({9: honest(1.0), 8: honest(1.0), 7: honest(1.3)}, clock, judge)
    one.run(4)

    def set_lr(event=None):
        if event is None or event.version == 6:
            judge.lr = lr

    if when == "within a run":
        one.watch = set_lr
    else:
        set_lr()
    sent, version = len(grid.pushed), 6 if when == "within a run" else 4
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"Loop.run: server.lr must be a positive number, got {lr}"):
            one.run(12)
        assert one.server.version == version
    assert len(grid.pushed) <= sent + 2
    judge.lr, one.watch = LR, events.append
    one.run(20)
    assert one.totals() == {"joined": 3, "accepted": 20} and clock.now < 60  # no message had to expire


def test_a_submit_that_fails_loses_no_node(clock):
    """For instance because the disk is full, and the server is audited."""
    one, _, _ = start({9: honest(), 8: honest(), 7: honest()}, clock)
    submit, calls = one.server.submit, count(1)

    def fails_once(*upload):
        if next(calls) == 5:
            raise OSError("the disk is full")
        return submit(*upload)

    one.server.submit = fails_once
    with pytest.raises(OSError, match="the disk is full"):
        one.run(12)
    one.run(24)
    assert one.server.version == 24 and min(one.tally[node]["accepted"] for node in (9, 8, 7)) > 6
    assert clock.now < 29


def test_a_run_in_stretches_loses_no_reply(clock):
    """Both replies come in one pull, and only one belongs to the first stretch."""
    one, grid, _ = start({9: honest(1.0), 8: honest(1.0)}, clock)
    one.run(1)
    assert one.server.version == 1
    one.run(2)
    assert one.totals() == {"joined": 2, "accepted": 2} and len(grid.pushed) == 4


def test_metrics_and_the_clients_number_are_handed_on(clock):
    def answer(message):
        [(seconds, content)] = honest()(message)
        content["metrics"] = MetricRecord({"loss": 0.5})
        return [(seconds, content)]

    one, _, events = start({9: answer}, clock)
    one.run(1)
    assert events[-1].metrics == {"loss": 0.5} and events[-1].slot == 0
    assert set(one.totals()) < set(KINDS)


def test_a_reply_after_its_ttl_is_dropped(clock):
    """One that arrives in the same pull in which its time is over, and then one that nobody asks for any more."""
    late = MemoryGrid({}, clock, expires=False)
    one, _, events = start({}, clock, ttl=5.0)
    one.grid = late
    late.nodes = {9: honest(5.001)}
    clock_sleep, clock.sleep = clock.sleep, lambda seconds: clock_sleep(6.0 if one.open else seconds)
    one.patience = 20.0
    with pytest.raises(TimeoutError, match="no round for 20 s at version 0; 1 nodes are present"):
        one.run(1)
    assert kinds(events, 9)[:2] == ["joined", "late"] and one.server.version == 0


def test_a_reply_in_time_is_not_late_because_the_server_was_busy(clock):
    """Both are pulled at once; between the two stretches somebody evaluates the model for longer than the ttl."""
    one, _, events = start({9: honest(1.0), 8: honest(1.0)}, clock, ttl=5.0)
    one.run(1)
    clock.sleep(100.0)
    one.run(2)
    assert [event.kind for event in events] == ["joined", "joined", "accepted", "accepted"]


def test_a_second_reply_is_dropped(clock):
    """A grid that hands out replies nobody asked for, again and again."""

    def twice(message):
        return honest()(message) * 2

    one, grid, events = start({9: honest(1.3), 8: twice}, clock)
    grid.pull_messages = lambda identifiers: MemoryGrid.pull_messages(grid, Everything())
    one.run(12)
    assert kinds(events, 8)[:4] == ["joined", "accepted", "twice", "accepted"]
    judged = [event for event in events if event.kind in ("accepted", "rejected")]
    assert len(judged) == one.server.version == 12


class Everything:
    def __contains__(self, _):
        return True


def test_a_stale_reply_is_no_round(clock):
    one, _, events = start({9: honest(1.0), 8: honest(10.0)}, clock, server(max_staleness=3))
    one.run(12)
    slow = [event for event in events if event.node == 8]
    assert slow[1].kind == "stale" and slow[1].reason.startswith("stale: version 0, the server keeps")
    assert one.tally[9]["accepted"] == 12


@pytest.mark.parametrize("refusal", [[], [""], [None]])
def test_no_message_taken_is_noticed(clock, refusal):
    """Flower's grid in memory says nothing of such a message, the other one has no id for it."""
    one, grid, events = start({9: honest(), 8: honest()}, clock)
    grid.refused.add(8)
    grid.refusal = refusal
    one.run(10)
    assert kinds(events, 8)[:3] == ["joined", "unsent", "unsent"] and one.tally[9]["accepted"] == 10
    grid.refused.clear()
    one.run(20)
    assert one.tally[8]["accepted"] > 0


def test_after_a_push_that_fails_every_node_is_asked_in_the_next_run(clock):
    """The connection fails at the second of three messages."""
    one, grid, _ = start({9: honest(), 8: honest(), 7: honest()}, clock)
    push, calls = grid.push_messages, count(1)

    def fails_once(messages):
        if next(calls) == 2:
            raise ConnectionError("the SuperLink is gone")
        return push(messages)

    grid.push_messages = fails_once
    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        one.run(3)
    one.run(12)
    assert one.totals() == {"joined": 3, "accepted": 12} and all(one.tally[node]["accepted"] for node in (9, 8, 7))


def test_it_asks_less_often_while_nothing_comes(clock):
    asked = []
    one, grid, _ = start({9: honest(20.0)}, clock)
    pull = grid.pull_messages
    grid.pull_messages = lambda identifiers: asked.append(clock.now) or pull(identifiers)
    one.run(1)
    assert 200 < len(asked) < 230  # ten times a second


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ttl": 0.0}, "Loop: ttl must be a positive number, got 0.0"),
        ({"patience": -1.0}, "Loop: patience must be a positive number, got -1.0"),
        ({"every": 0}, "Loop: every must be a whole number, 1 or more, got 0"),
        ({"turns": -0.1}, r"Loop: turns must be a number in 0..1, got -0.1"),
        ({"turns": 1.1}, r"Loop: turns must be a number in 0..1, got 1.1"),
        ({"turns": math.nan}, r"Loop: turns must be a number in 0..1, got nan"),
        ({"ttl": "x"}, "Loop: ttl must be a positive number, got 'x'"),
        ({"patience": None}, "Loop: patience must be a positive number, got None"),
        ({"turns": None}, "Loop: turns must be a number in 0..1, got None"),
        ({"every": 0.5}, "Loop: every must be a whole number, 1 or more, got 0.5"),
        ({"every": True}, "Loop: every must be a whole number, 1 or more, got True"),
        ({"in_flight": 1.5}, "Loop: in_flight must be a whole number, 1 or more, got 1.5"),
        ({"watch": 5}, "Loop: watch must be a function of an event, or None, got 5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(clock, settings, words):
    with pytest.raises(ValueError, match=words):
        start({}, clock, **settings)


def test_a_server_that_does_not_fit_is_refused(clock):
    with pytest.raises(ValueError, match=r"Loop: server must have a model of the layout's \(14,\).*got \(13,\)"):
        start({}, clock, SecureAFL(torch.zeros(13), 2))
    with pytest.raises(ValueError, match=r"Loop: server.lr must be a positive number, got 0"):
        start({}, clock, SecureAFL(torch.zeros(14), 2, lr=0.0))


def test_events_are_logged_at_their_levels(clock, caplog):
    """Every event is in the log; by default a program sees clients that fail, not every round."""
    caplog.set_level(logging.DEBUG, "secureafl_ext.flower")
    one, _, events = start({9: honest(), 8: says(layout_with(b=False), 1.5)}, clock)
    one.run(4)
    records = [record for record in caplog.records if record.name == "secureafl_ext.flower.loop"]
    assert [(record.levelno, record.args[0], record.args[1]) for record in records] == [
        (LEVELS[event.kind], event.kind, event.node) for event in events
    ]
    said = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert said[0] == "garbage: node 8, slot 1, version 1 entries missing: b; unknown: 0"
    assert len(said) == one.totals()["garbage"]


def test_every_kind_has_a_level():
    assert set(LEVELS) == set(KINDS)
    assert {LEVELS[kind] for kind in ("failed", "garbage", "vanished", "late", "unsent")} == {logging.WARNING}


def test_a_loop_without_a_checkpoint_has_none_to_save(clock):
    one, _, _ = start({9: honest()}, clock)
    for call in (one.save, one.load):
        with pytest.raises(ValueError, match=f"Loop.{call.__name__}: checkpoint must be the path of a file, got None"):
            call()
