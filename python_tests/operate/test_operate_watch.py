"""`secureafl watch`, views of log files, and the simulator's page."""

import io
import json
import math
import os
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import scenes
from rich.console import Console

from secureafl_ext.cli import main, simulate, watch
from secureafl_ext.operate import Look, Verdict, View, follow, serve
from secureafl_ext.operate.follow import Follow
from secureafl_ext.operate.json_log import JsonLog
from secureafl_ext.sim import federation, loop
from secureafl_ext.sim.live import Live
from secureafl_ext.sim.settings import Settings
from secureafl_ext.tasks import models

EVIL = "[red]\x1b[31m<b>"
TOKEN = "a-token-of-enough-length"
SMALL = {"clients": 6, "rounds": 12, "evaluations": 2, "batch": 2, "device": "cpu"}


@pytest.fixture
def small_data(monkeypatch):
    data = scenes.dataset("grey")
    monkeypatch.setattr(federation, "loaded", lambda name, _, __, device: data)
    monkeypatch.setitem(models.MODELS, "cnn", lambda shape, classes: scenes.small_net(data))


def told(client, kind="accepted", **more):
    return Verdict(1000.0, kind, client, **{"who": "", "version": 1, "staleness": 2, "factor": 1.5, **more})


def look(n, *without):
    some = np.ones(n, bool)
    return Look(1001.0, 2, {}, some, some, some, np.ones(n) / n, np.isin(np.arange(n), without), math.inf)


def write(path, *verdicts, **settings):
    log = JsonLog(path, **settings)
    log.verdicts(verdicts)
    log.look(look(3, 2))
    log.evaluated(1002.0, 3, 0.25)
    log.dropped(4)
    log.close()


def without_time(view):
    changing = ("id", "since", "now", "title")
    kept = {name: value for name, value in view.snapshot().items() if name not in changing}
    return json.loads(json.dumps(kept), parse_float=lambda text: round(float(text), 5))  # a log rounds weights


def test_a_log_gives_the_same_view_as_the_server(tmp_path):
    verdicts = [told(0), told(2, "rejected", who="two", reason="rejected: far"), told(None, "waiting")]
    direct, path = View(), tmp_path / "log"
    direct.verdicts(verdicts)
    direct.look(look(3, 2))
    direct.evaluated(1002.0, 3, 0.25)
    direct.dropped(4)
    write(path, *verdicts)
    with Follow(path, View()) as log:
        assert log.step() and not log.step()
        assert without_time(log.view) == without_time(direct)
        assert log.view.client(2)["history"] == direct.client(2)["history"]


def test_a_log_is_followed_as_it_grows_and_over_its_rotation(tmp_path):
    path, source = tmp_path / "log", tmp_path / "source"
    write(source, *[told(k % 3, version=k) for k in range(30)])
    data = source.read_bytes()
    path.write_bytes(b"")
    with Follow(path, View()) as log:
        for i in range(0, len(data), 100):  # in pieces that end within a line
            with open(path, "ab") as file:
                file.write(data[i : i + 100])
            log.step()
        assert log.view.snapshot()["totals"] == {"accepted": 30} and log.view.snapshot()["damaged"] == 0
        path.rename(tmp_path / "log.1")
        assert not log.step(), "between two files"
        write(path, told(1, "stale"))
        assert log.step() and log.view.snapshot()["totals"] == {"accepted": 30, "stale": 1}
        path.write_bytes(b"")  # cut: it starts again
        log.step()
        write(path, told(1, "stale"))
        assert log.step() and log.view.snapshot()["totals"] == {"accepted": 30, "stale": 2}


