"""Messages on stderr, and the text for an error that the user can correct."""

import sys
from concurrent.futures import BrokenExecutor

import torch

from ..validation import printable


def say(text: str) -> None:
    """Print a message on stderr. It may have names from untrusted files, so control characters are replaced."""
    print(f"secureafl: {printable(text, also=chr(10))}", file=sys.stderr, flush=True)


def message(error: Exception) -> str | None:
    """The message for an error, one line; None for a defect of the program, which needs its traceback."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, (ValueError, OSError, ImportError)):
        return str(error)
    if out_of_memory(error):
        why = str(error).partition("\n")[0][:200]
        return f"out of memory; smaller rounds, batch, delay, clients, memory or processes need less ({why})"
    return None


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. On a CPU torch raises a plain RuntimeError for that. A broken pool most likely means that
    the system killed a worker process."""
    return isinstance(error, (MemoryError, BrokenExecutor, torch.OutOfMemoryError)) or "can't allocate" in str(error)
