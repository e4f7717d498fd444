"""What is kept of runs and what is shown of them."""

import csv
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path

import numpy
import pytest
import torch
from pretended import failure

import secureafl_ext
from secureafl_ext.cli import main
from secureafl_ext.report import console
from secureafl_ext.sim import code, flat_table, results
from secureafl_ext.sim.loop import Outcome, Point
from secureafl_ext.sim.settings import Resolved, Settings, recorded

PNG = b"\x89PNG\r\n\x1a\n"
ONLY_SOURCES = shutil.ignore_patterns("*.so", "*.npz", "__pycache__")


def outcome(errors=(0.9, 0.4), asr=None, seconds=2.0, **settings) -> Outcome:
    """A run as the loop returns it; the rest of the summary is what a run without a filter has."""
    curve = [Point(10 * i, error, asr) for i, error in enumerate(errors, 1)]
    summary = dict.fromkeys(("accepted", "rejected_honest", "rejected_malicious", "precision", "recall"))
    summary |= {"error": errors[-1], "asr": asr, "diverged": not math.isfinite(errors[-1])}
    summary |= {"estimation_error": None, "rounds_per_second": 10.0, "seconds": seconds}
    return Outcome(Settings(**settings).resolve(), curve, summary)


def written(path, *outcomes) -> list[results.Record]:
    records = [results.record(each) for each in outcomes]
    for record in records:
        results.append(path, record)
    return records


def never(text: str) -> None:
    raise AssertionError(f"warned: {text}")


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


def rows(table) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_the_table_has_a_row_per_run_and_no_empty_column():
    clean, backdoor = outcome(errors=(0.1234,)), outcome(errors=(math.inf,), asr=0.5, attack="scaling", memory=2)
    made = console.table([clean, backdoor], ["attack", "memory"])
    assert [column.header for column in made.columns] == ["attack", "memory", "error", "attack\nsuccess", "rounds/s"]
    assert rows(made) == [["none", "3", "0.123", "-", "10"], ["scaling", "2", "inf", "0.500", "10"]]
    assert "attack\nsuccess" not in [column.header for column in console.table([clean], ["attack"]).columns]


