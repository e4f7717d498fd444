"""The file of results: what is kept of a run, and what happens to lines that are torn, damaged or written at once."""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path

import numpy
import pytest
import torch
from outcomes import never, outcome, written
from places import ROOT

import secureafl_ext
from secureafl_ext.sim import code, results
from secureafl_ext.sim.settings import Resolved, Settings, recorded

ONLY_SOURCES = shutil.ignore_patterns("*.so", "*.npz", "__pycache__")


def test_records_read_back_as_they_were(tmp_path):
    path = tmp_path / "new" / "folder" / results.NAME
    deep = {"std": 3.0, "list": [1, math.inf], "text": "ä"}
    records = written(
        path,
        outcome(attack="gaussian", attack_options=deep, trust=math.inf),
        outcome(errors=(1e300, math.inf), dataset="udacity"),
        outcome(asr=0.25, attack="scaling"),
    )
    assert results.read(path, never) == records


def test_a_nan_reads_back_as_one(tmp_path):
    path = tmp_path / results.NAME
    written(path, outcome(errors=(-math.inf, math.nan)))
    curve = results.read(path, never)[0].outcome.curve
    assert curve[0].error == -math.inf
    assert math.isnan(curve[1].error)


def test_lines_are_json_by_the_letter(tmp_path):
    path = tmp_path / results.NAME
    written(path, outcome(errors=(math.nan, math.inf), trust=math.inf), outcome())
    lines = path.read_text().splitlines()
    parsed = [json.loads(line, parse_constant=never) for line in lines]
    assert [len(lines), parsed[0]["settings"]["trust"], parsed[0]["summary"]["error"]] == [2, "inf", "inf"]


def test_a_line_says_what_ran_when_on_what(tmp_path):
    path = tmp_path / results.NAME
    now = datetime.now(UTC)
    written(path, outcome(seconds=3600.0, seed=7))
    line = json.loads(path.read_text())
    assert line["settings"] == recorded(vars(Settings(seed=7).resolve()))
    assert line["versions"]["torch"] == torch.__version__
    assert line["versions"]["numpy"] == numpy.__version__
    assert line["versions"]["python"] == sys.version.split()[0]
    assert line["versions"]["secureafl_ext"] == secureafl_ext.__version__
    assert line["device"]
    assert abs(datetime.fromisoformat(line["started"]) - (now - timedelta(hours=1))) < timedelta(minutes=1)


@pytest.mark.parametrize("left", [1, 40, -2])
def test_a_torn_last_line_is_left_out_and_then_replaced(tmp_path, left, caplog):
    path = tmp_path / results.NAME
    first, _ = written(path, outcome(seed=1), outcome(seed=2))
    whole, torn = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole + torn[:left])

    warned = []
    assert results.read(path, warned.append) == [first]
    assert len(warned) == 1
    assert "line 2" in warned[0]
    results.read(path)
    assert [record.getMessage() for record in caplog.records] == warned

    (third,) = written(path, outcome(seed=3))
    assert results.read(path, never) == [first, third]


def test_a_line_that_lost_its_newline_alone_still_counts(tmp_path):
    path = tmp_path / results.NAME
    records = written(path, outcome(seed=1), outcome(seed=2))
    path.write_bytes(path.read_bytes()[:-1])
    assert results.read(path, never) == records
    records += written(path, outcome(seed=3))
    assert results.read(path, never) == records


DAMAGED = (b'{"settings": {"dat', b"", b"[1]", b"\0" * 4096, b"\xff", b"[" * 10**5)


@pytest.mark.parametrize("damage", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_line_is_left_out_and_later_results_stay_readable(tmp_path, damage, place):
    path = tmp_path / results.NAME
    records = written(path, outcome(seed=1), outcome(seed=2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:place], damage + b"\n", *lines[place:]]))
    records += written(path, outcome(seed=3))
    warned = []
    assert results.read(path, warned.append) == records
    assert len(warned) == 1 and f"{path}, line {place + 1} is damaged" in warned[0]


def test_a_line_of_deep_json_is_damaged(tmp_path):
    path = tmp_path / results.NAME
    (record,) = written(path, outcome())
    path.write_bytes(b'{"a": ' * 10**5 + b"1" + b"}" * 10**5 + b"\n" + path.read_bytes())
    warned = []
    assert results.read(path, warned.append) == [record]
    assert len(warned) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the children touch files alone, no thread of torch's
