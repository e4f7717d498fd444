"""JsonLog and read_line: what is written is read back, files stay whole and bounded, and no line is taken on trust."""

import io
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secureafl_ext import SecureAFL
from secureafl_ext.operate import KINDS, Look, Queue, Verdict, Watched, json_log
from secureafl_ext.operate.json_lines import LONGEST_LINE, LONGEST_NAME, LONGEST_REASON, MOST_CLIENTS
from secureafl_ext.operate.json_log import Dropped, JsonLog, read_line
from secureafl_ext.operate.verdict import MEAN_UPDATES
from secureafl_ext.operate.watched import Evaluation
from secureafl_ext.validation import printable

VERDICT = Verdict(1.5, "accepted", 3, "node 7", 12, staleness=2, factor=0.5, seconds=0.01, reason="accepted")
QUEUE = Queue(open=6, waiting=3, model_bytes=56, longest_wait=0.5, to_ask=0, paused=1, places=12)
FLAGS = np.array([True, False])
LOOK = Look(2.5, 12, {"accepted": 3}, FLAGS, FLAGS, FLAGS, np.array([0.25, 0.75]), FLAGS, math.inf, queue=QUEUE)

times = st.floats(0, 1e11)
counts = st.integers(0, 2**53)
plenty = st.none() | st.floats(min_value=0)  # with infinity and NaN
queues = st.none() | st.builds(
    Queue,
    **{name: counts for name in Queue.__dataclass_fields__ if name != "longest_wait"},
    longest_wait=st.floats(0, 1e9),
)
verdicts = st.builds(
    Verdict,
    at=times,
    kind=st.sampled_from(sorted(KINDS)),
    client=st.none() | st.integers(0, MOST_CLIENTS - 1),
    who=st.text(max_size=20) | st.just("n" * (LONGEST_NAME + 1)),
    version=counts,
    staleness=st.none() | counts,
    factor=plenty,
    seconds=plenty,
    reason=st.text(st.characters(), max_size=20) | st.just("\x9b" * 1_000),  # lone surrogates too
)


@st.composite
def looks(draw):
    n = draw(st.integers(0, 20))
    flags = [np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool) for _ in range(4)]
    numbers = st.lists(st.floats(width=32), min_size=n, max_size=n).map(lambda some: np.array(some, dtype=np.float64))
    agreement = {name: draw(st.none() | numbers) for name in MEAN_UPDATES}
    stats = draw(st.dictionaries(st.sampled_from(["accepted", "stale", "left_out"]), counts))
    left_out = draw(st.sampled_from([None, flags[3]]))
    threshold = draw(st.floats(min_value=0, allow_nan=False))
    about = {**agreement, "queue": draw(queues)}
    return Look(draw(times), draw(counts), stats, *flags[:3], draw(numbers), left_out, threshold, **about)


def lines_of(tell):
    """What a JsonLog writes into a stream."""
    stream = io.StringIO()
    tell(JsonLog(stream))
    text = stream.getvalue()
    assert text.endswith("\n") and text.isascii() and not stream.closed
    for line in text.splitlines():
        json.loads(line, parse_constant=pytest.fail)
    return text.splitlines()


def finite(value):
    return value if value is not None and math.isfinite(value) else None


@settings(deadline=None, max_examples=50)
@given(st.lists(verdicts, min_size=1, max_size=3))
def test_verdicts_are_read_back(batch):
    again = [read_line(line) for line in lines_of(lambda log: log.verdicts(batch))]
    assert again == [
        replace(
            verdict,
            who=printable(verdict.who, LONGEST_NAME),
            reason=printable(verdict.reason, LONGEST_REASON),
            factor=finite(verdict.factor),
            seconds=finite(verdict.seconds),
        )
        for verdict in batch
    ]
    assert all(verdict.reason.isprintable() and len(verdict.reason) <= LONGEST_REASON for verdict in again)


@settings(deadline=None, max_examples=50)
@given(looks())
def test_looks_are_read_back(look):
    (line,) = lines_of(lambda log: log.look(look))
    again = read_line(line)
    for name in ("at", "version", "stats", "threshold", "queue"):
        assert getattr(again, name) == getattr(look, name)
    for name in ("seen", "live", "present"):
        assert np.array_equal(getattr(again, name), getattr(look, name)) and getattr(again, name).dtype == bool
    assert (again.left_out is None) == (look.left_out is None)
    assert look.left_out is None or np.array_equal(again.left_out, look.left_out)
    for name in ("weights", *MEAN_UPDATES):
        got, told = getattr(again, name), getattr(look, name)
        assert (got is None) == (told is None)
        if told is not None:
            finite = np.where(np.isfinite(told), told, np.nan)
            digits = 1e-5 if name == "weights" else 1e-2
            assert np.allclose(got, finite, rtol=digits, atol=0, equal_nan=True) and got.dtype == np.float64


