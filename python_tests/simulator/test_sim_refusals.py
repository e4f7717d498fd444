"""Mistakes on the command line: one line that says what was expected, exit status 2, and no run was wasted."""

import gzip
import os
from concurrent.futures import BrokenExecutor

import pytest
import torch
from hostile import idx_files, npz, pixels, write
from pretended import failure

from secureafl_ext.attacks import ATTACKS
from secureafl_ext.cli import errors, main
from secureafl_ext.defenses import DEFENSES
from secureafl_ext.sim import federation, results, settings
from secureafl_ext.sim.settings import Settings


def said(capsys, *argv: str) -> str:
    """The last line: what runs shows its progress first."""
    return failure(capsys, *argv).splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("run --device tpu", "device must be cpu, cuda or cuda:N, got 'tpu'"),
        ("run --device cuda:", "device must be cpu, cuda or cuda:N, got 'cuda:'"),
        ("run --device cuda:99999", "device must be cpu, cuda or cuda:N, got 'cuda:99999'"),
        ("run --device meta", "device must be cpu, cuda or cuda:N, got 'meta'"),
        ("run --rounds 1000000000000000", "rounds must be 1 to 1000000000, got 1000000000000000"),
        ("run --batch 1000000000000", "batch must be 1 to 1000000, got 1000000000000"),
        ("run --delay 1000000000000", "delay must be 0 to 1000000000, got 1000000000000"),
        ("run --arrivals clock --spread 1e9", "spread must be 0 to 100, got 1000000000.0"),
        ("run --seed -1", "seed must be 0 or more, got -1"),
        ("sweep seed=0,-1", "seed must be 0 or more, got -1"),
        ("run --defense-option window=1.5", "defense option window must be a whole number, got 1.5"),
        ("run --defense-option window=x", "defense option window must be a whole number, got 'x'"),
        ("run --defense-option radius=true", "defense option radius must be a number, got True"),
        ("run --defense-option process_group=1", "unknown defense option of secureafl: 'process_group'"),
        ("run --defense kardam --defense-option patience=.5", "option patience must be a whole number, got 0.5"),
        ("run --attack min-max --attack-option honest=[1]", "attack option honest must be a whole number, got [1]"),
        (f"run --attack gaussian --attack-option std={'[' * 5000}", "attack option std must be a number, got '[[["),
        ("run --config nowhere.toml", "config must be a TOML file of settings, got 'nowhere.toml': no such file"),
        ("results nowhere", "FOLDER must have a results.jsonl, got 'nowhere'"),
        (
            "run --memory 5 --defense secureafl-kin",
            "memory must not be set, got 5: defense secureafl-kin does not use it",
        ),
        (
            "run --trust 2 --defense secureafl-kin",
            "trust must not be set, got 2.0: defense secureafl-kin does not use it",
        ),
        ("run --quantile 0.5 --defense kardam", "quantile must not be set, got 0.5: defense kardam does not use it"),
        (
            "compare --memory 5",
            "memory must not be set, got 5: defense async-sgd, zeno++, secureafl-support does not use it",
        ),
        ("sweep memory=1,2 --defense secureafl-kin", "memory must not be set, got 1"),
        ("run --config .", ".: expected a file, got a folder, a pipe or a device"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_runs(argv, expected, capsys, pretended):
    text = failure(capsys, *argv.split())
    assert text.startswith("secureafl: ") and expected in text and text.count("\n") == 1
    assert pretended.ran == []


def test_a_cuda_that_is_not_there_is_named(capsys, pretended, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no CUDA device here, got 'cuda:0'" in said(capsys, "run", "--device", "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(settings, "build_info", lambda: {"cuda": None})
    assert "the extension was built without CUDA" in said(capsys, "run", "--device", "cuda")
    monkeypatch.setattr(settings, "build_info", lambda: {"cuda": "9.0"})
    assert "one of cuda:0 to cuda:1, got 'cuda:2'" in said(capsys, "run", "--device", "cuda:2")
    assert Settings(device="cuda:1").resolve().device == "cuda:1"
    assert pretended.ran == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a = " + "[" * 10_000, "a.toml is not TOML for settings: it is nested too deeply"),
        ("lr = " + "[" * 200 + "]" * 200, "a.toml: lr must be a number, got [["),
        ("lr" + ".a" * 3_000 + " = 1", "a.toml: lr must be a number, got {'a': {"),
        ("lr = " + "{a = " * 3_000, "a.toml is not TOML"),
        ("x" * 10_000 + " = 1", "unknown setting in a.toml: 'xxxxx"),
        ("#" * 2**15, "a.toml: expected at most 16384 bytes, got"),
        (b"\xff", "a.toml: expected text in UTF-8"),
        ("seed = 1" + "0" * 5_000, "a.toml is not TOML"),
    ],
)
def test_a_hostile_file_of_settings_is_one_short_line(content, expected, tmp_path, capsys, pretended):
    (tmp_path / "a.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    text = failure(capsys, "run", "--config", "a.toml")
    assert expected in text and text.count("\n") == 1 and len(text) < 1500


def test_every_option_without_a_default_has_a_kind():
    """A value that is not a number, such as a process group, cannot be set from the command line."""
    for table in (ATTACKS, DEFENSES):
        for name, entry in table.items():
            unset = {key for key, value in entry.settings.items() if value is None}
            assert unset - set(entry.optional) <= {"process_group"}, name
            assert set(entry.optional.values()) <= {bool, int, float}


# Where results go


@pytest.mark.parametrize("kind", ["file", "below a file", "results are a folder", "results are a pipe"])
@pytest.mark.parametrize("command", ["run", "compare", "sweep seed=0,1", "paper --table alpha", "paper --table memory"])
def test_a_bad_place_for_results_is_found_before_anything_runs(kind, command, tmp_path, capsys, pretended, monkeypatch):
    monkeypatch.setattr("secureafl_ext.report.server_tables.MEASURED", {"memory": lambda *_: pytest.fail("it ran")})
    if kind in ("file", "below a file"):
        (tmp_path / "taken").touch()
        out = "taken" if kind == "file" else "taken/below"
    else:
        out = "there"
        (tmp_path / "there").mkdir()
        path = tmp_path / "there" / results.NAME
        path.mkdir() if kind == "results are a folder" else os.mkfifo(path)
    text = said(capsys, *command.split(), "--out", out)
    expected = f"out must be a folder for results, got '{out}'" if "file" in kind else "expected a file, got a folder"
    assert expected in text
    assert pretended.ran == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_found_before_anything_runs(tmp_path, capsys, pretended):
    (tmp_path / "shut").mkdir(mode=0o500)
    assert "out must be a folder for results, got 'shut'" in said(capsys, "run", "--out", "shut")
    assert pretended.ran == []


def test_a_full_folder_is_found_before_anything_runs(capsys, pretended, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.tempfile, "TemporaryFile", full)
    assert "got 'secureafl-results': No space left on device" in said(capsys, "run")
    assert pretended.ran == []


def test_looking_at_the_folder_leaves_nothing_in_it(tmp_path):
    results.ready(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "new" / results.NAME).write_bytes(b"{}")
    results.ready(tmp_path / "new")
    assert (tmp_path / "new" / results.NAME).read_bytes() == b"{}"


# Data and memory, with the real loop


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"fashion_mnist.npz": npz({"x": pixels(2)})},
            "expected the arrays x_train, y_train, x_test, y_test, got x",
        ),
        (
            idx_files() | {"train-images-idx3-ubyte.gz": gzip.compress(bytes(99))[:-9]},
            "train-images-idx3-ubyte.gz: not a whole gzip file",
        ),
    ],
    ids=["other arrays", "torn gzip"],
)
def test_a_broken_data_set_is_one_line(files, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data", files)
    argv = ("run", "--device", "cpu", "--dataset", "fashion-mnist", "--data-dir", "data", "--rounds", "1")
    assert expected in said(capsys, *argv)


@pytest.mark.parametrize(
    "changed", [{"rounds": 10**9}, {"delay": 10**9}, {"rounds": 10**8, "batch": 10**6}, {"clients": 10**8}]
)
def test_what_cannot_fit_is_refused_before_it_is_allocated(changed, monkeypatch):
    monkeypatch.setattr(federation.os, "sysconf", {"SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 4096}.get)
    usual = Settings(device="cpu").resolve()
    federation.check_memory(usual, 140_000)
    with pytest.raises(ValueError, match=r"must fit into [34]\.\d GB, got .* GB"):
        federation.check_memory(Settings(device="cpu", **changed).resolve(), 140_000)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(federation, "MEMORY_LIMIT", tmp_path / "memory.max")
    for text in ("max\n", "9999999999999\n"):
        federation.MEMORY_LIMIT.write_text(text)
        federation.check_memory(Settings(device="cpu").resolve(), 140_000)
    federation.MEMORY_LIMIT.write_text("1000000\n")
    with pytest.raises(ValueError, match=r"must fit into 0\.0 GB"):
        federation.check_memory(Settings(device="cpu").resolve(), 140_000)


def test_the_check_comes_before_the_first_table(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(federation, "draw_arrivals", lambda settings: pytest.fail("too late"))
    monkeypatch.setattr(federation, "MEMORY_LIMIT", tmp_path / "memory.max")
    federation.MEMORY_LIMIT.write_text("1000000\n")
    assert "must fit into 0.0 GB" in said(capsys, "run", "--device", "cpu", "--rounds", "2")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "out of memory"),
        (BrokenExecutor("a process ended"), "a process ended"),
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes\nmore"), "can't allocate memory: 5 bytes)"),
        (PermissionError(13, "Permission denied", "results"), "results: Permission denied"),
        (ImportError("images are decoded by Pillow"), "images are decoded by Pillow"),
    ],
)
def test_an_error_of_the_machine_is_one_line(error, expected, capsys, pretended):
    pretended.stop_after, pretended.stop = 0, error
    text = said(capsys, "run")
    assert expected in text and "Errno" not in text


def test_an_error_of_our_own_keeps_its_traceback(pretended):
    pretended.stop_after, pretended.stop = 0, RuntimeError("a defect")
    assert errors.message(pretended.stop) is None
    with pytest.raises(RuntimeError, match="a defect"):
        main.main(["run"])
