"""The code of docs/embedding.md, run: the plain loop anywhere, NVFlare and APPFL where one of them is installed."""

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from places import ROOT

EXAMPLES = ROOT / "examples" / "embedding"
SHOWN = ("plain.py", "nvflare_controller.py", "appfl_aggregator.py")


@pytest.mark.parametrize("name", SHOWN)
def test_page_shows_what_runs(name):
    code = (EXAMPLES / name).read_text()
    assert f"```python\n{code}```" in (ROOT / "docs" / "embedding.md").read_text()
    assert 10 <= len([line for line in code.splitlines() if line and not line.startswith('"""')]) <= 30


def engine(name: str):
    install = f"in an environment of its own: pip install -r examples/embedding/{name}.txt . pytest"
    absent = pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}, {install}")
    return pytest.param(f"{name}_run.py", 10, marks=[pytest.mark.slow, absent], id=name)


def withstood(printed: str) -> bool:
    errors = re.search(r"^error with SecureAFL ([\d.]+), without ([\d.]+)", printed, re.MULTILINE)
    defended, undefended = map(float, errors.groups())
    return defended < 0.27 and undefended > 0.8


def test_a_malicious_client_is_withstood(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with torch.random.fork_rng():
        torch.manual_seed(0)  # a process of its own would start with the same numbers each time
        runpy.run_path(str(EXAMPLES / "plain.py"), run_name="__main__")
    assert withstood(capsys.readouterr().out)


@pytest.mark.parametrize("script, greeted", [engine("nvflare"), engine("appfl")])
def test_so_it_is_inside_an_engine(script, greeted, tmp_path):
    """greeted: how often the log tells of a first contact, once per client and run"""
    command = [sys.executable, EXAMPLES / script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert withstood(done.stdout)
    assert (done.stdout + done.stderr).count("accepted: first contact") == greeted
