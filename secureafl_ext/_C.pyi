# ruff: noqa: N999 - the name of the binary
"""Types of the binary module (csrc/module.cpp)."""

MOST_CLIENTS: int
MOST_GPU_PAIRS: int
VERDICT_BYTES: int

def build_info() -> dict[str, str | None]: ...
def tile_columns(cuda: bool, clients: int, memory: int) -> int: ...
def pass_sums(clients: int, memory: int) -> int: ...