@settings(deadline=None, max_examples=50)
@given(times, counts, st.floats(), st.integers(1, 2**53))
def test_evaluations_and_drops_are_read_back(at, version, error, count):
    again = read_line(lines_of(lambda log: log.evaluated(at, version, error))[0])
    assert isinstance(again, Evaluation) and (again.at, again.version) == (at, version)
    assert again.error == error or (math.isnan(again.error) and not math.isfinite(error))
    again = read_line(lines_of(lambda log: log.dropped(count))[0])
    assert isinstance(again, Dropped) and again.count == count and again.at > 1e9


def changed(what, **fields):
    line = json_log.verdict_fields(what) if isinstance(what, Verdict) else json_log.look_fields(what)
    return json.dumps({name: value for name, value in {**line, **fields}.items() if value is not ...})


BAD = {
    "not json": "line must be JSON, got 'not json'",
    "[" * 100_000: "line must be JSON",
    "1" * 5_000: "line must be JSON",
    '{"event": "verdict"': "line must be JSON",
    "[1]": "line must be an object",
    '{"event": ["verdict"]}': '"event" one of verdict, look, evaluation, dropped',
    '{"event": "verdit"}': '"event" one of verdict, look, evaluation, dropped',
    '{"event": "evaluation", "at": 1, "version": 2, "error": NaN}': "NaN is no number of JSON",
    '{"event": "evaluation", "at": 1, "version": 2, "error": 1e999}': "error must be a finite number or null, got inf",
    '{"event": "evaluation", "at": 1, "version": 2}': "error must be in a line of the event evaluation, got none",
    '{"event": "dropped", "at": 1, "count": 0}': "count must be a whole number from 1",
    changed(VERDICT, at=...): "at must be in a line of the event verdict",
    changed(VERDICT, at=-1): "at must be seconds from 0",
    changed(VERDICT, at="1"): "at must be seconds from 0 to 1e.11, got '1'",
    changed(VERDICT, kind="praised"): "kind must be one of accepted, ",
    changed(VERDICT, client=MOST_CLIENTS): "client must be a whole number below 1000000 or null, got 1000000",
    changed(VERDICT, client=True): "client must be a whole number",
    changed(VERDICT, client=1.5): "client must be a whole number",
    changed(VERDICT, version=2**54): "version must be a whole number from 0",
    changed(VERDICT, version=None): "version must be a whole number from 0",
    changed(VERDICT, staleness=-1): "staleness must be",
    changed(VERDICT, factor=-0.5): "factor must be a finite number, 0 or more, or null, got -0.5",
    changed(VERDICT, seconds=[1]): "seconds must be a finite number, 0 or more, or null, got list",
    changed(VERDICT, who="x" * 101): "who must be printable text of at most 100 characters",
    changed(VERDICT, reason="\x1b[2J"): "reason must be printable text of at most 500 characters",
    changed(VERDICT, reason="\ud800"): "reason must be printable text",
    changed(LOOK, seen=[0, 2]): "seen must be a list of at most 1000000 numbers 0 or 1, got list",
    changed(LOOK, seen=[0.0, 1]): "seen must be a list",
    changed(LOOK, seen=[[], 1]): "seen must be a list",
    changed(LOOK, live=[1]): "live must be a list of 2 numbers 0 or 1",
    changed(LOOK, present="01"): "present must be a list of 2 numbers",
    changed(LOOK, left_out=...): "left_out must be in a line of the event look",
    changed(LOOK, left_out=[0, 1, 1]): "left_out must be a list of 2",
    changed(LOOK, weights=[0.5]): "weights must be a list of 2 finite numbers or null",
    changed(LOOK, weights=[0.5, "1"]): "weights must be a list of 2",
    changed(LOOK, weights=[0.5, 10**400]): "weights must be a list of 2",
    changed(LOOK, stats=[1]): "stats must be an object",
    changed(LOOK, stats={"a": 0.5}): r"stats\[a\] must be a whole number",
    changed(LOOK, stats={str(k): 0 for k in range(101)}): "stats must be an object of at most 100 names",
    changed(LOOK, threshold=-1): "threshold must be a finite number",
    changed(LOOK, with_others=[0.5]): "with_others must be a list of 2 finite numbers or null",
    changed(LOOK, with_itself="no"): "with_itself must be a list of 2",
    changed(LOOK, group=[2, 2, 2]): "group must be a list of 2",
    changed(LOOK, queue=[6]): "queue must be null or an object with open, waiting, .*, got list",
    changed(LOOK, queue={"open": 6}): "queue must be null or an object with open, ",
    changed(LOOK, queue={**asdict(QUEUE), "paused": -1}): r"queue\[paused\] must be a whole number, 0 or more, got -1",
    changed(LOOK, queue={**asdict(QUEUE), "longest_wait": "1"}): r"queue\[longest_wait\] must be a finite number",
    " " * (LONGEST_LINE + 1): "line must have at most",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40])
