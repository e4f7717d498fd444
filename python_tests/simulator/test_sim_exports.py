"""Results for other programs: a flat table, CSV, Parquet, TensorBoard."""

import csv
import itertools
import math
import sys

import pytest
import torch
from outcomes import never, outcome, written
from pretended import failure

from secureafl_ext.cli import main
from secureafl_ext.sim import flat_table, results
from secureafl_ext.sim.settings import recorded

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
