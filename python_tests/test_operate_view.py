"""View: the state of the live page is right, plain, and of bounded size; `serve` answers only those who may ask."""

import http.client
import json
import math
import socket
import sys
import threading
import time

import numpy as np
import pytest

from secureafl_ext.operate import KINDS, Look, Verdict, View, fleet, serve
from secureafl_ext.operate.access import Access
from secureafl_ext.operate.buckets import COUNT, Buckets
from secureafl_ext.operate.fleet import ALL_HISTORIES, HISTORY, MOST_CLIENTS
from secureafl_ext.operate.view import MOST_ERRORS, MOST_NAMED, MOST_ROWS, TIMELINE

EVIL = '<img src=x onerror="document.title=1">'
TOKEN = "a-token-of-enough-length"


def told(client, kind="accepted", at=1000.0, **more):
    return Verdict(at, kind, client, **{"who": "", "version": 1, "staleness": 2, "factor": 1.5, **more})


def looked(n, left_out=(), at=1000.0, version=5, weights=None, **masks):
    without = np.isin(np.arange(n), list(left_out))
    given = {name: np.asarray(masks.get(name, np.ones(n, bool))) for name in ("seen", "live", "present")}
    weights = np.where(without, 0.0, 1 / n) if weights is None else np.asarray(weights)
    return Look(at, version, {}, **given, weights=weights, left_out=without, threshold=math.inf)


def plain(view, **arguments):
    """A snapshot, as JSON gives it back."""
    return json.loads(json.dumps(view.snapshot(**arguments), allow_nan=False))


def order(view, **arguments):
    return [row["client"] for row in plain(view, **arguments)["clients"]["rows"]]


def test_every_verdict_counts_for_its_client():
    view = View("a fleet")
    view.verdicts([told(3, who="three"), told(3, "rejected", staleness=4, factor=9.0, reason="rejected: far")])
    view.verdicts([told(0, "joined", staleness=None, factor=None), told(None, "waiting", staleness=None)])
    state = plain(view)
    assert (state["title"], state["version"], state["clients"]["total"]) == ("a fleet", 1, 2)
    assert state["totals"] == {"accepted": 1, "rejected": 1, "joined": 1, "waiting": 1}
    row = state["clients"]["rows"][0]
    assert (row["client"], row["name"], row["counts"]) == (3, "three", {"accepted": 1, "rejected": 1})
    assert (row["staleness"], row["factor"], row["weight"], row["state"]) == (3.0, 9.0, None, "new")
    history = view.client(3)["history"]
    assert [entry["kind"] for entry in history] == ["rejected", "accepted"]
    assert history[0] == {
        "at": 1000.0,
        "kind": "rejected",
        "version": 1,
        "staleness": 4,
        "factor": 9.0,
        "reason": "rejected: far",
    }
    assert view.client(1) is None and view.client(-1) is None and view.client(10**8) is None


def test_the_state_of_a_client_is_that_of_the_last_look():
    view, n = View(), 6
    seen = np.arange(n) != 5
    live = np.isin(np.arange(n), [0, 1, 2])
    present = np.isin(np.arange(n), [0, 1])
    view.verdicts([told(4, "left"), told(5, "joined")])
    view.look(looked(n, left_out=[1], seen=seen, live=live, present=present))
    states = {row["client"]: row["state"] for row in plain(view)["clients"]["rows"]}
    assert states == {0: "counts", 1: "left out", 2: "on probation", 3: "expired", 4: "left", 5: "new"}
    assert plain(view)["states"]["left out"] == 1
    view.verdicts([told(4)])
    assert view.client(4)["state"] == "new", "it has come back, and no look has seen it yet"


def test_the_moment_of_naming_is_the_first_look_that_leaves_the_client_out():
    view = View()
    view.verdicts([told(2, who="culprit")])
    for k, without in enumerate([(), (2,), (2, 0), (2,)]):
        view.look(looked(4, without, at=1000.0 + k, version=10 * k))
    named = plain(view)["named"]
    assert [(m["client"], m["name"], m["at"], m["version"], m["now"]) for m in named] == [
        (0, "", 1002.0, 20, False),
        (2, "culprit", 1001.0, 10, True),
    ]
    found = view.client(2)
    assert (found["named_at"], found["named_version"], found["left_out"]) == (1001.0, 10, 0.75)
    assert view.client(1)["named_at"] is None


