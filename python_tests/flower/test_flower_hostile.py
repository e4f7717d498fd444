"""Nothing that a client sends ends the server, moves the model out of the finite, or reaches a terminal as it is.

SECUREAFL_FUZZ=1000 pytest python_tests/flower/test_flower_hostile.py    # so many random fleets in place of 10
"""

import json
import math
import os
import re
import struct
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fleets import GOAL, honest, kinds, layout_with, of_flower, says, server, simulated, start
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.server.utils.validator import validate_message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT

from secureafl_ext.flower import KINDS

FLEETS = int(os.environ.get("SECUREAFL_FUZZ", "10"))
BAD = 666


@pytest.fixture
def clock(monkeypatch):
    return simulated(monkeypatch)


def array(header, dtype="float32"):
    """An array of shape (4, 3) whose bytes begin with this header, in NumPy's format."""
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    return RecordDict(
        {"arrays": ArrayRecord({"w": Array(dtype, (4, 3), "numpy.ndarray", head + bytes(48)), "b": Array(np.zeros(2))})}
    )


def with_metrics(*records):
    """A good reply but for what it says of itself."""
    return lambda message: RecordDict(
        {"arrays": honest()(message)[0][1]["arrays"], **{f"m{i}": record for i, record in enumerate(records)}}
    )


def metadata(**fields):
    """A reply whose metadata are not what a node's should be."""

    def change(reply):
        reply.metadata.__dict__.update({f"_{name}": value for name, value in fields.items()})
        return reply

    return change


def no_body(reply):
    reply.__dict__["_content"] = None
    return reply


