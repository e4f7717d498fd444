"""Tensors of a GPU whose memory is on the host: a history that does not fit the GPU (history_device="cpu").

CUDA maps page-locked memory of the host into the addresses of the device. So kernels, torch and CUDA graphs use such a
tensor like any other of the GPU, and every access crosses the bus. Nothing is copied in between or cached: a
round of the recommended rule reads and writes the two rows of one client, and no row is needed twice.
"""

import mmap
import os
import weakref
from math import prod
from pathlib import Path

import torch
from torch import Tensor

PORTABLE, MAPPED = 1, 2  # flags of cudaHostRegister
CGROUP = Path("/sys/fs/cgroup")  # of a container


def history_zeros(where: str, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on `device`; with where="cpu" and a GPU, in memory of the host."""
    if where == "model" or device.type != "cuda" or prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.as_tensor(PageLocked(shape, dtype, device), device=device)


class PageLocked:
    """Page-locked zeros. torch makes a tensor of it that keeps it alive; then the memory is returned."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        size = prod(shape) * dtype.itemsize
        free = free_memory()
        if size > free:  # Linux would hand it out, and kill the process when it is used
            got = f"{size / 1e9:.3g} GB where {free / 1e9:.3g} GB are free"
            raise torch.OutOfMemoryError(f"SecureAFL: the history must fit into the host's memory, got {got}")
        pages = mmap.mmap(-1, size)  # whole pages of its own: those of malloc may be shared with another tensor
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE | MAPPED)
        if int(error):
            raise torch.OutOfMemoryError(f"SecureAFL: {size / 1e9:.3g} GB of the host could not be locked: {error}")
        weakref.finalize(self, unlock, address, device, pages)
        kind = f"<f{dtype.itemsize}"
        self.__cuda_array_interface__ = {"shape": shape, "typestr": kind, "data": (address, False), "version": 2}


def unlock(address: int, device: torch.device, pages: mmap.mmap) -> None:
    """pages: unused here, but the reference keeps the memory until then"""
    torch.cuda.synchronize(device)  # a kernel may still write to it
    torch.cuda.cudart().cudaHostUnregister(address)
    del pages


def free_memory() -> int:
    """Bytes of the host that are free, for this container if it has a limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # more exact: also counts the page cache, which can be dropped
        words = meminfo.read_text().split()
        free = 1024 * int(words[words.index("MemAvailable:") + 1])
    limit, used = (
        path.read_text().strip() if path.exists() else "" for path in (CGROUP / "memory.max", CGROUP / "memory.current")
    )
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free
