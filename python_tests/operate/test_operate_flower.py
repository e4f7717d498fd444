"""The live view of a Flower loop, and the page of the Flower example."""

import json
import sys
import urllib.request
from dataclasses import asdict

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

import fleets
import torch
from flwr.app import RecordDict
from places import ROOT

from secureafl_ext.audit import verify
from secureafl_ext.defenses import make
from secureafl_ext.flower import Event
from secureafl_ext.operate import View, Watched

EXAMPLE = ROOT / "examples" / "flower"


@pytest.mark.parametrize("defense", ["secureafl", "async-sgd"])
def test_a_loop_tells_the_view_about_every_node(monkeypatch, defense):
    clock, view = fleets.simulated(monkeypatch), View()
    nodes = {101: fleets.honest(), 102: fleets.honest(1.5), 103: fleets.says(RecordDict())}
    flat = fleets.Layout(fleets.START).flatten(fleets.START)
    server = fleets.server() if defense == "secureafl" else make(defense, flat, 3, fleets.LR, 50)
    with Watched(server, [view], every=0) as watched:
        loop, grid, _ = fleets.start(nodes, clock, watched, watch=watched.event)
        watched.queue = loop.queue
        loop.run(12)
        del grid.nodes[102]
        loop.run(20)
        watched.evaluated(0.5)
        assert watched.flush()
        if defense == "secureafl":
            view.look(watched.look())
    state = view.snapshot()
    assert state["queue"] == ({**asdict(loop.queue()), "waiting_bytes": 0} if defense == "secureafl" else None)
    rows = {row["name"]: row for row in state["clients"]["rows"]}
    assert set(rows) == {"101", "102", "103"} and state["version"] == 20
    uploads = state["totals"].get("accepted", 0) + state["totals"].get("rejected", 0)
    assert uploads == 20 and state["errors"]["error"] == [0.5]
    assert rows["103"]["counts"]["garbage"] >= 5 and rows["102"]["state"] == "left"
    assert view.client(rows["103"]["client"])["history"][0]["reason"]
    named = {moment["name"] for moment in state["named"]}
    assert named <= {"103"} and order_of(state)[0] == "103"


def order_of(state):
    return [row["name"] for row in state["clients"]["rows"]]


@pytest.fixture
def app(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from attacked import observed

    yield observed
    for name in [name for name in sys.modules if name.partition(".")[0] == "attacked"]:
        del sys.modules[name]


def test_the_example_has_a_page_only_if_a_port_is_given(app, capsys, monkeypatch):
    server = fleets.server()
    with app.observed(server, "", 0) as watched:
        watched.evaluated(0.5)
        assert watched.server is server and not watched.observers and not watched.every
    assert capsys.readouterr().out == ""
    serve = app.serve
    monkeypatch.setattr(app, "serve", lambda view, watched, port: serve(view, watched, port=0))
    with app.observed(server, "", 9000) as watched:
        url = capsys.readouterr().out.split()[-1]
        watched.event(Event("joined", 77, 1, 0))
        watched.submit(1, torch.ones(14), 0)
        watched.evaluated(0.25)
        assert watched.flush()
        with urllib.request.urlopen(f"{url}state.json") as answer:
            state = json.load(answer)
    assert state["totals"] == {"joined": 1, "accepted": 1}
    assert state["clients"]["rows"][0]["name"] == "77" and state["errors"]["error"] == [0.25]


def test_the_example_has_metrics_only_if_an_address_is_given(app, capsys):
    pytest.importorskip("prometheus_client")
    with app.observed(fleets.server(), "127.0.0.1:0", 0) as watched:
        url = capsys.readouterr().out.split()[-1]
        watched.evaluated(0.25)
        assert watched.flush()
        with urllib.request.urlopen(url) as answer:
            assert b"secureafl_model_error 0.25" in answer.read()


def test_the_example_has_an_audit_log_only_if_asked_and_never_mixes_two_runs(app, tmp_path):
    server = fleets.server()
    assert app.audited(server, tmp_path / "audit", "", False) is server and not (tmp_path / "audit").exists()
    with app.audited(server, tmp_path / "audit", "recent", False) as logged:
        logged.submit(1, torch.ones(14), 0)
    assert verify(tmp_path / "audit")
    with pytest.raises(ValueError, match=r"audit: .* has the log of an earlier run; set resume=true, or another out"):
        app.audited(fleets.server(), tmp_path / "audit", "recent", False)
    with app.audited(fleets.server(), tmp_path / "audit", "recent", True) as again:
        assert again.recover() == 1 and again.version == 1


def test_the_example_knows_its_settings():
    text = (EXAMPLE / "pyproject.toml").read_text()
    used = (EXAMPLE / "attacked" / "server.py").read_text()
    for name, start in {"watch-port": "0", "metrics": '""', "audit": '""'}.items():
        assert f"{name} = {start} " in text and f'run["{name}"]' in used
