"""`secureafl watch` on addresses, answers and logs of any kind: one line, within a time and a memory."""

import contextlib
import copy
import json
import socket
import threading
import time
from types import SimpleNamespace

import hostile
import numpy as np
import pytest

from secureafl_ext.cli import main, watch
from secureafl_ext.operate import Verdict, View
from secureafl_ext.operate.json_lines import LONGEST_LINE, LONGEST_SHORT, MOST_CLIENTS, read_line
from secureafl_ext.operate.json_log import encode, verdict_fields

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def answering(*pieces, pause=0.0):
    """The address of a server that gives everyone these bytes, with a pause before each piece but the first."""
    over = threading.Event()

    def run(listening):
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(10_000)
                for number, piece in enumerate(pieces):
                    if number and over.wait(pause):
                        return
                    connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run, args=(listening,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def refused(capsys, url) -> str:
    """The one line that `watch` says."""
    assert main.main(["watch", url, "--once"]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("secureafl: watch: ") and said.err.count("\n") == 1
    assert said.err[:-1].isprintable() and len(said.err) < 500
    return said.err


def page(**changed):
    view = View("fleet")
    view.verdicts([Verdict(1000.0, "accepted", 0, "", 1, 2, 1.5)])
    return json.loads(json.dumps(view.snapshot())) | changed


def answer(state) -> bytes:
    return OK + b"\r\n" + json.dumps(state).encode()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:abc/", "Port could not be cast to integer value as 'abc'"),
        ("http://127.0.0.1:99999/", "Port out of range 0-65535"),
        ("http://a b/", "can't contain control characters"),
        ("http://[::1/", "Invalid IPv6 URL"),
        ("http:///", "it names no host"),
        ("http:", "it names no host"),
        (f"http://{'a' * 64}/", "label too long"),
    ],
)
def test_an_address_that_is_none_is_named(capsys, url, why):
    said = refused(capsys, url)
    assert f"URL must be like http://HOST:PORT/, got '{url[:60]}" in said and why in said


BROKEN = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH\x1b[2J\r\n",
    "a status that is no number": b"HTTP/1.1 abc\r\n\r\n",
    "a status line without end": b"HTTP/1.1 200 " + b"x" * 70_000,
    "a header without end": OK + b"A: " + b"x" * 70_000,
    "101 headers": OK + b"".join(b"A%d: b\r\n" % i for i in range(101)) + b"\r\n",
    "no size of a chunk": CHUNKED + b"zz\r\n{}\r\n",
    "half a chunk": CHUNKED + b"ff\r\n{}",
    "less than it said": OK + b"Content-Length: 100\r\n\r\n{}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http_is_one_line(capsys, name):
    with answering(BROKEN[name]) as url:
        assert url in refused(capsys, url)


ROW = page()["clients"]["rows"][0]
WRONG = {
    "clients that are a number": page(clients=1),
    "clients without rows": page(clients={}),
    "rows of nothing": page(clients={"rows": [{}]}),
    "a row that is text": page(clients={"rows": ["x"]}),
    "states in a list": page(states=[]),
    "totals in a list": page(totals=[1]),
    "no title": {name: value for name, value in page().items() if name != "title"},
    "a rate in words": page(rate="fast"),
    "a rate of 400 digits": page(rate=10**400),
    "a time far away": page(clients={"rows": [ROW | {"named_at": 1e300, "named_version": 1}]}),
    "a factor in words": page(clients={"rows": [ROW | {"factor": "x"}]}),
    "counts in a list": page(clients={"rows": [ROW | {"counts": []}]}),
    "a list": [page()],
    "null": None,
}


@pytest.mark.parametrize("name", WRONG)
def test_json_that_is_no_state_of_a_page_is_one_line(capsys, name):
    with answering(answer(WRONG[name])) as url:
        said = refused(capsys, url)
    assert said == f"secureafl: watch: URL must lead to a page of SecureAFL, got another answer from {url}\n"


def test_a_state_of_many_rows_and_long_names_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    state = page(title="x" * 10**6, clients={"rows": [ROW] * 10_000})
    with answering(answer(state)) as url:
        assert main.main(["watch", url, "--once"]) == 0
    out = capsys.readouterr().out
    assert len(out) < 10_000 and out.count("\n│") == watch.ROWS


@pytest.mark.parametrize("start", [b"", OK, OK + b"\r\n", CHUNKED, OK + b"A: "], ids=str)
def test_an_answer_that_trickles_ends(capsys, monkeypatch, start):
    monkeypatch.setattr(watch, "SECONDS", 0.5)
    with answering(start, *[b"1"] * 1_000, pause=0.1) as url:
        began = time.monotonic()
        assert f"no answer from {url}: it was not whole after" in refused(capsys, url)
        assert time.monotonic() - began < 30, "the answer takes 100 s"


def test_the_live_table_goes_on_after_any_answer(monkeypatch, capsys):
    answers = iter([answer(page()), BROKEN["no HTTP"], answer(page(clients=1)), answer(page())])
    tables, ask, make = [], watch.ask, watch.table

    def asked(url, token):
        data = next(answers, None)
        if data is None:
            raise KeyboardInterrupt
        with answering(data) as url:
            return ask(url, token)

    def table(state, trouble=""):
        made = make(copy.deepcopy(state), trouble)
        tables.append(trouble)
        return made

    monkeypatch.setattr(watch, "ask", asked)
    monkeypatch.setattr(watch, "table", table)
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=lambda _: None, strftime=time.strftime))
    assert main.main(["watch", "http://127.0.0.1:1/"]) == 0
    troubles = [trouble for trouble in tables if trouble]
    assert len(troubles) == 2 and all(trouble.endswith("; trying again") for trouble in troubles)
    assert "stopped watching" in capsys.readouterr().err