@pytest.mark.parametrize("checked", [True, False], ids=["by its name", "once it is open"])
@pytest.mark.parametrize("kind", ["a pipe", "a device without end", "a folder"])
def test_a_log_that_becomes_something_else_ends_the_reading(tmp_path, monkeypatch, kind, checked):
    path, ended = tmp_path / "log", []
    write(path, told(0))
    with Follow(path, View()) as log:
        log.step()
        path.unlink()
        {"a pipe": os.mkfifo, "a folder": os.mkdir}.get(kind, lambda path: path.symlink_to("/dev/zero"))(path)
        if not checked:  # it came after the look at its name
            monkeypatch.setattr(follow, "need_file", lambda path, most: None)

        def step(read):
            try:
                read()
            except (ValueError, OSError) as error:
                ended.append(str(error))

        for read in (log.step, lambda: Follow(path, View())):
            thread = threading.Thread(target=step, args=(read,), daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive(), "it waits for the end of something that has none"
        assert log.view.snapshot()["totals"] == {"accepted": 1}
    assert len(ended) == 2 and all("expected a file, got a" in said or "Is a directory" in said for said in ended)


def test_a_log_that_is_gone_again_is_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "log"
    write(path, told(0))
    with Follow(path, View()) as log:
        log.step()
        path.unlink()
        monkeypatch.setattr(log, "_is_replaced", lambda: True)
        assert not log.step()
        write(path, told(1))
        assert log.step() and log.view.snapshot()["totals"] == {"accepted": 2}


def test_damaged_lines_are_counted_and_the_others_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "LONGEST_LINE", 2_000)
    monkeypatch.setattr(follow, "PIECE", 500)
    path = tmp_path / "log"
    write(path, told(0), told(1))
    good = path.read_bytes()
    bad = [
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"event": "verdict"}',
        b'{"event": "look", "at": NaN}',
        b"x" * 10_000,
        b"[" * 1_500,
    ]
    path.write_bytes(good + b"\n".join(bad) + b"\n\n" + good)
    with Follow(path, View()) as log:
        log.step()
        state = log.view.snapshot()
        assert state["damaged"] == len(bad) and state["totals"] == {"accepted": 4}
        assert len(log._rest) == 0


@pytest.mark.parametrize(("name", "said"), [("", "expected a file, got a folder"), ("none", "No such file")])
def test_what_is_no_log_is_named(tmp_path, capsys, name, said):
    assert main.main(["watch", str(tmp_path / name), "--once"]) == 2
    assert said in capsys.readouterr().err


def test_once_prints_the_table_of_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    write(tmp_path / "log", told(0), told(2, "rejected", who="two"))
    assert main.main(["watch", str(tmp_path / "log"), "--once"]) == 0
    out = capsys.readouterr().out
    assert "1 left out, 2 counts" in out and "1 accepted, 1 rejected" in out
    first, second = [line for line in out.splitlines() if line.startswith("│")][:2]
    assert first.split()[1::2][:3] == ["2", "two", "left"] and "left out" in first
    assert second.split()[1] in ("0", "1")


