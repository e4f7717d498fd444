"""The benchmarks run and leave what they promise; how fast anything was is none of a test's business."""

import csv
import runpy
import subprocess
import sys

import pytest
import torch
from places import ROOT

from secureafl_ext import reference
from secureafl_ext.tasks import datasets

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

BENCH = ROOT / "bench"


@pytest.fixture
def bench(monkeypatch, capsys):
    """`python bench/NAME.py` without its start: a process of its own would import torch again, for seconds."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(datasets.SOURCES, "_added", {})

    def run(name: str, *arguments: object) -> str:
        """What it printed."""
        path = str(BENCH / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def run(bench, tmp_path):
    def report(name: str) -> tuple[str, list[dict[str, str]]]:
        """The markdown and the rows of the CSV."""
        printed = bench(name, "--sizes", "tiny", "--out", tmp_path, "--device", "cpu")
        text = (tmp_path / f"{name}.md").read_text()
        assert printed.endswith(text)
        if name not in ("simulator", "gradients", "flower", "equal_work"):  # which have no sizes to draw over
            assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert all(float(row["ms"]) > 0 for row in rows)
        return text, rows

    return report


def test_scaling_leaves_tables_rows_and_a_picture(run):
    text, rows = run("scaling")
    for part in ("python bench/scaling.py", "seed 0", "## A.", "## B.", "## C.", "Skipped"):
        assert part in text
    for table in ("server", "server and gradient"):
        assert [row["how"] for row in rows if row["table"] == table] == ["AsyncSGD", "Zeno++", "AFLGuard", "SecureAFL"]
    sizes = {(row["n"], row["d"], row["m"]) for row in rows if row["table"] == "round"}
    assert sizes == {("4", "1000", "2"), ("6", "1000", "2"), ("4", "2000", "2"), ("4", "1000", "1")}
    for how in ("SecureAFL", "floor", "torch", "tuned torch"):
        assert sum(row["table"] == "round" and row["how"] == how for row in rows) == len(sizes)


def test_ops_leaves_a_table_rows_and_a_picture(run):
    text, rows = run("ops")
    assert "python bench/ops.py" in text and "Skipped" in text
    for op in ("median", "trimmed_mean", "lipschitz", "estimate", "aggregate"):
        hows = [row["how"] for row in rows if (row["table"], row["n"], row["d"]) == (op, "5", "1000")]
        assert {"floor", "secureafl_ext"} < set(hows) and len(hows) == len(set(hows))
    medians = {row["how"] for row in rows if row["table"] == "median"}
    assert {"torch.median", "torch.kthvalue", "torch.sort", "torch.quantile", "np.median"} < medians


def test_fleet_compares_sketches_with_whole_updates():
    arguments = ["--device", "cpu", "--sizes", "500", "--clients", "5", "70", "--sketch", "64", "--repeats", "3"]
    done = subprocess.run([sys.executable, BENCH / "fleet.py", *arguments], check=True, capture_output=True, text=True)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [(row[0], row[2]) for row in rows] == [(n, what) for n in ("5", "70") for what in ("mean", "64 numbers")]
    assert all(float(row[3]) > 0 and float(row[6]) > 0 and float(row[7]) > 0 for row in rows)


def test_equal_work_compares_each_rule_with_its_twin(run):
    text, rows = run("equal_work")
    assert "python bench/equal_work.py" in text and "2 at a time" in text
    hows = ["every update is a step", "weighted median", "async-sgd", "weighted", "secureafl-support"]
    for model in ("cnn", "resnet20"):
        assert [row["how"] for row in rows if row["table"] == model] == hows


def test_the_plain_loops_weighted_median_is_one(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import equal_work

    random = torch.Generator().manual_seed(0)
    rows, counts = torch.randn(7, 50, generator=random), torch.tensor([1, 3, 2, 1, 4, 1, 1])
    found = equal_work.weighted_median(rows, counts[:, None].float())
    repeated = rows.repeat_interleave(counts, 0)  # 13 values a column: the seventh is the middle
    assert torch.equal(found, repeated.sort(0).values[6])


@pytest.mark.parametrize(("repeats", "calls"), [(3, 1), (20, 1 + 3)])
def test_quick_times_a_slow_call_once(repeats, calls, monkeypatch):
    """So that --quick stays quick where torch's rounds take seconds."""
    monkeypatch.syspath_prepend(str(BENCH))
    import timing

    seconds = iter(range(100))  # every look at the clock is a second later
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(seconds)))
    made = []
    assert timing.Clock("cpu", repeats).ms(lambda: made.append(1)) == 1000.0
    assert len(made) == calls