FLOATS = "{'descr': '<f4', 'fortran_order': False, 'shape': "
BROKEN = {
    "wrong shape": (layout_with(np.zeros((3, 4), np.float32)), "garbage", r"w must be \(4, 3\)"),
    "wrong dtype": (layout_with(np.zeros((4, 3))), "garbage", "float64"),
    "missing entry": (layout_with(b=False), "garbage", "missing: b"),
    "unknown entry": (layout_with(c=np.zeros(1, np.float32)), "garbage", "unknown: 1"),
    "no record": (RecordDict(), "garbage", "one ArrayRecord, got 0"),
    "two records": (RecordDict({"a": ArrayRecord(), "b": ArrayRecord()}), "garbage", "got 2"),
    "another kind of record": (RecordDict({"arrays": ConfigRecord({"w": b"0"})}), "garbage", "got 0"),
    "no body": (no_body, "garbage", "cannot be read"),
    "a nested header": (array("[" * 9000), "garbage", "w cannot be read"),
    "a deep header": (array("-" * 9000 + "1"), "garbage", "w cannot be read"),
    "a negative shape": (array(FLOATS + "(-1, 3)}"), "garbage", r"w cannot be read: shape \(-1, 3\)"),
    "a huge shape": (array(FLOATS + "(4, 30000000000)}"), "garbage", "w cannot be read"),
    "NaN": (layout_with(np.full((4, 3), math.nan, np.float32)), "garbage", "not finite"),
    "infinity": (layout_with(np.full((4, 3), -math.inf, np.float32)), "garbage", "not finite"),
    "too large": (layout_with(np.full((4, 3), 3e38, np.float32)), "garbage", "not finite"),
    "not unpacked": (ValueError("Unexpected set of `children`"), "garbage", "cannot unpack the reply: ValueError"),
    "an exception": (2, "failed", "code 2"),
    "a crash": (8, "failed", "code 8"),
    "an unknown code": (Error(-7, "odd"), "failed", "odd"),
    "no code": (Error(None, "odd"), "failed", "odd"),
    "a code that is a list": (Error([], "odd"), "failed", "odd"),
    "no reason": (Error(2, None), "failed", "^$"),
    "a reason of no text": (Error(2, 7), "failed", "^$"),
    "a long reason": (Error(2, "x" * 10**6), "failed", r"^x+ \.\. x+$"),
    "a reason for a terminal": (Error(2, "\x1b[2J\r\nfake: accepted\u202e"), "failed", r"^\[2J  fake: accepted$"),
    "an expired reply": (of_flower(4), "late", "code 4"),
    **{f"Flower's code {code} in its own name": (code, "failed", f"code {code}") for code in (3, 4, 5)},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_client_is_counted_reported_and_survived(clock, name):
    answer, kind, words = BROKEN[name]
    one, grid, events = start({9: honest(), BAD: says(answer)}, clock)
    one.run(40)
    bad = [event for event in events if event.node == BAD]
    if name == "not unpacked":  # its first reply is lost with what Flower pulled at the same time
        assert bad.pop(1).kind in ("garbage", "vanished")
    assert [event.kind for event in bad] == ["joined"] + [kind] * (len(bad) - 1) and len(bad) > 3
    assert re.search(words, bad[1].reason) and len(bad[1].reason) <= 500 and bad[1].reason.isprintable()
    assert one.tally[9]["accepted"] == 40 and not one.server.seen[1]
    assert torch.allclose(one.server.model, GOAL, atol=0.2)
    waits = np.diff([when for when, node, _ in grid.pushed if node == BAD])
    assert (np.diff(waits[1:]) > 0).all()  # it is asked ever more rarely, so that it cannot keep the server busy


def of_ones(count):
    return dict.fromkeys(map(str, range(count)), 1)


METRICS = {  # Functions: every test process reads this table, and a million entries take seconds.
    "a list": (lambda: [MetricRecord({"client": [1, 2], "malicious": [0.5]})], {"client": [1, 2], "malicious": [0.5]}),
    "an infinite number": (lambda: [MetricRecord({"client": -math.inf})], {"client": -math.inf}),
    "half a client": (lambda: [MetricRecord({"client": 0.5})], {"client": 0.5}),
    "two records": (lambda: [MetricRecord({"a": 1}), MetricRecord({"b": 2.0})], {"a": 1, "b": 2.0}),
    "a long integer": (lambda: [MetricRecord({"client": 10**5000, "a": 1})], {"a": 1}),
    "a long name": (lambda: [MetricRecord({"a" * 10**6: 1, "b": 2})], {"b": 2}),
    "a name for a terminal": (lambda: [MetricRecord({"\x1b[2J": 1, "b": 2})], {"b": 2}),
    "a long list": (lambda: [MetricRecord({"a": 1, "b": [0.0] * 10**6, "c": 2})], {"a": 1}),
    "a million entries": (lambda: [MetricRecord(of_ones(10**6))], of_ones(1000)),
    "no metrics": (lambda: [ConfigRecord({"client": "text"})], {}),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_any_kind_are_bounded_and_logged(clock, tmp_path, name):
    """The example's log takes them too, and its table at the end."""
    make, kept = METRICS[name]
    log = example().Log(tmp_path, False)
    metrics = []

    def watch(event):
        metrics.append(event.metrics)
        log.event(event)

    content = with_metrics(*make())
    one, _, _ = start({9: honest(), BAD: lambda message: [(1.0, content(message))]}, clock, watch=watch)
    one.run(4)
    said = [about for about in metrics if about]
    assert all(about == kept for about in said)
    with log:
        log.point(4, 0.5)
        log.table(one)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert bool(kept) == bool(said) and len(lines) == sum(one.totals().values())
    assert all(json.loads(line, parse_constant=pytest.fail)["kind"] in KINDS for line in lines)


def example():
    """The example's server, as Flower would import it."""
    folder = str(ROOT / "examples" / "flower")
    sys.path.insert(0, folder)
    try:
        from attacked import server as module
    finally:
        sys.path.remove(folder)
    return module


ODD = {
    "no time": metadata(created_at=None),
    "NaN": metadata(created_at=math.nan),
    "text": metadata(created_at="now"),
    "a stranger": metadata(src_node_id=12345),
    "no sender": metadata(src_node_id=None),
    "an answer to nothing": metadata(reply_to_message_id="message 7777"),
    "an answer to no text": metadata(reply_to_message_id=[]),
    "an answer to an old message": metadata(reply_to_message_id="message 0"),
    "another type": metadata(message_type="query"),
    "another run": metadata(run_id=-1, ttl=-1.0, group_id=None),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_metadata_are_survived(clock, name):
    one, _, events = start({9: honest(), 8: honest(1.1), BAD: says(ODD[name])}, clock, expires=False)
    one.run(40)
    assert one.tally[9]["accepted"] + one.tally[8]["accepted"] == 40
    assert set(kinds(events, BAD)) <= {"joined", "garbage", "twice", "vanished"}


@pytest.mark.parametrize("claims", [{}, {"src_node_id": SUPERLINK_NODE_ID}], ids=["its own id", "Flower's id"])
def test_flower_lets_no_node_speak_in_its_name(claims):
    """What the loop relies on when it believes an error that Flower makes."""
    now = time.time()
    about = {"src_node_id": BAD, "dst_node_id": SUPERLINK_NODE_ID, **claims}
    ids = {"run_id": 1, "message_id": "reply", "reply_to_message_id": "message", "group_id": ""}
    said = Metadata(**ids, **about, created_at=now, ttl=60.0, message_type="train")
    errors = validate_message(Message(metadata=said, error=Error(5, "gone")), is_reply_message=True)
    assert len(errors) == len(claims) and all("src_node_id" in error for error in errors)


def test_a_connection_that_fails_is_no_clients_fault(clock):
    """It ends the run with its own error, and nobody is blamed."""
    one, grid, _ = start({9: honest(), 8: honest()}, clock)

    def down(*_):
        raise ConnectionError("the SuperLink is gone")

    one.run(4)
    grid.pull_messages = grid.get_node_ids = down
    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        one.run(8)
    assert one.totals() == {"joined": 2, "accepted": 4}


def test_replies_pulled_before_the_connection_fails_are_judged(clock):
    """One by one, Flower hands out each reply once: the run may end with an error, but not without these replies."""
    one, grid, _ = start({9: honest(1.0), 8: honest(1.0)}, clock, ttl=1e4, expires=False)
    one._inbox._one_by_one = True
    one.run(2)
    pull, look, up = grid.pull_messages, grid.get_node_ids, [True]

    def breaks_after_a_reply(identifiers):
        if not up[0]:
            raise ConnectionError("the SuperLink is gone")
        pulled = pull(identifiers)
        up[0] = not pulled
        return pulled

    def looks():
        if not up[0]:
            raise ConnectionError("the SuperLink is gone")
        return look()

    grid.pull_messages, grid.get_node_ids = breaks_after_a_reply, looks
    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        one.run(9)
    assert one.server.version == 3
    grid.pull_messages, grid.get_node_ids = pull, look
    one.run(9)
    assert one.totals() == {"joined": 2, "accepted": 9} and clock.now < 100  # no message had to expire


def test_a_reply_that_flower_cannot_unpack_loses_no_other_twice(clock):
    """What was pulled with the first is lost and asked for anew; then replies are pulled one by one."""
    bad = says(ValueError("no JSON"))
    one, _, events = start({9: honest(), 8: honest(), BAD: bad}, clock, ttl=5.0, expires=False)
    one.run(40)
    assert one.totals()["vanished"] <= 3 and kinds(events, BAD).count("garbage") > 2
    assert one.tally[9]["accepted"] > 15 and one.tally[8]["accepted"] > 15


# Random fleets of such clients

NOTHING, TWICE = "nothing", "twice"
ANSWERS = [
    *(answer for answer, _, _ in BROKEN.values()),
    *ODD.values(),
    *(make() for name, (make, _) in METRICS.items() if "million" not in name),
    *range(-1, 10),
    *map(of_flower, (3, 4, 5)),
    *(layout_with(np.full((4, 3), value, np.float32)) for value in (1e-45, 1e10, 1e30, 3e37)),
    NOTHING,
    TWICE,
]
seconds = st.sampled_from([0.0, 1e-3, 0.013, 0.5, 1.0, 7.0, 100.0])
hostile = st.lists(st.tuples(seconds, st.sampled_from(range(len(ANSWERS)))), min_size=1, max_size=4)


def behaves(script):
    """Goes through its answers again and again."""
    turn = iter(range(10**9))

    def answer(message):
        wait, index = script[next(turn) % len(script)]
        said = ANSWERS[index]
        if said is NOTHING:
            return []
        if said is TWICE:
            return honest(wait)(message) * 2
        return [(wait, with_metrics(*said)(message) if isinstance(said, list) else said)]

    return answer


@settings(deadline=None, max_examples=FLEETS, suppress_health_check=list(HealthCheck))
@given(
    scripts=st.lists(hostile, min_size=1, max_size=4),
    clients=st.integers(1, 6),
    turns=st.sampled_from([0.0, 0.5, 1.0]),
    max_staleness=st.sampled_from([0, 3, 50]),
    rule=st.sampled_from(["median", "kinship"]),
)
def test_random_hostile_fleets(monkeypatch, tmp_path_factory, scripts, clients, turns, max_staleness, rule):
    clock = simulated(monkeypatch)
    fleet = {9: honest(1.0), **{BAD + k: behaves(script) for k, script in enumerate(scripts)}}
    judge = server(clients=clients, max_staleness=max_staleness, rule=rule)
    one, _, events = start(fleet, clock, judge, turns=turns, ttl=20.0, patience=1e4)
    log = example().Log(tmp_path_factory.mktemp("log"), False)
    one.watch = lambda event: events.append(event) or log.event(event)
    for rounds in (8, 16):
        one.run(rounds)
        assert one.server.version == rounds and one.server.model.isfinite().all()
        asked = Counter(sent.node for sent in one.open.values())
        asked.update([*one.answers, *one.turns.to_ask])
        assert max(asked.values(), default=0) <= 1  # a node is asked once at a time
        assert set(asked) == set(one.slots.present)  # and nobody is lost
    with log:
        log.point(16, 0.5)
        log.table(one)
    counts = Counter(event.kind for event in events)
    assert counts == one.totals() and counts["accepted"] + counts["rejected"] == 16
    assert all(event.reason.isprintable() and len(event.reason) <= 500 for event in events)
    assert all(len(event.metrics) <= 1000 for event in events)
