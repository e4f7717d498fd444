"""Tables about the server alone: its memory and the time of a round. No training is run."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import DTYPES
from ..server.server import SecureAFL
from ..sim import results
from ..sim.settings import Settings
from ..tasks import models
from .paper_numbers import Value

PACKAGES = Path(__file__).parents[2]  # the folder from which this package was imported
BENCH = Path("bench") / "scaling.py"  # in the source tree
WHOLE_ROUND = "server and gradient"  # the benchmark's CSV has several tables; this one times whole rounds
CLIENTS, PARAMETERS = 50, 140_000  # the paper's values while the other one varies


class Measurements(NamedTuple):
    values: dict[tuple[str, str], list[Value]]  # (row, column) -> one value
    provenance: str
    missing_reason: str  # why cells without a value have none


def server_memory(base: Settings, axes: Mapping[str, list], out: Path) -> Measurements:
    """GB of the server's state for the paper's CNN."""
    device = _device(base)
    start = torch.zeros(models.cnn((1, 28, 28), 10).size, device=device)
    values: dict[tuple[str, str], list[Value]] = {}
    for dtype in axes["history_dtype"]:
        server = SecureAFL(start, CLIENTS, memory=base.memory, history_dtype=DTYPES[dtype])
        size = sum(value.nbytes for value in server.state_dict().values() if isinstance(value, Tensor))
        values[dtype, "GB"] = [(size / 1e9,)]
    versions = results.spell(results.versions())
    provenance = f"{results.device_name(device)}; {versions}; commit {results.commit() or 'unknown'}"
    return Measurements(values, provenance, "")


def round_times(base: Settings, axes: Mapping[str, list], out: Path) -> Measurements:
    """Seconds per round, from the benchmark's CSV in the results folder; runs the benchmark if there is no CSV."""
    path = out / "bench" / "scaling.csv"
    failure = None if path.exists() else run_benchmark(torch.device(_device(base)).type, path.parent)
    if failure:
        return Measurements({}, "no benchmark", f"not run: {failure}")
    provenance = path.with_suffix(".md").read_text(encoding="utf-8").splitlines()[2]  # the line below its heading
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == WHOLE_ROUND]
    values: dict[tuple[str, str], list[Value]] = {}
    for row in rows:
        n, d, seconds = int(row["n"]), int(row["d"]), float(row["ms"]) / 1e3
        for column in axes.get("clients", []):
            if n == int(column) and about_equal(d, PARAMETERS):
                values[row["how"], column] = [(seconds,)]
        for column in axes.get("parameters", []):
            if n == CLIENTS and about_equal(d, int(column)):
                values[row["how"], column] = [(seconds,)]
    return Measurements(values, provenance, "not run: bench/scaling.py left this size out on this machine")


def about_equal(d: int, wanted: int) -> bool:
    """Within 2 %: the paper rounds the number of parameters (139,960 is its 140,000)."""
    return abs(d - wanted) < 0.02 * wanted


def run_benchmark(device: str, out: Path) -> str | None:
    """Run bench/scaling.py. Returns why it failed, or None."""
    script = next((tree / BENCH for tree in (PACKAGES, Path.cwd()) if (tree / BENCH).exists()), None)
    if script is None:
        return f"{BENCH} is neither here nor beside the package: it comes with the source, not with the package"
    sizes = "full" if device == "cuda" else "cpu"
    command = [sys.executable, str(script), "--device", device, "--sizes", sizes, "--out", str(out)]
    # Python searches the script's own folder first: PYTHONPATH makes it import this package and no other copy.
    path = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path}).returncode
    return f"bench/scaling.py ended with code {code}" if code else None


def _device(base: Settings) -> str:
    device = base.resolve().device
    assert device is not None, "resolve() fills in the device"
    return device


# By `Table.source`.
MEASURED: dict[str, Callable[[Settings, Mapping[str, list], Path], Measurements]] = {
    "memory": server_memory,
    "bench": round_times,
}
