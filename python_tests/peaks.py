"""How much memory something takes while it runs."""

from pathlib import Path

import torch


def start_peak(device):
    """Bytes in use; from now on `peak` gives the most there were."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device):
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
