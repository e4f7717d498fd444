"""`secureafl paper`, around a loop that only pretends to learn; and one table that is really run."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT
from pretended import BACKDOORS, PNG, Pretended

from secureafl_ext import SecureAFL
from secureafl_ext.cli import main
from secureafl_ext.defenses import DEFENSES
from secureafl_ext.defenses.tuned import TUNED
from secureafl_ext.report import paper, server_tables, tables
from secureafl_ext.report.paper_numbers import ATTACK_COLUMNS, MAIN, REGRESSION_COLUMNS
from secureafl_ext.sim import results
from secureafl_ext.sim.settings import Settings


@pytest.fixture
def pretended(pretended) -> Pretended:
    """Half the error is the success of a backdoor."""
    pretended.asr = lambda settings: pretended.error(settings) / 2 if settings.attack in BACKDOORS else None
    pretended.more = lambda settings: {"estimation_error": settings.rounds / 1e4}
    return pretended


def call(line: str) -> int:
    return main.main(["paper", *line.split()])


def lines_of(path: str) -> list[list[str]]:
    """The cells of every line of a table."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def row(path: str, name: str) -> dict[str, list[str]]:
    """Of the row of that name, by column: ours, and if there are numbers of the paper, those and the difference."""
    heads, _, *lines = lines_of(path)
    at = next(i for i, line in enumerate(lines) if line[0] == name)
    size = 3 if ["paper"] in [line[1:2] for line in lines] else 1
    theirs = "paper: secureafl" if name == paper.OUR_RULE else "paper"
    if size > 1:
        assert [line[1] for line in lines[at : at + size]] == ["ours", theirs, "difference"]
    return {head: [line[i] for line in lines[at : at + size]] for i, head in enumerate(heads) if i and head}


def test_every_table_and_figure_of_the_paper_is_listed(capsys):
    assert main.main(["paper", "--list"]) == 0
    printed = capsys.readouterr().out
    names = [line.split()[0] for line in printed.splitlines()[1:]]
    tables = "main asyncdefender alpha variants estimation-error max-norm memory runtime-clients runtime-parameters"
    figures = "malicious delay degree clients"
    assert sorted(names) == sorted(f"{tables} {figures}".split())
    assert printed.count("[fashion-mnist, cifar10, cifar100, tiny-imagenet, udacity]") == 2


def test_what_the_paper_sets_by_data_set():
    def setup(dataset: str, **given: object) -> Settings:
        return tables.plan_table("main", Settings(), {"dataset": dataset, **given}, {}, 1).base.resolve()

    rounds = {name: setup(name).rounds for name in MAIN}
    assert rounds == dict(zip(MAIN, (20_000, 30_000, 30_000, 80_000, 20_000), strict=True))
    assert [setup(name).model for name in MAIN] == ["cnn"] + ["resnet20"] * 4
    assert [setup(name).batch for name in MAIN] == [32, 64, 64, 64, 64]
    assert [setup(name).clients for name in MAIN] == [50, 50, 50, 10, 10]
    assert [setup(name).lr for name in MAIN] == [0.01, 0.01, 0.01, 0.01, 0.001]
    assert (setup("udacity", model="cnn").model, setup("cifar10", rounds=5).rounds) == ("cnn", 5)


def test_main_is_every_method_under_every_attack_with_every_seed(pretended):
    assert call("--seeds 2 --lr 0.5 --rounds 7") == 0
    ran = [(s.defense, s.attack, s.seed) for s in pretended.ran]
    assert ran == [(d, a, seed) for d in paper.METHODS for a in ATTACK_COLUMNS for seed in (0, 1)]
    assert {(s.dataset, s.lr, s.rounds) for s in pretended.ran} == {("fashion-mnist", 0.5, 7)}
    kept = [json.loads(line) for line in Path("secureafl-results/results.jsonl").read_text().splitlines()]
    assert len(kept) == 8 * 11 * 2
    assert Path("secureafl-results/main-fashion-mnist.png").read_bytes().startswith(PNG)


