"""Progress while runs last: lines in a file, bars on a terminal, the time that is left."""

import pytest

from secureafl_ext.cli import main, progress
from secureafl_ext.sim.loop import Outcome, Point
from secureafl_ext.sim.settings import Settings

pytestmark = pytest.mark.usefixtures("pretended")


def test_output_to_a_file_has_a_line_per_finished_run(capsys):
    assert main.main(["sweep", "delay=1,2"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "secureafl: delay=1: round 400 of 400: error 0.500 (1 of 2 runs finished)",
        "secureafl: delay=2: round 400 of 400: error 0.500 (2 of 2 runs finished)",
    ]


def test_plain_progress_has_a_line_every_few_seconds(capsys, monkeypatch):
    now = iter([0.0, 0.0, 1.0, 2.5, 2.5, 9.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.progress(["a"], [50]) as (watch, done):
        for at in (10, 20, 30, 50):
            watch(0, Point(at, 0.25, 0.5))
        done(0, Outcome(Settings().resolve(), [Point(50, 0.25, 0.5)], {}))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2] for line in said] == [" round 10 of 50", " round 30 of 50", " round 50 of 50"]
    assert said[0] == "secureafl: a: round 10 of 50: error 0.250, attack success 0.500"


def test_a_terminal_has_bars(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert main.main(["sweep", "delay=1,2"]) == 0
    said = capsys.readouterr().err
    assert "all runs" in said and "2 of 2" in said and "secureafl: delay" not in said


def test_the_time_left_comes_from_the_rounds_of_all_runs(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = []

    class Kept(progress.Progress):
        def __init__(self, *columns, **settings):
            super().__init__(*columns, **settings)
            assert progress.TimeRemainingColumn in map(type, columns)
            shown.append(self)

    monkeypatch.setattr(progress, "Progress", Kept)
    with progress.progress(["short", "long"], [10, 30]) as (watch, done):
        watch(1, Point(15, 0.5, None))
        watch(0, Point(10, 0.5, None))
        done(0, Outcome(Settings().resolve(), [Point(10, 0.5, None)], {}))
        everything = shown[0].tasks[0]
        assert (everything.completed, everything.total, everything.fields["now"]) == (25, 40, "1 of 2")


def test_more_runs_than_lines_of_progress(pretended):
    assert main.main(["sweep", f"seed={','.join(map(str, range(20)))}"]) == 0
    assert len(pretended.ran) == 20