def test_a_bad_line_is_refused_in_words(line):
    with pytest.raises(ValueError, match=f"^read_line: .*{BAD[line]}") as caught:
        read_line(line)
    assert len(str(caught.value)) < 1_000


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([VERDICT, LOOK]), st.data())
def test_any_line_is_read_or_refused(what, data):
    names = sorted(json.loads(changed(what)))
    line = changed(what, **data.draw(st.dictionaries(st.sampled_from(names), values, max_size=2)))
    try:
        read = read_line(line)
    except ValueError as error:
        assert str(error).startswith("read_line: ")
    else:
        assert isinstance(read, (Verdict, Look, Evaluation, Dropped))


def test_blank_lines_tell_nothing_and_unknown_fields_do_not_matter():
    assert read_line("\n") is None
    assert read_line(changed(VERDICT, host="a", pod=[1])) == VERDICT


def test_a_file_tells_what_the_server_did(tmp_path, device):
    path, update = tmp_path / "log.jsonl", torch.ones(8, device=device)
    plain = SecureAFL(torch.zeros(8, device=device), 4)
    with Watched(plain, [JsonLog(path)], every=60, names={1: "one\n\x1b"}) as server:
        for t in range(30):
            server.submit(t % 4, update / 0 if t == 20 else update, t if t < 25 else 0)
        server.evaluated(math.nan)
    told = [read_line(line) for line in path.read_text().splitlines()]
    stats, kinds = server.stats(), [verdict.kind for verdict in told if isinstance(verdict, Verdict)]
    for kind in ("accepted", "rejected", "stale"):
        assert kinds.count(kind) == stats[kind] > 0
    assert {verdict.who for verdict in told if isinstance(verdict, Verdict)} == {"", "one  "}
    (look,) = [look for look in told if isinstance(look, Look)]  # the one at the end
    assert look.stats == stats and look.version == server.version and look.seen.all()
    (evaluation,) = [line for line in told if isinstance(line, Evaluation)]
    assert math.isnan(evaluation.error)


def test_files_rotate_whole_and_only_so_many_stay(tmp_path):
    path = tmp_path / "log.jsonl"
    size = len(json_log.encode(json_log.verdict_fields(replace(VERDICT, version=100)))) + 1
    log = JsonLog(path, rotate=4 * size, keep=2)
    for version in range(100, 121):
        log.verdicts([replace(VERDICT, version=version)])
    log.close()
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    files = [tmp_path / name for name in ("log.jsonl.2", "log.jsonl.1", "log.jsonl")]
    told = [[read_line(line).version for line in file.read_text().splitlines()] for file in files]
    assert told == [[112, 113, 114, 115], [116, 117, 118, 119], [120]]
    log = JsonLog(path, rotate=1)
    log.verdicts([VERDICT, VERDICT])  # a batch stays together
    log.close()
    assert len(path.read_text().splitlines()) == 2


def test_a_broken_end_of_a_file_spoils_no_other_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "verd')  # killed within a write
    log = JsonLog(path)
    log.verdicts([VERDICT])

    class Full:
        """A disk that takes ten bytes more."""

        left = 10

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            self.left = 0
            return log_file.write(data[:10])

    log_file, log._file = log._file, Full()
    with pytest.raises(OSError, match="No space"):
        log.verdicts([VERDICT])
    log._file = log_file
    log.verdicts([replace(VERDICT, version=13)])
    log.close()
    lines = path.read_text().splitlines()
    assert [len(line) for line in lines[::2]] == [15, 10]
    assert [read_line(line).version for line in lines[1::2]] == [12, 13]


def test_a_rotation_that_fails_is_tried_again(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    log = JsonLog(path, rotate=1, keep=1)
    log.verdicts([VERDICT])
    with monkeypatch.context() as patch:
        patch.setattr(json_log.io, "FileIO", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        for _ in range(2):
            with pytest.raises(OSError, match="Too many"):
                log.verdicts([VERDICT])
    log.verdicts([replace(VERDICT, version=13)])
    log.close()
    assert read_line(path.read_text()).version == 13
    assert read_line((tmp_path / "log.jsonl.1").read_text()).version == 12


def test_a_batch_is_one_write(tmp_path):
    writes = []

    class Stream(io.StringIO):
        def write(self, text):
            writes.append(text)

    JsonLog(Stream()).verdicts([VERDICT] * 3)
    assert len(writes) == 1 and writes[0].count("\n") == 3


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JsonLog: target must be a path or a text stream, got 7"):
        JsonLog(7)
    for name in ("rotate", "keep"):
        with pytest.raises(ValueError, match=f"JsonLog: {name} must be a whole number, 1 or more, got 0"):
            JsonLog(tmp_path / "log", **{name: 0})
    assert not list(tmp_path.iterdir())
