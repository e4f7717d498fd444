"""Kernels whose source runs on a CPU: emulator/ has a GPU's block, its warps in any order."""

import ctypes
import fcntl
import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import torch

FOLDER = Path(__file__).parent / "emulator"


@cache
def library(name: str) -> ctypes.CDLL:
    """emulator/NAME.cpp, compiled once for all processes of a test run, or before it."""
    before = os.environ.get("SECUREAFL_EMULATORS")  # .ci/run compiles them while it waits for packages
    if before:
        return ctypes.CDLL(str(Path(before, f"{name}.so")))
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # random, and the same in all workers of a run
    folder = Path(gettempdir(), f"emulated-{run}") if run else Path(mkdtemp())
    folder.mkdir(mode=0o700, exist_ok=True)
    source, made, done = FOLDER / f"{name}.cpp", folder / f"{name}.so", folder / f"{name}.done"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            subprocess.run(["sh", FOLDER / "compile", source, "-o", made], check=True)
            done.touch()
    return ctypes.CDLL(str(made))


def pointers(*tensors) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def call(function, tensors, whole, real, seed):
    """Runs kernels. tensors: their arguments in the order that the function reads them; whole, real: the numbers."""
    at = pointers(*tensors)
    function(
        (ctypes.c_void_p * len(at))(*at),
        (ctypes.c_int64 * len(whole))(*whole),
        (ctypes.c_double * len(real))(*real),
        seed,
    )


JUDGED = torch.bool, torch.float64, torch.int64  # accepted, factor, reason


def call_round(function, tensors, whole, real, seed, results=JUDGED):
    """The same for a round, whose last tensors are its results, of these dtypes."""
    results = tuple(torch.zeros((), dtype=dtype) for dtype in results)
    call(function, (*tensors, *results), whole, real, seed)
    return results


def emulate(monkeypatch, server, step, module):
    """The server's rounds from here on are those of `step`, in place of the op that `module` calls."""
    plain = server._engine.round

    def round(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(module, "step", step)
            return plain(*arguments)

    server._engine.round = round
    return server
