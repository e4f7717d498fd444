"""serve: the live page over HTTP, for those who may ask and for nobody else."""

import http.client
import json
import re
import socket
import sys
import threading
import time

import numpy as np
import pytest
from places import ROOT

from secureafl_ext.operate import Verdict, View, serve
from secureafl_ext.operate.access import Access

EVIL = '<img src=x onerror="document.title=1">'
TOKEN = "a-token-of-enough-length"


def told(client, kind="accepted", **more):
    return Verdict(1000.0, kind, client, **{"who": "", "version": 1, "staleness": 2, "factor": 1.5, **more})


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
        ({"port": 65536}, "serve: port must be a whole number in 0..65535, got 65536"),
        ({"port": "80"}, "serve: port must be a whole number in 0..65535, got '80'"),
        ({"port": 80.0}, "serve: port must be a whole number in 0..65535, got 80.0"),
        ({"port": None}, "serve: port must be a whole number in 0..65535, got None"),
        ({"token": TOKEN.encode()}, "serve: token must be text or None, got bytes"),
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


def test_the_code_of_the_guide_runs_as_it_stands(capsys):
    text = (ROOT / "docs" / "guides" / "watch.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(block, "watch.md", "exec"), names)
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")
    state = names["view"].snapshot()
    assert state["totals"] == {"accepted": 1} and state["errors"]["error"] == [0.42] and state["ended"]