def test_the_suspicious_come_first():
    view, n = View(), 6
    view.verdicts(
        [told(0)] * 4 + [told(1, "rejected"), told(1)] + [told(2, "garbage")] * 3 + [told(3), told(4), told(5)]
    )
    view.look(looked(n, [5]))
    view.look(looked(n, [4], weights=[0.3, 0.2, 0.2, 0.1, 0.0, 0.2]))
    # Left out now; left out before; share of refused uploads; low weight.
    assert order(view) == [4, 5, 2, 1, 3, 0]
    assert view.suspects() == [4, 5, 2, 1, 3, 0] and view.suspects(2, 1) == [4, 5, 0]
    assert order(view, start=1, count=2) == [5, 2] and order(view, start=99) == []
    assert order(view, search="LEFT out") == [4] and order(view, search="3") == [3]


def test_a_forgotten_number_starts_anew():
    view = View()
    view.verdicts([told(1, "rejected", who="old"), told(0)])
    view.look(looked(2, [1]))
    view.verdicts([told(1, "forgotten", who="old")])
    assert order(view) == [0] and view.client(1) is None
    view.verdicts([told(1, who="new")])
    found = view.client(1)
    assert (found["name"], found["counts"], found["named_at"], len(found["history"])) == (
        "new",
        {"accepted": 1},
        None,
        1,
    )
    assert [(moment["name"], moment["now"]) for moment in plain(view)["named"]] == [("old", False)]


def sizes(view):
    """How much a view holds, counted."""
    fleet = view.fleet
    arrays = sum(values.nbytes for values in vars(fleet).values() if isinstance(values, np.ndarray))
    series = view._series
    buckets = sum(v.nbytes for part in (series.sums, series.largest, series.last) for v in part.values())
    lists = [len(view._timeline), len(view._recent), len(view._errors), len(view._named), len(fleet.names)]
    return [arrays, buckets, sum(map(len, fleet.histories.values())), len(fleet.histories), *lists]


