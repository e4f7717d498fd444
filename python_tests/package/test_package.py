import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from places import ROOT

import secureafl_ext
from secureafl_ext import _sim, reference


def test_build_info_tells_what_was_built():
    info = secureafl_ext.build_info()
    assert set(info) == {"version", "torch", "cuda", "commit", "sources", "compiler", "simd"}
    assert info["version"] == secureafl_ext.__version__ == version("secureafl_ext")
    assert info["torch"].startswith("2.") and re.fullmatch("[0-9a-f]{64}", info["sources"])
    assert info["compiler"].split()[0] in {"GNU", "Clang", "AppleClang"}
    assert info["simd"] in {"avx512", "avx2", "sse2", "sve", "neon", "none"}
    if torch.cuda.is_available():
        assert info["cuda"] is not None


def test_one_binary_serves_every_python():
    """Limited API: the suffix lets later versions load the modules; .ci/run audits that they use nothing else."""
    assert all(Path(module.__file__).name.endswith(".abi3.so") for module in (secureafl_ext._C, _sim))


FRESH = """
import importlib.util, sys
sys.modules["flwr"] = None  # as if it were not installed
spec = importlib.util.spec_from_file_location("reference", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
assert not [name for name in sys.modules if "secureafl" in name], "the specification leans on what it specifies"
import secureafl_ext
assert {"secureafl_ext._sim", "secureafl_ext.sim"}.isdisjoint(sys.modules), "the simulator's ops are loaded"
assert secureafl_ext.Layout.__module__ == "secureafl_ext.layout"
"""


def test_reference_stands_alone_and_the_package_needs_neither_flower_nor_the_simulator():
    """One new process for all of it: to import torch takes seconds."""
    subprocess.run([sys.executable, "-c", FRESH, reference.__file__], check=True)


def test_every_op_has_a_reference():
    for name in ("median", "trimmed_mean", "lipschitz", "estimate", "aggregate"):
        assert callable(getattr(reference, name)) and getattr(secureafl_ext, name).__doc__


def test_readme_names_the_commands_that_ci_runs():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in ("pip install '.[test]' && pytest -n auto", "pip install '.[sim]' && secureafl compare"):
        assert command in readme and command in ci


# An absolute path of a source file; those of the system's own headers are the same on every build machine.
SOURCE_PATH = re.compile(rb"(?<![\w.~-])/(?!usr/include/|usr/lib/gcc/)[\w.+~/-]+\.(?:cc|cpp|cuh?|hpp|h)\b")


def test_the_search_for_build_paths_finds_them():
    leaks = b"\0/tmp/build-env-x7/lib/torch/include/library.h\0torch/include/ops.h\0csrc/ops.cpp\0at /w/csrc/a.cu:3"
    assert SOURCE_PATH.findall(leaks) == [b"/tmp/build-env-x7/lib/torch/include/library.h", b"/w/csrc/a.cu"]


def test_the_binary_has_no_path_of_the_machine_that_built_it():
    """Or two builds would differ, and error texts would tell users the builder's folders."""
    for module in (secureafl_ext._C, _sim):
        assert not set(SOURCE_PATH.findall(Path(module.__file__).read_bytes()))


def pinned(requirements: list[str]) -> dict[str, str]:
    """Name to version; a requirement that is not one exact version is an error."""
    pins = [re.fullmatch(r"([\w-]+)==(\d+(?:\.\d+)+)", requirement) for requirement in requirements]
    assert all(pins), requirements
    return dict(pin.groups() for pin in pins)


def test_builds_and_tools_have_exact_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / ".ci" / "tools.txt").read_text().splitlines()
    tools = pinned([line for line in lines if not line.startswith("#")])
    build = pinned(project["build-system"]["requires"])
    del build["torch"]  # .ci/run has it from the package's own requirements
    assert build.items() <= tools.items() and "scikit-build-core" in build
    hooks = re.findall(r"additional_dependencies: \[(.*)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks and all(pinned(hook.split(", ")) for hook in hooks)
    for names in re.findall(r"-c \.ci/tools\.txt (.*)", (ROOT / ".ci" / "run").read_text()):
        assert set(names.split()) <= tools.keys()
    assert not re.search(r"pip\"? install .*\w[<>~]=", (ROOT / ".ci" / "run").read_text())


def test_wheels_have_one_time_for_all_files():
    builder = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert any(override.get("wheel") == {"reproducible": True} for override in builder["overrides"])


def audit(folder: Path, frozen: str, answer: str) -> subprocess.CompletedProcess:
    """.ci/audit with a pip-audit that only gives this answer."""
    (folder / "pip_audit.py").write_text(answer)
    (folder / "frozen.txt").write_text(frozen)
    command = [sys.executable, ROOT / ".ci" / "audit", folder / "frozen.txt"]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    "packages, code, words",
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, ["1 of 1 packages audited, 0 known"]),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}],
            1,
            ["1 of 1 packages audited, 1 known", "a 1 PYSEC-1 fixed in 2"],
        ),
        ([{"name": "a", "skip_reason": "not found"}], 0, ["0 of 1 packages audited", "NOT audited", "does not know a"]),
    ],
)
def test_an_audit_tells_clean_from_not_audited(tmp_path, packages, code, words):
    done = audit(tmp_path, "a==1\n", f"print({json.dumps(json.dumps({'dependencies': packages}))})")
    assert done.returncode == code and all(word in done.stdout for word in words), done


def test_an_audit_without_its_service_says_so(tmp_path):
    done = audit(tmp_path, "a==1\n", "raise ConnectionError('no such host')")
    assert done.returncode == 0 and "NOT audited" in done.stdout and "no such host" in done.stdout
    done = audit(tmp_path, "a @ file:///a\n", "print('{}')")
    assert done.returncode == 1 and "must have lines NAME==VERSION only, got 'a @ file:///a'" in done.stderr