def test_a_cell_is_the_mean_over_seeds_beside_the_paper(pretended):
    """Seeds end at 0.10 and 0.16: mean 0.13, deviation of a sample 0.0424.."""
    pretended.error = lambda settings: 0.10 + 0.06 * settings.seed
    assert call("--seeds 2 --only attack=none,scaling --only defense=secureafl,kardam --out x") == 0
    made = row("x/main-fashion-mnist.md", "secureafl")
    assert made == {
        "none": ["0.130 ± 0.042 †", "0.12", "+0.010"],
        "scaling": ["0.130 ± 0.042 / 0.065 ± 0.021 †", "0.18 / 0.07", "-0.050 / -0.005"],
    }
    assert list(row("x/main-fashion-mnist.md", "kardam")) == ["none", "scaling"]


def test_bold_is_the_best_of_a_column_also_far_from_the_paper(pretended):
    """Kardam is near the paper under scaling (0.79/0.92) and still broken; SecureAFL is the best, and not near."""
    pretended.error = lambda settings: {"kardam": 0.8, "secureafl": 0.4}.get(settings.defense, 0.3)
    only = "--only attack=none,scaling --only defense=kardam,secureafl"
    assert call(f"{only} --out x") == 0
    assert row("x/main-fashion-mnist.md", "kardam")["scaling"][0] == "0.800 / 0.400 †"
    assert row("x/main-fashion-mnist.md", "secureafl")["scaling"][0] == "**0.400 / 0.200**"
    assert call(f"{only},{paper.OUR_RULE} --out x") == 0
    made = row("x/main-fashion-mnist.md", paper.OUR_RULE)
    assert made["scaling"] == ["**0.300 / 0.150**", "0.18 / 0.07", "+0.120 / +0.080"]
    assert row("x/main-fashion-mnist.md", "secureafl")["none"][0] == "0.400"
    text = Path("x/main-fashion-mnist.md").read_text(encoding="utf-8")
    assert "**Bold**: best of the column (smallest test error, plus attack success if there is one)." in text
    assert "†: at most 0.03 above the paper's number." in text


def test_one_seed_has_no_deviation(pretended):
    assert call("--table asyncdefender --out x") == 0
    assert row("x/asyncdefender-fashion-mnist.md", "async-defender")["none"] == ["0.500", "0.24", "+0.260"]


def test_the_head_says_how_it_came_about(pretended):
    assert main.main(["paper", "--table", "alpha", "--out", "a b", "--rounds", "9", "--seeds", "2"]) == 0
    head = Path("a b/alpha-fashion-mnist.md").read_text(encoding="utf-8").splitlines()[2]
    assert head.startswith("`secureafl paper --table alpha --out 'a b' --rounds 9 --seeds 2`; ")
    device = results.device_name(Settings().resolve().device)  # a CPU's has its threads, a GPU's is its name
    for part in (device, f"torch {torch.__version__}", "commit ", "seeds 0, 1", "rounds 9"):
        assert part in head
    assert "with" not in head, "SecureAFL alone, as it is"
    assert main.main(["paper", "--table", "main", "--only", "attack=none", "--out", "c"]) == 0
    head = Path("c/main-fashion-mnist.md").read_text(encoding="utf-8").splitlines()[2]
    here = {name: TUNED[name] for name in TUNED if name in paper.METHODS}
    spelled = ", ".join(f"{name} {key}={value}" for name, values in here.items() for key, value in values.items())
    assert head.endswith(f"; with {spelled}.")


def test_undefined_cells_say_why_and_leave_the_paper_its_shape(pretended):
    assert call("--dataset udacity --out x") == 0
    heads, _, *lines = lines_of("x/main-udacity.md")
    assert heads == ["defense", "", *REGRESSION_COLUMNS]
    assert [line[0] for line in lines[::3]] == [name for name in paper.METHODS if name != "sageflow"]
    text = Path("x/main-udacity.md").read_text(encoding="utf-8")
    assert "- undefined: attack 'dba' changes labels" in text
    assert "- undefined: defense 'sageflow'" in text
    assert "RMSE" in text