def fill(view, n, laps, uploads):
    """Sizes after every lap."""
    found = []
    for lap in range(laps):
        for k in range(4):
            at = 1000.0 + 1000 * lap + 250 * k
            some = range(k * uploads // 4, (k + 1) * uploads // 4)
            view.verdicts([told(i % n, "rejected", at + i / uploads, reason=f"reason {i}") for i in some])
            view.look(looked(n, range(k * 100), at + 250))
            for i in range(MOST_ERRORS // 4):
                view.evaluated(at + i, k, 0.5)
        found.append(sizes(view))
    return found


def check_sizes(view, n, found, entries_at_most):
    assert found[-2] == found[-1], "as many again add nothing"
    arrays, buckets, entries, histories, timeline, _, errors, named, names = found[-1]
    assert arrays < 10e6 and buckets < 1e5
    assert entries <= entries_at_most and histories == names == n
    assert timeline == TIMELINE and errors <= MOST_ERRORS and named <= MOST_NAMED
    state = plain(view)
    assert len(state["clients"]["rows"]) == MOST_ROWS and len(json.dumps(state)) < 400_000


def test_memory_does_not_grow_with_uploads(monkeypatch):
    monkeypatch.setattr(fleet, "ALL_HISTORIES", 2**15)
    view, n = View(), 10_000
    found = fill(view, n, laps=4, uploads=n)
    check_sizes(view, n, found, 2**15)
    assert plain(view)["totals"]["rejected"] == 4 * n


@pytest.mark.slow
def test_memory_does_not_grow_in_a_million_uploads():
    view, n = View(), 10_000
    check_sizes(view, n, fill(view, n, laps=5, uploads=200_000), ALL_HISTORIES)


def test_few_clients_have_long_histories_and_many_share_the_room():
    view = View()
    view.verdicts([told(0, version=k) for k in range(500)])
    assert [entry["version"] for entry in view.client(0)["history"]] == list(range(499, 499 - HISTORY, -1))
    view.verdicts([told(k) for k in range(4096)])
    kept = ALL_HISTORIES // 4096
    assert len(view.client(0)["history"]) == kept, "one flood does not push out the history of others"
    view.verdicts([told(0)] * 1000)
    assert len(view.client(0)["history"]) == kept and len(view.client(4095)["history"]) == 1


def test_numbers_that_no_server_has_are_counted_and_not_kept():
    view = View()
    view.verdicts([told(MOST_CLIENTS), told(10**15), told(-1), told(MOST_CLIENTS - 1)])
    view.verdicts([told(0, at=math.nan), told(0, at=1e300), told(0, at=-1.0), told(0, "no such kind")])
    state = plain(view)
    assert state["totals"] == {"accepted": 4} and state["clients"]["total"] == 1 and state["damaged"] == 4
    assert state["timeline"]["client"] == [MOST_CLIENTS - 1]
    with pytest.raises(ValueError, match=r"View.look: look must have one entry per client in every array, got \[3, 2"):
        view.look(Look(1.0, 1, {}, np.ones(3), np.ones(2), np.ones(3), np.ones(3), None, 0.0))
    assert plain(view)["states"]["counts"] == 0, "nothing of it was taken"


def test_names_and_reasons_are_cut():
    view = View("t" * 1000)
    view.verdicts([told(0, "failed", who=EVIL + "x" * 10_000, reason=EVIL + "y" * 10_000)])
    found = view.client(0)
    assert found["name"].startswith(EVIL) and len(found["name"]) < 200 > len(found["history"][0]["reason"])
    assert len(plain(view)["title"]) < 200


@pytest.mark.parametrize("seconds", [1.0, 1e3, 1e7])
def test_buckets_hold_everything_whatever_the_time(seconds):
    buckets = Buckets(["count"], ["high"], ["last"])
    for k in range(1000):
        i = buckets.bucket(5000.0 + seconds * k / 1000)
        buckets.sums["count"][i] += 1
        buckets.largest["high"][i] = np.fmax(buckets.largest["high"][i], k)
        buckets.last["last"][i] = k
    used = buckets.used()
    assert COUNT / 2 <= used <= COUNT or seconds == 1.0
    assert buckets.sums["count"].sum() == 1000 and buckets.sums["count"][used:].sum() == 0
    assert np.nanmax(buckets.largest["high"]) == buckets.last["last"][used - 1] == 999
    assert (np.diff(buckets.times()) > 0).all()
    rate = buckets.sums["count"][: used - 1] / buckets.seconds()[: used - 1]
    assert rate.mean() == pytest.approx(1000 / seconds, rel=0.05)


def test_series_have_rates_staleness_threshold_and_errors():
    view = View()
    view.verdicts([told(0, at=1000 + i / 10, staleness=i % 3) for i in range(600)])
    view.look(Look(1060.0, 600, {}, *[np.ones(2, bool)] * 3, np.ones(2) / 2, None, 3.5))
    view.evaluated(1060.0, 600, 0.25)
    view.evaluated(1061.0, 601, math.inf)
    state = plain(view)
    series = state["series"]
    assert np.mean(series["rates"]["accepted"][:-3]) == pytest.approx(10, rel=0.05)
    known = [value for value in series["staleness"] if value is not None]
    assert np.mean(known) == pytest.approx(1, abs=0.1) and max(filter(None, series["oldest"])) == 2
    assert [value for value in series["threshold"] if value is not None] == [3.5] and state["threshold"] == 3.5
    assert len(series["at"]) == len(series["rates"]["accepted"]) == len(series["threshold"])
    assert state["errors"] == {"at": [1060.0, 1061.0], "version": [600, 601], "error": [0.25, None]}
    assert state["weighs"] is False


def test_the_rate_is_that_of_the_last_seconds():
    view, now = View(), time.time()
    view.verdicts([told(0, at=now - 5 + i / 20) for i in range(100)])
    assert 5 < plain(view)["rate"] < 30
    old = View()
    old.verdicts([told(0, at=now - 500 + i / 20) for i in range(100)])
    assert plain(old)["rate"] == 0


def test_a_reader_gets_only_what_is_new():
    view = View()
    view.verdicts([told(0), told(1)])
    first = plain(view)
    assert first["timeline"]["client"] == [0, 1] and first["since"] == view.since()
    view.verdicts([told(2, "rejected")])
    assert view.since() != first["since"]
    timeline = plain(view, since=first["since"])["timeline"]
    assert timeline["client"] == [2] and list(KINDS)[timeline["kind"][0]] == "rejected"
    for other in (View().since(), "", "x.y", f"{view.id}.-1", f"{view.id}.{'9' * 5000}"):
        assert plain(view, since=other)["timeline"]["client"] == [0, 1, 2], "of another run, or damaged"
    for change in (lambda: view.dropped(3), view.damaged, lambda: view.evaluated(1.0, 1, 0.5), view.close):
        before = view.since()
        change()
        assert view.since() != before
    state = plain(view)
    assert (state["dropped"], state["damaged"], state["ended"]) == (3, 1, True)


# HTTP


class Similar:
    """In place of a Watched server."""

    def __init__(self):
        self.calls = 0

    def similarity(self, clients):
        self.calls += 1
        return np.full((len(clients), len(clients)), np.nan) if self.calls > 1 else np.eye(len(clients))


@pytest.fixture(scope="module")
def view():
    made = View()
    made.verdicts([told(0), told(1, "rejected", who=EVIL, reason=EVIL)])
    return made


@pytest.fixture(scope="module")
def page(view):
    with serve(view, Similar()) as made:
        yield made


def ask(page, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection(page.host, page.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_the_page_and_its_data_are_answered(page, view):
    status, body, headers = ask(page)
    assert status == 200 and body.startswith(b"<!DOCTYPE html>") and headers["Content-Type"].startswith("text/html")
    for name in ("app.js", "drawing.js", "uPlot.iife.min.js", "style.css", "uPlot.min.css", "icon.svg"):
        assert f'"{name}"'.encode() in body and ask(page, f"/{name}")[0] == 200
    state = json.loads(ask(page, "/state.json?count=1&search=rej&start=0")[1])
    assert state["clients"]["found"] == 0
    state = json.loads(ask(page, "/state.json?count=1")[1])
    assert [row["name"] for row in state["clients"]["rows"]] == [EVIL] and state["clients"]["total"] == 2
    assert ask(page, f"/state.json?since={state['since']}")[:2] == (204, b"")
    view.verdicts([told(0)])
    assert ask(page, f"/state.json?since={state['since']}")[0] == 200
    assert json.loads(ask(page, "/client/1.json")[1])["history"][0]["reason"] == EVIL
    assert json.loads(ask(page, "/client/7.json")[1]) == {"gone": True}


def test_similarities_are_read_at_most_every_two_seconds(page, monkeypatch):
    first = json.loads(ask(page, "/similarity.json")[1])
    assert first["clients"] == [1, 0] and first["names"] == [EVIL, ""] and first["cosines"] == [[1.0, 0.0], [0.0, 1.0]]
    assert json.loads(ask(page, "/similarity.json")[1]) == first and page.watched.calls == 1
    monkeypatch.setattr(sys.modules[serve.__module__], "HEAT_SECONDS", 0.0)
    assert json.loads(ask(page, "/similarity.json")[1])["cosines"] == [[None, None]] * 2
    monkeypatch.setattr(page, "watched", None)
    assert json.loads(ask(page, "/similarity.json")[1])["clients"] == []


def test_every_answer_forbids_foreign_scripts_frames_and_guesses_of_types(page):
    for path in ("/", "/app.js", "/state.json", "/nothing"):
        headers = ask(page, path)[2]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert "http" not in policy and "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers


BAD_PATHS = (
    "/../serve.py",
    "/%2e%2e/serve.py",
    "//etc/passwd",
    "/page/",
    "/uPlot.LICENSE/",
    "/client/.json",
    "/client/-1.json",
    "/client/1.json/",
    "/client/" + "9" * 30 + ".json",
    "/client/%D9%A1.json",
    "/index.html%00",
)


@pytest.mark.parametrize("path", BAD_PATHS)
def test_no_other_path_leads_anywhere(page, path):
    status, body, _ = ask(page, path)
    assert (status, body) == (404, b"not found\n")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/", "POST", 405),
        ("/", "HEAD", 405),
        ("/", "DELETE", 405),
        ("/" + "x" * 5_000, "GET", 414),
        ("/" + "x" * 70_000, "GET", 414),
        ("/state.json?" + "&".join("abcdefghijklmnop"), "GET", 400),
    ],
)
def test_bad_requests_are_refused(page, path, method, status):
    answer, body, headers = ask(page, path, method)
    assert answer == status and len(body) < 100 and "Content-Security-Policy" in headers


@pytest.mark.parametrize(
    "query", ["start=-1", "start=x", "count=99999999999", "count=1e9", "search=%00%ff", "since=1.2.3"]
)
def test_damaged_queries_count_as_none(page, query):
    status, body, _ = ask(page, f"/state.json?{query}")
    assert status == 200 and len(json.loads(body)["clients"]["rows"]) == (0 if "search" in query else 2)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[::2]", "10.0.0.1", "[x"]
)
def test_another_name_of_this_machine_is_refused(page, host):
    assert ask(page, "/state.json", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:5"])
def test_names_of_loopback_are_ours_behind_any_tunnel(page, host):
    assert ask(page, "/state.json", Host=host)[0] == 200


def test_a_token_is_needed_once_and_then_a_cookie(view):
    with serve(view, token=TOKEN) as page:
        assert ask(page)[0] == ask(page, "/app.js")[0] == ask(page, "/state.json?token=" + TOKEN)[0] == 401
        assert ask(page, f"/?token={TOKEN[:-1]}")[0] == ask(page, "/?token=")[0] == 401
        status, _, headers = ask(page, f"/?token={TOKEN}")
        cookie = headers["Set-Cookie"]
        assert status == 303 and headers["Location"] == "/" and TOKEN not in cookie
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and str(page.port) in cookie
        assert ask(page, "/state.json", Cookie=cookie.partition(";")[0])[0] == 200
        assert ask(page, "/state.json", Authorization=f"Bearer {TOKEN}")[0] == 200
        forged = {"Cookie": cookie.partition("=")[0] + "=" + TOKEN}, {"Cookie": "\u00e9;=;;"}
        for wrong in (
            *forged,
            {"Authorization": TOKEN},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer \u00e9"},
        ):
            assert ask(page, "/state.json", **wrong)[0] == 401
        assert ask(page, "/", Host="evil.example")[0] == 421 and ask(page, "/", Host="10.0.0.1")[0] == 401
        assert TOKEN not in page.url


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "serve: host must be a loopback address if there is no token, got '0.0.0.0'"),
        ({"host": ""}, "loopback address if there is no token, got ''"),
        ({"host": "localhost.evil.example"}, "loopback address if there is no token"),
        ({"token": "short"}, "serve: token must have 16 to 200 letters, digits or . _ ~ -, got 5 characters"),
        ({"token": "x" * 16 + ";"}, "token must have 16 to 200 letters"),
        ({"token": ""}, "token must have 16 to 200 letters, digits or . _ ~ -, got 0 characters"),
        ({"port": 65536}, "serve: port must lie in 0..65535, got 65536"),
    ],
)
def test_unsafe_settings_are_errors(view, settings, said):
    with pytest.raises(ValueError) as error:
        serve(view, **settings)
    assert said in str(error.value)