def test_once_prints_the_table_of_a_page_that_wants_a_token(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    view = View("fleet")
    view.verdicts([told(7, "rejected", who=EVIL)])
    with serve(view, token=TOKEN) as page:
        assert main.main(["watch", page.url, "--once"]) == 2
        assert f"watch: {page.url} answered 401: it needs --token" in capsys.readouterr().err
        assert main.main(["watch", page.url, "--once", "--token", TOKEN]) == 0
        out = capsys.readouterr().out
        assert "fleet version 1" in out and "[red] [31m<b>" in out and "\x1b" not in out, "names steer no terminal"
        monkeypatch.setenv("SECUREAFL_TOKEN", TOKEN)
        assert main.main(["watch", page.url, "--once"]) == 0
    capsys.readouterr()
    assert main.main(["watch", page.url, "--once"]) == 2
    assert f"watch: no answer from {page.url}" in capsys.readouterr().err


class Other(BaseHTTPRequestHandler):
    """Another site."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(302 if self.server.body is None else 200)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(self.server.body or b"")

    def log_message(self, *_):
        pass


def test_another_site_is_no_page_and_no_redirect_is_followed():
    with HTTPServer(("127.0.0.1", 0), Other) as server:
        server.asked, url = [], f"http://127.0.0.1:{server.server_address[1]}/"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            for server.body in (b'{"clients": 1}', b"<html>", b"[" * 100_000, b"[]"):
                with pytest.raises(ValueError, match="watch: URL must lead to a page of SecureAFL, got another answer"):
                    watch.fetch_state(url, TOKEN)
            server.body = None
            with pytest.raises(ValueError, match="answered 302"):
                watch.fetch_state(url, TOKEN)
        finally:
            server.shutdown()
            thread.join()
        assert set(server.asked) == {f"/state.json?count={watch.ROWS}"}


def test_the_live_table_goes_on_when_the_server_fails(monkeypatch, capsys):
    view = View()
    view.verdicts([told(7)])
    answers = iter([view.snapshot(), OSError("watch: no answer"), view.snapshot()])
    tables = []

    def fetch(url, token):
        answer = next(answers, KeyboardInterrupt())
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(watch, "fetch_state", fetch)
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=lambda seconds: None))
    make = watch.table
    monkeypatch.setattr(watch, "table", lambda state, trouble="": tables.append(trouble) or make(state, trouble))
    assert main.main(["watch", "http://127.0.0.1:1/"]) == 0
    assert tables == ["", "watch: no answer; trying again", ""]
    assert "stopped watching" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_shows_the_suspicious_first(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    view = View()
    view.verdicts([told(k) for k in range(3)])
    view.look(look(3, 1))
    console = Console(width=width, file=io.StringIO())
    console.print(watch.table(view.snapshot()))
    text = console.file.getvalue()
    rows = [line.split()[1] for line in text.splitlines() if line.startswith("│")]
    assert rows == ["1", "0", "2"]
    assert "…" not in text and ("staleness" in text) == (width == 160)


def test_a_file_is_served_while_it_grows(tmp_path, monkeypatch):
    path, urls = tmp_path / "log", []
    write(path, told(0))
    ready = threading.Event()

    class Pause:
        """In place of an event: after the first pause the file grows, after the second one the reader ends."""

        def __init__(self):
            self.count = 0

        def wait(self, seconds):
            self.count += bool(seconds)
            if seconds and self.count == 1:
                write(path, told(1))
            elif seconds:
                with urllib.request.urlopen(f"{urls[0]}state.json") as answer:
                    assert json.load(answer)["totals"] == {"accepted": 2}
                ready.set()
                raise KeyboardInterrupt

    monkeypatch.setattr(watch, "threading", SimpleNamespace(Event=Pause))
    monkeypatch.setattr("builtins.print", lambda text, **_: urls.append(text.split()[0]))
    watch.watch(SimpleNamespace(what=str(path), host="127.0.0.1", port=0, token=None, once=False))
    assert ready.is_set() and not any(thread.name == "secureafl-page" for thread in threading.enumerate())


@pytest.mark.parametrize("defense", ["secureafl-support", "async-sgd", "demoa"])
def test_the_page_of_a_run_has_every_upload_and_changes_nothing(defense, small_data):
    settings = Settings(defense=defense, attack="gaussian", **SMALL)
    seen = []
    with Live("a run") as live:

        def look(rounds, point):
            live.look(rounds, point)
            seen.append((live.view.snapshot(), rounds))

        watched = loop.run(settings, look=look)
        state, rounds = seen[-1]
        heat = live.similarity([*state["timeline"]["client"][:1], 10**6])
    plain = loop.run(settings)
    assert [point.error for point in watched.curve] == [point.error for point in plain.curve]
    assert len(seen) == 2 and state["version"] == 12 == sum(state["totals"].values())
    assert state["totals"]["accepted"] == int(rounds.accepted.sum()) and len(state["errors"]["at"]) == 2
    names = {row["client"]: row["name"] for row in state["clients"]["rows"]}
    malicious = set(rounds.federation.malicious.tolist())
    assert all(name == ("malicious" if client in malicious else "honest") for client, name in names.items() if name)
    assert sum(row["counts"].get("accepted", 0) for row in state["clients"]["rows"]) == state["totals"]["accepted"]
    times = state["timeline"]["at"]
    assert times == sorted(times) and times[-1] <= time.time()
    assert (state["weighs"] is not None) == (defense != "async-sgd")
    if defense == "secureafl-support":
        assert heat.shape == (2, 2) and np.isnan(heat[1]).all() and np.isnan(heat[:, 1]).all()
    else:
        assert heat is None


def test_run_serves_its_page(tmp_path, small_data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pages = []
    close = View.close

    def ended(view):
        close(view)
        with urllib.request.urlopen(f"{pages[0]}state.json") as answer:
            pages.append(json.load(answer))

    monkeypatch.setattr(View, "close", ended)
    monkeypatch.setattr(simulate, "say", lambda text: pages.append(text.removeprefix("page: ")))
    flags = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    assert main.main(["run", "--watch", "0", *flags]) == 0
    assert pages[-1]["ended"] and pages[-1]["version"] == 12 and "none against" in pages[-1]["title"]
    assert main.main(["run", "--watch", "0", "--processes", "2", *flags]) == 2
    assert "--watch needs --processes 1, got 2" in capsys.readouterr().err
    assert main.main(["run", "--watch", "70000", *flags]) == 2
    assert "serve: port must be a whole number in 0..65535, got 70000" in capsys.readouterr().err