EXPENSIVE = {
    "lists": ("[],", "at most 10000 quotes, brackets and braces"),
    "objects": ("{},", "at most 10000 quotes, brackets and braces"),
    "texts": ('"ab",', "at most 10000 quotes, brackets and braces"),
    "numbers": ("999,", "and 8010000 commas, got 8 and 10000001"),
}


@pytest.mark.parametrize("event", ["look", "verdict"])
@pytest.mark.parametrize("name", EXPENSIVE)
def test_a_line_of_a_log_costs_no_more_than_a_few_times_its_length(name, event):
    part, said = EXPENSIVE[name]
    count = 10_000_000 if name == "numbers" else 2_000_000
    line = f'{{"event":"{event}","x":[{part * count}0]}}'
    assert len(line) < LONGEST_LINE
    with hostile.at_most(2 * len(line) / 1e6), pytest.raises(ValueError, match=f"read_line: line must have .*{said}"):
        read_line(line)


def test_only_a_look_may_be_long():
    fields = verdict_fields(Verdict(1.0, "accepted", 0, "\U0001f600" * 100, 1, reason="\U0001f600" * 500))
    assert len(encode(fields)) < LONGEST_SHORT / 10, "of the longest verdict"
    told = read_line(encode({**fields, "more": [0] * 50_000}))
    assert told.who == fields["who"] and told.reason == fields["reason"], "what collects logs may add fields"
    with pytest.raises(ValueError, match=f"line of the event verdict must have at most {LONGEST_SHORT} characters"):
        read_line(encode({**fields, "more": [0] * 100_000}))
    with pytest.raises(ValueError, match="line must be JSON, got '") as caught:
        read_line("\x80" * 1_000_000)
    assert len(str(caught.value)) < 200


def test_a_look_at_the_largest_fleet_is_read():
    flags, weights, means = (f"[{','.join([text] * MOST_CLIENTS)}]" for text in ("1", "1.23457e-06", "-1.23e-05"))
    lists = {name: flags for name in ("seen", "live", "present", "left_out")} | {"weights": weights}
    lists |= {name: means for name in ("with_others", "with_itself", "group")}
    stats = encode({name * 10: 2**53 for name in map(chr, range(97, 123))})
    fields = {"at": "1.5", "version": "3", "stats": stats, "threshold": "null", **lists, "queue": "null"}
    line = f'{{"event":"look",{",".join(f"{name!r}:{text}" for name, text in fields.items())}}}'.replace("'", '"')
    assert LONGEST_LINE / 2 < len(line) < LONGEST_LINE
    look = read_line(line)
    assert look.seen.all() and len(look.seen) == MOST_CLIENTS and np.allclose(look.group, -1.23e-5)