def test_another_host_is_allowed_with_a_token():
    access = Access("0.0.0.0", TOKEN, ["fleet.example"])
    assert (
        access.is_for_us("fleet.example:80") and access.is_for_us("10.1.2.3") and not access.is_for_us("evil.example")
    )


def test_a_port_in_use_is_named(view, page):
    with pytest.raises(OSError, match=f"serve: cannot listen on 127.0.0.1, port {page.port}: "):
        serve(view, port=page.port)


def test_a_flood_of_connections_is_cut_and_then_the_page_answers_again(view, monkeypatch):
    module = sys.modules[serve.__module__]
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(module, "LONGEST_CONNECTION", 0.5)
    with serve(view) as page:
        flood = [socket.create_connection((page.host, page.port), timeout=30) for _ in range(12)]
        try:
            for connection in flood[:4]:
                connection.sendall(b"GET / HT")  # and no more
            for connection in flood:
                assert connection.recv(100) == b"", "closed, at once or when its time is over"
        finally:
            for connection in flood:
                connection.close()
        while page._open:  # until their threads have noticed
            time.sleep(0.001)
        assert ask(page)[0] == 200


def test_closing_leaves_no_thread_and_no_connection(view):
    before = set(threading.enumerate())
    page = serve(view)
    idle = socket.create_connection((page.host, page.port), timeout=30)
    idle.sendall(b"GET / HTTP/1.1\r\nHost:")
    assert ask(page)[0] == 200
    page.close()
    page.close()
    assert idle.recv(100) == b""
    idle.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(OSError):
        ask(page)


def test_a_failure_inside_is_an_answer(page, caplog, monkeypatch):
    monkeypatch.setattr(page, "answer", lambda path, query: 1 / 0)
    status, body, _ = ask(page)
    assert (status, body) == (500, b"the server failed, see its log\n") and "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert ask(page)[0] == 200