def test_a_wrong_server_is_not_timed(bench, monkeypatch, tmp_path):
    """A check that cannot fail is none: the reference's median moved, every benchmark must end before it writes."""
    right = reference.median
    monkeypatch.setattr(reference, "median", lambda *arguments: right(*arguments) + 1e-2)
    for name in ("scaling", "ops"):
        with pytest.raises(AssertionError, match="are not close"):
            bench(name, "--sizes", "tiny", "--out", tmp_path / name)
        assert not (tmp_path / name).exists()


TIMED = ("defense", "gradient", "server", "1 at a time", "2 at a time")


def test_simulator_times_rounds_their_parts_and_runs_side_by_side(run):
    text, rows = run("simulator")
    assert "python bench/simulator.py" in text and "seed 0" in text
    assert {(row["table"], row["how"]) for row in rows} == {
        *((table, how) for table in TIMED for how in ("async-sgd", "secureafl")),
        ("attack", "sign-flip"),
    }
    assert {(row["n"], row["d"]) for row in rows} == {("5", "139960")}


def test_gradients_times_each_net_as_torch_has_it(run):
    """Their own ops are for a GPU."""
    text, rows = run("gradients")
    assert "python bench/gradients.py" in text and "## resnet20, minibatches of 2" in text
    timed = ("one", "2 in a call", "outputs of 3 images")
    assert [(row["table"], row["how"]) for row in rows] == [
        (f"{name}, {label}", "torch") for name in ("cnn", "resnet20") for label in timed
    ]
    assert [row["d"] for row in rows] == ["139960"] * 3 + ["269722"] * 3


@pytest.mark.slow  # Flower's simulation starts twice
def test_flower_times_the_loop_with_and_without_a_server(run):
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    text, rows = run("flower")
    assert "python bench/flower.py" in text and "Flower's own limit" in text
    assert [(row["how"], row["n"], row["d"]) for row in rows] == [("empty", "4", "1000"), ("secureafl", "4", "1000")]


def test_naming_counts_the_culprits_and_the_honest_clients_that_are_named(bench, capsys):
    few = ["--attacks", "none,gaussian", "--seeds", "1", "--seconds", "30", "--clients", "8", "--rate", "3"]
    with pytest.raises(SystemExit) as end:
        bench("naming", *few)
    lines = capsys.readouterr().out.splitlines()[-2:]
    none, gaussian = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert none[:4] == ["none", "0 of 1", "-", "0 of 0"]
    assert gaussian[:2] == ["gaussian", "1 of 1"] and gaussian[3] == "2 of 2" and end.value.code == 0
    assert 0 < int(gaussian[2].split()[0]) <= 30


def test_adversaries_have_a_row_each_and_an_error_per_server(bench):
    printed = bench("adversaries", "--rounds", 20, "--seeds", 1)
    head, _, *rows = (line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|"))
    assert head == ["AsyncSGD", "averages of uploads", "recommended"]
    names = ["nobody", "push", "decoy", "pace-cancel", "repent", "behind", "shifts", "oppose", "imitate"]
    assert [row[0] for row in rows] == [*names, "fresh", "reconnect", "sleeper", "scatter", "absent"]
    cells = [cell.split(" / ") for row in rows for cell in row[1:]]
    assert len(cells) == 42 and all(0 <= float(error) <= 1 for cell in cells for error in cell)
    assert len({str(row[1]) for row in rows}) > 3  # the adversaries differ