def test_a_table_in_a_file_is_cut_nowhere(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    console.print_table([outcome(attack="gaussian", defense="async-defender")], ["dataset", "attack", "defense"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("fashion-mnist-small", "gaussian", "async-defender", "0.400"))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_on_a_terminal_is_cut_nowhere(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = outcome(asr=0.125, attack="gaussian", defense="secureafl-paper", dataset="fashion-mnist")
    shares = {"accepted": 0.5, "rejected_honest": 0.25, "rejected_malicious": 0.75, "precision": 0.625}
    shares |= {"late_error": 0.3125, "late_asr": 0.4375, "worst_class_error": 0.5625}
    shares |= {"left_out_precision": 0.9375, "left_out_recall": 0.1875}
    run.summary.update(shares | {"estimation_error": 0.875, "rounds_per_second": 1234.0})
    console.print_table([run], ["attack", "defense"])
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    heads = [part for column in console.COLUMNS for part in column.heading.split("\n")]
    numbers = "0.125", "0.312", "0.438", "0.562", "0.62", "0.875", "1234", "0.94", "0.19"
    for text in (*heads, "gaussian", "secureafl-paper", *numbers):
        assert text in printed, text
    assert "…" not in printed and max(map(len, printed.splitlines())) <= width


def test_a_diverged_run_is_said_with_its_reason():
    def note(error=0.9, defense="async-sgd", accepted: float | None = 0.75, diverged=True, **settings) -> list[str]:
        run = outcome(errors=(error,), defense=defense, **settings)
        run.summary.update(accepted=accepted, diverged=diverged)
        return console.divergence_notes([run], ["defense"])

    (text,) = note()
    assert text.startswith("Diverged: async-sgd: the test error 0.900 is no better than that of a constant answer.")
    assert text.endswith("25.0% of the updates were not finite (NaN or inf) and were rejected.")
    (text,) = note(accepted=1.0)
    assert "rejected" not in text
    (text,) = note(defense="kardam")
    assert "25.0% of the updates were rejected; every defense rejects updates that are not finite." in text
    (text,) = note(error=math.inf, dataset="udacity")
    assert "the RMSE inf is infinite" in text
    assert note(diverged=False) == []


def lines(path) -> int:
    assert path.read_bytes().startswith(PNG)
    return len(drawn[path].axes[0].lines)


drawn = {}


@pytest.fixture(autouse=True)
def keep_figures(monkeypatch):
    save = console.Figure.savefig

    def keep(figure, path, **options):
        drawn[path] = figure
        save(figure, path, **options)

    monkeypatch.setattr(console.Figure, "savefig", keep)


def test_curves_draw_every_run_with_what_the_loop_measured(tmp_path):
    path = tmp_path / "new" / "curves.png"
    lost = outcome(errors=(0.9, math.inf), attack="gaussian", defense="kardam")
    console.curves(path, [outcome(asr=0.5, attack="scaling"), lost], ["attack", "defense"])
    assert lines(path) == 2
    above, below = drawn[path].axes
    assert [list(values) for values in above.lines[0].get_data()] == [[10, 20], [0.9, 0.4]]
    assert list(below.lines[0].get_ydata()) == [0.5, 0.5]
    assert len(below.lines) == 1
    assert {line.get_linestyle() for line in above.lines} == {"-"}
    assert [line.get_label() for line in above.lines] == ["scaling secureafl", "gaussian kardam (diverged)"]


def test_a_run_without_attack_is_dashed(tmp_path):
    path = tmp_path / "curves.png"
    console.curves(path, [outcome(attack="gaussian"), outcome()], ["attack"])
    assert [line.get_linestyle() for line in drawn[path].axes[0].lines] == ["-", "--"]


def test_a_sweep_is_drawn_over_its_first_number_with_a_line_per_rest(tmp_path):
    path = tmp_path / "sweep.png"
    many = [
        outcome(errors=(clients / 100 + lr,), defense=defense, clients=clients, lr=lr)
        for defense in ("kardam", "secureafl")
        for clients in (10, 20, 30)
        for lr in (0.1, 0.2)
    ]
    console.against(path, many, ["defense", "clients", "lr"])
    assert lines(path) == 4
    (panel,) = drawn[path].axes
    assert panel.get_xlabel() == "clients"
    line = {line.get_label(): line for line in panel.lines}["kardam lr=0.2"]
    assert list(line.get_xdata()) == [10, 20, 30]
    assert list(line.get_ydata()) == pytest.approx([0.3, 0.4, 0.5])


def test_a_sweep_of_names_is_drawn_without_lines_between_them(tmp_path):
    path = tmp_path / "sweep.png"
    console.against(path, [outcome(defense=name) for name in ("kardam", "secureafl")], ["defense"])
    assert lines(path) == 1
    assert drawn[path].axes[0].lines[0].get_linestyle() == "None"


def test_runs_that_an_option_does_not_concern_are_no_points(tmp_path):
    path = tmp_path / "sweep.png"
    strong = outcome(attack="gaussian", attack_options={"std": 5.0})
    console.against(path, [outcome(), strong], ["attack", "attack_options.std"])
    assert [list(line.get_xdata()) for line in drawn[path].axes[0].lines] == [[5.0]]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d\.\d+", text)]


def test_the_sentence_is_made_of_the_numbers_best_first():
    def told(ours: float, theirs: float, clean: float) -> str:
        under = {"attack": "gaussian", "clients": 40, "malicious": 0.1}
        return console.sentence(
            [
                outcome(errors=(theirs,), defense="kardam", **under),
                outcome(errors=(ours,), **under),
                outcome(errors=(clean,), defense="async-sgd", clients=40),
            ]
        )

    text = told(0.25, 0.75, 0.125)
    assert "gaussian by 4 of 40 clients" in text
    assert numbers(text) == [0.25, 0.75, 0.125]
    assert text.index("secureafl") < text.index("kardam") < text.index("without attack") < text.index("async-sgd")
    text = told(0.875, 0.5, 0.25)
    assert numbers(text) == [0.5, 0.875, 0.25]
    assert text.index("kardam") < text.index("secureafl")


def test_the_sentence_ranks_backdoors_by_both_harms():
    quiet = outcome(errors=(0.25,), asr=0.875, attack="scaling", defense="kardam")
    text = console.sentence([quiet, outcome(errors=(0.375,), asr=0.125, attack="scaling")])
    assert numbers(text) == [0.375, 0.125, 0.25, 0.875]


def test_the_sentence_speaks_of_rmse_and_of_no_attack_where_it_is_so():
    text = console.sentence([outcome(errors=(math.inf,), dataset="udacity")])
    assert text.startswith("Without attack the RMSE ends at inf with secureafl")
    assert text.count("attack") == 1


# The flat table


def test_the_flat_table_has_a_row_per_run_and_the_names_of_json_normalize(tmp_path):
    path = tmp_path / results.NAME
    records = written(
        path,
        outcome(attack="gaussian", attack_options={"std": 3.0}),
        outcome(errors=(math.inf,), dataset="udacity", defense="kardam", defense_options={"dampening": "inverse"}),
    )
    one, other = flat_table.rows(results.read(path, never))
    assert list(one) == list(other)
    assert (one["settings.attack_options.std"], other["settings.attack_options.std"]) == (3.0, None)
    assert (one["settings.defense_options.dampening"], other["summary.error"]) == (None, math.inf)
    assert {f"settings.{name}" for name in recorded(vars(records[0].outcome.settings)) if "options" not in name} <= set(
        one
    )
    assert {f"summary.{name}" for name in records[0].outcome.summary} <= set(one)
    assert one["versions.torch"] == torch.__version__ and one["started"] and "curve" not in one
    groups = [name.partition(".")[0] for name in one]
    assert [name for name, _ in itertools.groupby(groups)] == [
        "settings", "summary", "versions", "started", "commit", "device", "code",
    ]  # fmt: skip


def test_results_as_csv(tmp_path, capsys):
    written(tmp_path / results.NAME, outcome(), outcome(errors=(math.inf,), dataset="udacity"))
    assert main.main(["results", str(tmp_path), "--csv", str(tmp_path / "a.csv")]) == 0
    assert capsys.readouterr().out == ""
    assert main.main(["results", str(tmp_path), "--csv", "-"]) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / "a.csv").read_text()
    one, other = csv.DictReader(text.splitlines())
    assert (one["settings.dataset"], one["summary.error"], one["summary.asr"]) == ("fashion-mnist-small", "0.4", "")
    assert (other["settings.dataset"], other["summary.error"]) == ("udacity", "inf")


def test_results_without_a_file_are_a_table(tmp_path, capsys):
    written(tmp_path / results.NAME, outcome(attack="gaussian", seed=7))
    assert main.main(["results", str(tmp_path)]) == 0
    assert {"gaussian", "secureafl", "7", "0.400"} <= set(capsys.readouterr().out.split())


def test_results_as_parquet(tmp_path):
    pandas = pytest.importorskip("pandas", reason="the extra `pandas` is not installed")
    pytest.importorskip("pyarrow", reason="the extra `pandas` is not installed")
    deep = {"std": 3, "list": [1, 2]}
    written(tmp_path / results.NAME, outcome(attack_options={"std": "3"}), outcome(attack_options=deep))
    assert main.main(["results", str(tmp_path), "--parquet", str(tmp_path / "a.parquet")]) == 0
    table = pandas.read_parquet(tmp_path / "a.parquet")
    assert list(table["settings.attack_options.std"]) == ["3", "3"], "one type per column"
    assert list(table["summary.error"]) == [0.4, 0.4] and table["settings.rounds"].dtype == "int64"


@pytest.mark.parametrize("package", ["pandas", "pyarrow"])
def test_parquet_without_its_packages_is_one_line(package, tmp_path, capsys, monkeypatch):
    if package == "pyarrow":
        monkeypatch.setitem(sys.modules, "pandas", sys)  # any module: it is not called
    monkeypatch.setitem(sys.modules, package, None)
    written(tmp_path / results.NAME, outcome())
    assert main.main(["results", str(tmp_path), "--parquet", str(tmp_path / "a.parquet")]) == 2
    expected = f"secureafl: parquet needs the package {package}: pip install 'secureafl_ext[pandas]'\n"
    assert capsys.readouterr().err == expected


def test_results_of_the_repository_still_load_and_are_resolved():
    files = list((Path(__file__).parent.parent / "results").glob("*/results.jsonl"))
    assert len(files) >= 3
    for file in files:
        records = results.read(file, never)
        assert records and all(isinstance(record.outcome.settings, Resolved) for record in records)
        line = json.loads(file.read_text().splitlines()[0])
        assert results.dumps(results.flat(records[0])) == json.dumps(line), "and are written as they were"


# TensorBoard


def test_tensorboard_has_the_curve_of_every_run(tmp_path, pretended):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pretended.asr = lambda settings: 0.25
    for command in ("run --attack scaling --tensorboard one", "run --attack scaling --tensorboard again"):
        assert main.main(command.split()) == 0
    assert len(pretended.ran) == 1, "the second has it from the results"
    for folder in ("one", "again"):
        (run,) = (tmp_path / folder).iterdir()
        events = EventAccumulator(str(run)).Reload()
        assert [(event.step, event.value) for event in events.Scalars("error")] == [(400, 0.5)]
        assert [event.value for event in events.Scalars("attack success")] == [0.25]
        assert run.name.startswith("fashion-mnist-small-scaling-secureafl-seed=0-")


def test_tensorboard_that_is_missing_is_one_line_before_anything_runs(pretended, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "pip install 'secureafl_ext[tensorboard]'" in failure(capsys, "run", "--tensorboard", "x")
    assert pretended.ran == []