def test_processes_that_append_to_one_file_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(results.os, "fsync", lambda number: None)  # the disk's speed is not the question
    path, each, count = tmp_path / results.NAME, 40, 8
    context = get_context("fork")
    at_once = context.Barrier(count)

    def work(first: int) -> None:
        records = [results.record(outcome(errors=[0.1234] * 100, seed=seed)) for seed in range(first, first + each)]
        at_once.wait()
        for record in records:
            results.append(path, record)

    started = [context.Process(target=work, args=(i * each,)) for i in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * count
    seeds = [record.outcome.settings.seed for record in results.read(path, never)]
    assert sorted(seeds) == list(range(count * each))


def test_the_file_is_locked_while_a_line_is_written_and_while_lines_are_read(tmp_path, monkeypatch):
    path, free = tmp_path / results.NAME, []

    def look(kind: int) -> None:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                free.append(True)
            except BlockingIOError:
                free.append(False)

    parsed = results._parsed
    monkeypatch.setattr(results.os, "fsync", lambda number: look(fcntl.LOCK_SH))
    records = written(path, outcome())
    monkeypatch.setattr(results, "_parsed", lambda line: look(fcntl.LOCK_EX) or parsed(line))
    assert results.read(path, never) == records
    look(fcntl.LOCK_EX)
    assert free == [False, False, True]


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / results.NAME
    records = written(path, outcome(seed=1))
    before = path.read_bytes()

    def full(number):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(results.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            written(path, outcome(seed=2))
    assert path.read_bytes() == before
    records += written(path, outcome(seed=3))
    assert results.read(path, never) == records


@pytest.mark.parametrize("length", [10, 65535, 65536, 65537, 200_000])
def test_a_torn_line_of_any_length_is_cut_off(tmp_path, length):
    path = tmp_path / results.NAME
    records = written(path, outcome(seed=1))
    path.write_bytes(path.read_bytes() + b"{" * length)
    records += written(path, outcome(seed=2))
    assert results.read(path, never) == records


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"rounds": 400', '"rounds": "400"', "rounds must be a whole number"),
        ('"seed": 0', '"seed": 1.5', "seed must be a whole number"),
        ('"error": 0.9,', '"error": "low",', "error must be a number"),
        ('"round": 10', '"round": null', "round must be a whole number"),
        ('"accepted": null', '"accepted": [1]', "accepted must be a number"),
        ('"summary": {', '"summary": 5, "other": {', "other"),
        ('"curve": [', '"curve": 5, "other": [', "iterable"),
        ('"started": "', '"started": 5, "other": "', "other"),
    ],
)
def test_a_line_of_other_types_is_refused_in_words(tmp_path, old, new, said):
    path = tmp_path / results.NAME
    written(path, outcome())
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"line 1 was not written by this version .*{said}"):
        results.read(path, never)


def test_a_whole_file_is_never_written_through_a_link(tmp_path):
    other, path = tmp_path / "other", tmp_path / "a.json"
    other.write_text("mine")
    for name in (f"a.json.{os.getpid()}.new", "a.json.new", "a.json"):
        (tmp_path / name).symlink_to(other)
    results.write_whole(path, {"x": 1})
    assert other.read_text() == "mine"
    assert not path.is_symlink() and results.loads(path.read_text()) == {"x": 1}


def test_a_line_of_other_settings_is_refused_in_words(tmp_path):
    path = tmp_path / results.NAME
    written(path, outcome())
    path.write_text(path.read_text().replace('"batch"', '"bunch"'))
    with pytest.raises(ValueError, match=r"line 1 was not written by this version .*bunch"):
        results.read(path, never)


def test_a_line_is_whole_when_it_is_sent_to_the_disk(tmp_path, monkeypatch):
    path, synced = tmp_path / results.NAME, []
    monkeypatch.setattr(results.os, "fsync", lambda number: synced.append(path.read_bytes()))
    written(path, outcome())
    assert synced == [path.read_bytes()]
    assert synced[0].endswith(b"}\n")


def test_no_file_is_no_results(tmp_path):
    assert results.read(tmp_path / results.NAME, never) == []


def test_the_commit_is_that_of_a_checkout_that_knows_the_file(tmp_path, monkeypatch):
    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *command], check=True, capture_output=True, text=True
        ).stdout

    def commit() -> str | None:
        results.commit.cache_clear()
        return results.commit()

    source = tmp_path / "results.py"
    source.write_text("a")
    monkeypatch.setattr(results, "__file__", str(source))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(secureafl_ext, "build_info", lambda: {"commit": "built"})
    assert commit() == "built"
    git("init", "-q")
    (tmp_path / "other").write_text("b")
    git("add", "other")
    git("commit", "-qm", "x")
    assert commit() == "built"  # as for a package that was installed below somebody's checkout
    git("add", "results.py")
    git("commit", "-qm", "y")
    assert git("rev-parse", "HEAD").startswith(commit())
    source.write_text("changed")
    assert commit().endswith("-dirty")
    results.commit.cache_clear()


def test_the_code_is_that_of_the_sources_that_a_run_depends_on(tmp_path, monkeypatch):
    package = Path(shutil.copytree(Path(secureafl_ext.__path__[0]), tmp_path / "package", ignore=ONLY_SOURCES))
    monkeypatch.setattr(secureafl_ext, "__path__", [str(package)])
    build = {"sources": "a"}
    monkeypatch.setattr(secureafl_ext, "build_info", lambda: build)

    def changed(*path: str) -> bool:
        before = code.code.__wrapped__()
        file = package.joinpath(*path)
        file.write_text(file.read_text() + "\n# changed\n")
        return code.code.__wrapped__() != before

    assert changed("attacks", "alie.py") and changed("sim", "loop.py") and changed("config.py")
    assert not any(changed(room, "__init__.py") for room in code.ELSEWHERE)
    before = code.code.__wrapped__()
    build["sources"] = "b"
    assert code.code.__wrapped__() != before


def test_a_record_of_older_versions_has_no_code(tmp_path):
    path = tmp_path / results.NAME
    written(path, outcome())
    line = json.loads(path.read_text())
    assert line.pop("code") == results.code()
    path.write_text(json.dumps(line) + "\n")
    (old,) = results.read(path, never)
    wanted = [old.outcome.settings]
    assert old.code is None and results.find([old], wanted) == {} and results.find([old], wanted, True) == {0: old}


def test_a_whole_file_replaces_the_one_before(tmp_path):
    path = tmp_path / "folder" / "a.json"
    results.write_whole(path, {"x": 1})
    results.write_whole(path, {"x": [math.inf]})
    assert results.loads(path.read_text()) == {"x": [math.inf]}
    assert list(path.parent.iterdir()) == [path]


def test_results_of_the_repository_still_load_and_are_resolved():
    files = list((ROOT / "results").rglob("results.jsonl"))
    assert len(files) >= 5
    for file in files:
        records = results.read(file, never)
        assert records and all(isinstance(record.outcome.settings, Resolved) for record in records)
        line = json.loads(file.read_text().splitlines()[0])
        assert results.dumps(results.flat(records[0])) == json.dumps(line), "and are written as they were"
