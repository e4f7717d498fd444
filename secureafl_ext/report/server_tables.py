"""What the paper tells of the server alone: the memory that it holds, the time of a round. No training is run."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from ..config import DTYPES
from ..server.server import SecureAFL
from ..sim import results
from ..sim.settings import Settings
from ..tasks import models
from .paper import Value

PACKAGES = Path(__file__).parents[2]  # the folder that this package was imported from
BENCH = Path("bench") / "scaling.py"  # of the source tree
WHOLE_ROUND = "server and gradient"  # of the tables in its CSV
CLIENTS, PARAMETERS = 50, 140_000  # the paper's where the other one varies

# By row and column the values, one each; how they came about; why others are missing.
Answer = tuple[dict[tuple[str, str], list[Value]], str, str]


def held(base: Settings, axes: dict[str, list], out: Path) -> Answer:
    """GB of the state of a server for the paper's CNN."""
    device = base.resolve().device
    start = torch.zeros(models.cnn((1, 28, 28), 10).size, device=device)
    values = {}
    for dtype in axes["history_dtype"]:
        server = SecureAFL(start, CLIENTS, memory=base.memory, history_dtype=DTYPES[dtype])
        size = sum(value.nbytes for value in server.state_dict().values() if isinstance(value, Tensor))
        values[dtype, "GB"] = [(size / 1e9,)]
    versions = results.spell(results.versions())
    return values, f"{results.device_name(device)}; {versions}; commit {results.commit() or 'unknown'}", ""


def timed(base: Settings, axes: dict[str, list], out: Path) -> Answer:
    """Seconds from the benchmark's CSV in the results folder; the benchmark runs if it is not there."""
    path = out / "bench" / "scaling.csv"
    failed = None if path.exists() else benchmark(torch.device(base.resolve().device).type, path.parent)
    if failed:
        return {}, "no benchmark", f"not run: {failed}"
    about = path.with_suffix(".md").read_text(encoding="utf-8").splitlines()[2]  # below its heading
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == WHOLE_ROUND]
    values = {}
    for row in rows:
        n, d, seconds = int(row["n"]), int(row["d"]), float(row["ms"]) / 1e3
        for column in axes.get("clients", []):
            if n == int(column) and near(d, PARAMETERS):
                values[row["how"], column] = [(seconds,)]
        for column in axes.get("parameters", []):
            if n == CLIENTS and near(d, int(column)):
                values[row["how"], column] = [(seconds,)]
    return values, about, "not run: bench/scaling.py left this size out on this machine"


def near(d: int, wanted: int) -> bool:
    """The paper's 140,000 are 139,960, and the larger nets are as near."""
    return abs(d - wanted) < 0.02 * wanted


def benchmark(device: str, out: Path) -> str | None:
    """Why it did not run, if it did not."""
    script = next((tree / BENCH for tree in (PACKAGES, Path.cwd()) if (tree / BENCH).exists()), None)
    if script is None:
        return f"{BENCH} is neither here nor beside the package: it comes with the source, not with the package"
    sizes = "full" if device == "cuda" else "cpu"
    command = [sys.executable, str(script), "--device", device, "--sizes", sizes, "--out", str(out)]
    # A script's own folder is where Python looks first: the package that it times must be this one all the same.
    path = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path}).returncode
    return f"bench/scaling.py ended with code {code}" if code else None


MEASURED = {"memory": held, "bench": timed}
