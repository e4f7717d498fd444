"""Parts of the Flower example that need no Flower run: the clients' speeds, and the staleness in the output."""

import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from places import ROOT

from secureafl_ext.flower import Event

EXAMPLE = ROOT / "examples" / "flower"


@pytest.fixture
def attacked(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from attacked import client, server

    yield client, server
    for name in [name for name in sys.modules if name.partition(".")[0] == "attacked"]:
        del sys.modules[name]


def test_every_client_has_a_speed_of_its_own(attacked):
    client, _ = attacked
    seconds = [client.work_seconds(k, 10, 2.0) for k in range(10)]
    assert seconds == sorted(set(seconds))
    assert (seconds[0], seconds[-1]) == (pytest.approx(2.0 / client.SPEED_RATIO), pytest.approx(2.0))
    assert client.work_seconds(0, 1, 2.0) > 0


def test_the_output_shows_the_staleness(attacked, tmp_path, capsys):
    _, server = attacked

    tally = {7: Counter(accepted=3), 9: Counter(accepted=1)}
    loop = SimpleNamespace(tally=tally, totals=lambda: sum(tally.values(), Counter()))
    with server.Log(tmp_path, False) as log:
        for node, staleness in ((7, 1), (9, 12), (7, 2)):
            log.event(Event("accepted", node, 0, 3, staleness=staleness, metrics={"client": node, "malicious": 0}))
        log.event(Event("joined", 8, 1, 3))
        log.point(3, 0.5)
        log.event(Event("accepted", 7, 0, 4, staleness=4))
        log.point(4, 0.25)
        log.table(loop)
    first, second, head, one, other = capsys.readouterr().out.splitlines()
    assert "staleness 1..5.0..12  new: 3 accepted" in first and "staleness 4..4.0..4" in second
    assert head.split()[-1] == "staleness"
    assert (one.split()[0], one.split()[-1]) == ("7", "1..2.3..4")
    assert (other.split()[0], other.split()[-1]) == ("9", "12..12.0..12")
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert [event["staleness"] for event in events] == [1, 12, 2, None, 4]
