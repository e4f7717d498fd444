"""Kernels whose source runs on a CPU: emulator/ has a GPU's block, its warps in any order."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

FOLDER = Path(__file__).parent / "emulator"
SOURCES = FOLDER.parent.parent / "csrc"
# Some systems' compilers check every jump unless told otherwise, and end a program that jumps to another stack, as
# fibers do.
FLAGS = ("-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-DSECUREAFL_EMULATED", "-shared", "-fPIC")


@cache
def library(name: str) -> ctypes.CDLL:
    """emulator/NAME.cpp, compiled once."""
    made = Path(mkdtemp()) / f"{name}.so"
    subprocess.run(
        ["c++", *FLAGS, f"-I{FOLDER}", f"-I{SOURCES}", str(FOLDER / f"{name}.cpp"), "-o", str(made)], check=True
    )
    return ctypes.CDLL(str(made))


def pointers(*tensors) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
