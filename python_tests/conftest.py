import pytest
import torch
from ranks import Ranks

# Where there is a GPU every test of an op runs on it too, and fails if the extension was built without CUDA.
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20260404)


@pytest.fixture(scope="session")
def ranks():
    """Processes for the tests of a split server."""
    processes = Ranks()
    yield processes
    processes.close()
