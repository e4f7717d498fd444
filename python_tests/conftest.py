import os

if "PYTEST_XDIST_WORKER" in os.environ:  # every core has a process already; torch reads this when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from flower_processes import flower  # noqa: F401 - a fixture
from pretended import Pretended
from ranks import Ranks

from secureafl_ext.sim import runner
from secureafl_ext.tasks import datasets

# Where there is a GPU every test of an op runs on it too, and fails if the extension was built without CUDA.
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_configure(config):
    """`pytest -n` needs a plug-in, the tests do not. Files stay whole: what one compiles or starts serves all of it."""
    if config.getoption("dist", "no") == "load":  # what -n alone asks for
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False  # or files of a single test, the slowest among them, would come last


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20260404)


@pytest.fixture
def pretended(monkeypatch, tmp_path) -> Pretended:
    """What runs, in place of the simulator; files go to a folder of the test's own."""
    made = Pretended()
    monkeypatch.setattr(runner, "run_many", made)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture(scope="session")
def ranks():
    """Processes for the tests of a split server."""
    processes = Ranks()
    yield processes
    processes.close()


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No data set is found: what this machine has must not decide a test."""
    monkeypatch.setattr(datasets, "USUAL", ("./data", "~/.cache"))
    monkeypatch.delenv(datasets.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
