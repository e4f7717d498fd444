"""What the command line says of an error that its user can do something about."""

from concurrent.futures import BrokenExecutor

import torch


def words(error: Exception) -> str | None:
    """One line; None for an error of the program's own, whose traceback is wanted."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, (ValueError, OSError, ImportError)):
        return str(error)
    if out_of_memory(error):
        why = str(error).partition("\n")[0][:200]
        return f"out of memory; smaller rounds, batch, delay, clients, memory or processes need less ({why})"
    return None


def out_of_memory(error: Exception) -> bool:
    """torch has no type of its own for the CPU. A process of a pool that just ends was most likely ended for this."""
    return isinstance(error, (MemoryError, BrokenExecutor, torch.OutOfMemoryError)) or "can't allocate" in str(error)
