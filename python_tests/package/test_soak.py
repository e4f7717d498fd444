"""The soak run runs, says what it found, and sees what it is there to see."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from places import ROOT

BENCH = ROOT / "bench"
GOOD = {"resident": (100.0, 100.5), "device": (0.0, 0.0), "drift": (0.0, 1e-9), "first_us": 10.0, "last_us": 10.5}
AGES = {"new_us": 10.0, "old_us": 10.4}


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import soak

    return soak


def test_it_leaves_a_summary_and_a_file(soak, monkeypatch, capsys, tmp_path):
    few = ["--device", "cpu", "--clients", "4", "--size", "50", "--rounds", "400"]
    monkeypatch.setattr(sys, "argv", ["soak.py", *few, "--out", str(tmp_path / "soak.json")])
    with pytest.raises(SystemExit) as end:
        soak.main()
    printed = capsys.readouterr().out
    runs = json.loads((tmp_path / "soak.json").read_text())["runs"]
    assert [run["settings"] for run in runs] == [{}, {"rule": "kinship", "memory": "0"}]
    for run in runs:
        assert run["rounds"] == 400 and run["finite"] and max(run["drift"]) < run["drift_bound"]
        assert all(run[name] > 0 for name in ("new_us", "old_us", "first_us", "middle_us", "last_us"))
    assert printed.count("400 rounds") == 2
    assert (end.value.code == 0) == ("FAILED" not in printed)  # so few rounds say little about speed and memory


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"resident": (100.0, 102.0)}, "resident memory grew from 100.0 to 102.0 MiB, more than 1%"),
        ({"device": (100.0, 102.0)}, "device memory grew"),
        ({"last_us": 12.0}, "a round took 10.0 us, then 12.0"),
        ({"old_us": 10.6}, "a round of the new server took 10.0 us, of the old one 10.6: more than 5% slower"),
        ({"drift": (0.0, 1.0)}, "a carried product is off by 1.0e+00"),
        ({"drift": (float("inf"), 0.0)}, "a carried product is off by inf"),
        ({"finite": False}, "the model is not finite"),
    ],
    ids=str,
)
def test_each_bound_is_looked_at(soak, change, words):
    run = soak.Soaked({}, 1, 1, middle_us=10.0, drift_bound=1e-4, finite=True, **GOOD, **AGES)
    failures = replace(run, **change).failures()
    assert len(failures) == (words is not None) and (words is None or failures[0].startswith(words))


@pytest.mark.parametrize("settings", [{}, {"history_dtype": torch.float16}, {"rule": "kinship", "memory": 0}], ids=str)
def test_a_wrong_product_is_drift(soak, settings):
    fleet = soak.Fleet(4, 50, "cpu", settings)
    fleet.rounds(100)
    before, engine = soak.drift(fleet.server), fleet.server._engine
    assert before < 1e-5 and soak.drift(fleet.server) == before  # looking changes nothing
    carried = engine.rows.products if "rule" in settings else engine.along
    carried[1, 0] += 1e-2 * carried.abs().max()
    assert soak.drift(fleet.server) > 1e-4
    carried[0, 0] = torch.nan
    assert soak.drift(fleet.server) == torch.inf