def test_a_table_that_is_cut_short_has_gaps_and_the_next_call_fills_them(pretended, capsys):
    command = "--only attack=none,gaussian --only defense=kardam,secureafl --out x"
    pretended.stop_after = 3
    assert call(command) == 130
    assert "continues from there" in capsys.readouterr().err
    assert row("x/main-fashion-mnist.md", "kardam")["gaussian"][0] == "0.500"
    assert row("x/main-fashion-mnist.md", "secureafl") == {
        "none": ["0.500", "0.12", "+0.380"],
        "gaussian": ["-", "0.14", "-"],
    }
    assert "- not run: KeyboardInterrupt" in Path("x/main-fashion-mnist.md").read_text(encoding="utf-8")

    pretended.stop_after = None
    assert call(command) == 0
    assert [(s.defense, s.attack) for s in pretended.ran[3:]] == [("secureafl", "gaussian")]
    assert row("x/main-fashion-mnist.md", "secureafl")["gaussian"] == ["0.500", "0.14", "+0.360"]
    assert "not run:" not in Path("x/main-fashion-mnist.md").read_text(encoding="utf-8")


def test_a_run_that_fails_is_named_in_the_table(pretended, capsys):
    pretended.stop_after, pretended.stop = 1, FileNotFoundError("dataset 'cifar10' not found")
    assert call("--dataset cifar10 --defense kardam --out x") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "secureafl: dataset 'cifar10' not found"
    assert row("x/main-cifar10.md", "kardam")["label-flip"] == ["-", "0.33", "-"]
    assert "- not run: dataset 'cifar10' not found" in Path("x/main-cifar10.md").read_text(encoding="utf-8")


def test_other_runs_in_the_folder_are_not_taken_for_those_of_the_table(pretended):
    pretended.error = lambda settings: settings.lr
    narrow = "--table variants --attack none --defense secureafl --out x"
    for lr in ("0.25", "0.125", "0.25"):
        assert call(f"{narrow} --lr {lr}") == 0
        assert row("x/variants-fashion-mnist.md", "secureafl")["none"][0].rstrip(" †") == f"{float(lr):.3f}"
    assert len(pretended.ran) == 2


def test_a_share_of_attackers_needs_an_attack():
    attacks = {name: paper.TABLES[name].axes["attack"] for name in ("malicious", "delay", "degree", "clients")}
    assert attacks == dict.fromkeys(("delay", "degree", "clients"), ATTACK_COLUMNS) | {"malicious": ATTACK_COLUMNS[1:]}


def test_a_setting_that_is_given_narrows_what_a_table_varies(pretended):
    assert call("--table malicious --attack min-max --malicious 0.3 --quantile 0.5") == 0
    assert [(s.attack, s.defense, s.malicious) for s in pretended.ran] == [("min-max", d, 0.3) for d in paper.METHODS]
    ours = {"secureafl", "secureafl-kin"}  # the others do not use it
    assert {s.defense: s.quantile for s in pretended.ran} == {d: 0.5 if d in ours else 0.8 for d in paper.METHODS}


def test_a_setting_that_is_given_replaces_what_a_table_fixes(pretended):
    assert call("--table max-norm --attack none --defense secureafl-i") == 0
    assert [(s.defense, s.max_norm) for s in pretended.ran] == [("secureafl-i", g) for g in (20.0, 50.0, 100.0)]


def test_compared_defenses_run_with_the_values_that_were_chosen_for_them():
    base = Settings(dataset="fashion-mnist", attack="none")
    runs = [
        run
        for table in ("main", "asyncdefender")
        for run in tables.plan_table(table, base, {"attack": "none"}, {}, 1).runs()
    ]
    options = {run.defense: run.defense_options for run in runs}
    assert {name: value for name, value in options.items() if value} == TUNED
    assert all(options[name].keys() <= DEFENSES[name].settings.keys() for name in options)
    small = dataclasses.replace(base, dataset="fashion-mnist-small")
    (run,) = tables.plan_table("main", small, {"attack": "none", "defense": "sageflow"}, {}, 1).runs()
    assert run.defense_options == {}, "its warm-up is longer than a run on the embedded data"
    given = dataclasses.replace(base, defense_options={"radius": 1.5})
    (run,) = tables.plan_table("main", given, {"attack": "none", "defense": "aflguard"}, {}, 1).runs()
    assert run.defense_options == {"radius": 1.5}


def test_a_figure_has_a_part_per_attack_and_no_paper(pretended, tmp_path):
    pretended.error = lambda settings: settings.delay / 100
    assert call("--table delay --only attack=none,pgd --only delay=5,50 --out x") == 0
    text = (tmp_path / "x" / "delay-fashion-mnist.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## none", "## pgd"]
    assert "paper |" not in text
    lines = [line for line in lines_of("x/delay-fashion-mnist.md") if line[0] == "zeno++"]
    assert lines == [["zeno++", "0.050", "0.500"], ["zeno++", "0.050 / 0.025", "0.500 / 0.250"]]
    assert (tmp_path / "x" / "delay-fashion-mnist.png").read_bytes().startswith(PNG)


def test_estimation_errors_stand_by_the_round(pretended):
    """The pretended one is a ten thousandth of the round."""
    assert call("--table estimation-error --out x") == 0
    assert {(s.estimation_error, s.evaluations, s.defense) for s in pretended.ran} == {(True, 1, "secureafl")}
    made = row("x/estimation-error-fashion-mnist.md", "estimation_error")
    assert list(made) == ["250", "350", "450", "550", "650", "20000"]
    assert made["250"] == ["0.025 †", "0.81", "-0.785"]
    assert made["20000"] == ["2.000", "0.59", "+1.410"]
    assert call("--table estimation-error --attack pgd --rounds 250 --out x") == 0
    assert row("x/estimation-error-fashion-mnist.md", "estimation_error")["250"][0] == "0.025 †"


def test_memory_is_that_of_the_servers_state(pretended):
    """n clients with m pairs, last update and last model, and the kept models, in float32 as arithmetic has it."""
    assert call("--table memory --seeds 3 --out x") == 0
    assert pretended.ran == []
    n, m, d, kept = 50, 3, 139_960, 12
    gb = ((2 * m + 2) * n * d + kept * d) * 4 / 1e9
    ours, theirs, apart = row("x/memory-fashion-mnist.md", "float32")["GB"]
    assert (ours, theirs) == (f"{gb:.3f} †", "0.456")
    assert float(apart) == pytest.approx(gb - 0.456, abs=1e-3)
    assert len(SecureAFL(torch.zeros(3), 2).state_dict()["models"]) == kept
    half = ((m + 2) * n * d + kept * d) * 4 / 1e9
    assert row("x/memory-fashion-mnist.md", "float16")["GB"] == [f"**{half:.3f}**", "-", "-"]


@pytest.fixture
def bench_calls(monkeypatch) -> list[list[str]]:
    """bench/scaling.py, pretended: milliseconds that tell method and size. The commands it was called by."""
    called = []

    def run(command, **_):
        called.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        lines = ["table,how,n,d,m,ms", "server,SecureAFL,50,139960,3,1"]
        lines += [f"server and gradient,SecureAFL,{n},139960,3,{n}" for n in (50, 100, 300)]
        lines += [f"server and gradient,SecureAFL,50,{d},3,{d / 1e4}" for d in (500_020,)]
        (out / "scaling.csv").write_text("\n".join(lines))
        (out / "scaling.md").write_text("# Server rounds\n\n`python bench/scaling.py`; a machine; commit 0.\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return called


def test_runtimes_are_those_of_the_benchmark_in_seconds(pretended, bench_calls, tmp_path, monkeypatch):
    monkeypatch.setattr(server_tables, "PACKAGES", tmp_path / "nowhere")  # as where the package is installed
    source = Path("bench/scaling.py")  # in the folder that the command is called in
    source.parent.mkdir()
    source.touch()
    for table in ("runtime-clients", "runtime-parameters"):
        assert call(f"--table {table} --out x --device cpu") == 0
    assert len(bench_calls) == 1, "one benchmark serves both tables"
    assert bench_calls[0][:4] == [sys.executable, str(source.absolute()), "--device", "cpu"]
    assert (ROOT / server_tables.BENCH).is_file()
    clients = row("x/runtime-clients-fashion-mnist.md", "SecureAFL")
    assert clients["50"] == ["0.050000", "0.03", "+0.020000"]
    assert clients["300"] == ["0.300000", "0.06", "+0.240000"]
    parameters = row("x/runtime-parameters-fashion-mnist.md", "SecureAFL")
    assert {column: cell[0] for column, cell in parameters.items()} == {
        "140000": "0.050000",
        "500000": "0.050002",
        "1000000": "-",
    }
    text = Path("x/runtime-clients-fashion-mnist.md").read_text(encoding="utf-8")
    assert "`python bench/scaling.py`; a machine; commit 0.\n" in text
    assert "- not run: bench/scaling.py left this size out" in text


def test_without_the_source_tree_the_runtimes_say_so(pretended, monkeypatch, tmp_path):
    monkeypatch.setattr(server_tables, "PACKAGES", tmp_path / "nowhere")
    assert call("--table runtime-clients --out x") == 0
    assert row("x/runtime-clients-fashion-mnist.md", "Zeno++")["50"] == ["-", "0.02", "-"]
    text = Path("x/runtime-clients-fashion-mnist.md").read_text(encoding="utf-8")
    assert "bench/scaling.py is neither here nor beside the package: it comes with the source" in text


def test_all_is_what_the_paper_shows_of_a_data_set():
    assert paper.select_tables("all", "fashion-mnist") == list(paper.TABLES)
    assert paper.select_tables("all", "cifar100") == ["main", "asyncdefender"]
    assert paper.select_tables("all", "fashion-mnist-small") == list(paper.TABLES)


def test_all_runs_them_one_after_the_other(pretended):
    assert call("--table all --dataset udacity --attack none --out x") == 0
    assert [s.defense for s in pretended.ran] == [*(m for m in paper.METHODS if m != "sageflow"), "async-defender"]
    assert Path("x/main-udacity.md").exists() and Path("x/asyncdefender-udacity.md").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--table mian", "unknown table 'mian'; choose from main, asyncdefender"),
        ("--seeds 0", "seeds must be 1 or more, got 0"),
        ("--seeds x", "invalid int value: 'x'"),
        ("--seed 1", "unknown argument '--seed'"),
        ("--only delay=5", "only: main does not vary 'delay'; choose from defense, attack"),
        ("--table memory --only history_dtype=float16", "unknown setting 'history_dtype'"),
        ("--only attack=pdg", "unknown attack 'pdg'; choose from none"),
        ("--table asyncdefender --dataset udacity --attack dba", "attack 'dba' changes labels"),
    ],
)
def test_mistakes_are_named_before_anything_runs(argv, said, pretended, capsys):
    assert call(argv) == 2
    assert said in capsys.readouterr().err
    assert pretended.ran == []
    assert not Path("secureafl-results").exists()


def test_a_small_table_from_real_runs(tmp_path):
    """On the embedded data, which is not the paper's: no number of it stands beside ours."""
    command = "--dataset fashion-mnist-small --only defense=async-sgd,secureafl --only attack=none,scaling --device cpu"
    size = f"--rounds 4 --evaluations 1 --batch 4 --clients 4 --out {tmp_path}"
    assert call(f"{command} {size}") == 0
    for name in ("async-sgd", "secureafl"):
        made = row(f"{tmp_path}/main-fashion-mnist-small.md", name)
        clean, attacked = (made[attack][0].strip("*") for attack in ("none", "scaling"))  # bold: the best
        assert 0 <= float(clean) <= 1
        assert all(0 <= float(number) <= 1 for number in attacked.split(" / ", 1))
    assert (tmp_path / "main-fashion-mnist-small.png").read_bytes().startswith(PNG)
