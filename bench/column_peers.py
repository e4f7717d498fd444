"""Coordinate-wise medians and trimmed means as other libraries offer them: what ours are timed against."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
from torch import Tensor


def optional(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


byzfl, cupy, triton_median = (optional(name) for name in ("byzfl", "cupy", "triton_median"))
threads = torch.get_num_threads()  # as many as ours has
pool = ThreadPoolExecutor(threads)


def middle(rows: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Of sorted rows: the mean of the two middle ones, which are one if their number is odd."""
    return (rows[(len(rows) - 1) // 2] + rows[len(rows) // 2]) / 2


def numpy_sort(stack: Tensor) -> Tensor:
    parts = np.array_split(stack.numpy(), threads, axis=1)
    return torch.from_numpy(np.concatenate(list(pool.map(lambda part: middle(np.sort(part, axis=0)), parts))))


# A peer reduces the rows of a stack (n, d); None: not installed.
EVERYWHERE = {
    "torch.median": lambda stack: stack.median(0).values,
    "torch.kthvalue": lambda stack: stack.kthvalue((len(stack) + 1) // 2, 0).values,
    "torch.sort": lambda stack: middle(stack.sort(0).values),
    "torch.quantile": lambda stack: stack.quantile(0.5, 0),
    "byzfl.Median": byzfl and (lambda stack: byzfl.Median()(stack)),
}
ON_CPU = {
    "np.median": lambda stack: torch.from_numpy(np.median(stack.numpy(), axis=0)),
    f"np.sort, columns in {threads} threads": numpy_sort,
}
ON_GPU = {
    "cupy.median": cupy and (lambda stack: torch.from_dlpack(cupy.median(cupy.from_dlpack(stack), axis=0))),
    "Triton, bisection in 32 steps": triton_median and triton_median.median,
}
TRIMMED_MEANS = {
    "torch.sort": lambda stack, trim: stack.sort(0).values[trim : len(stack) - trim].mean(0),
    "byzfl.TrMean": byzfl and (lambda stack, trim: byzfl.TrMean(trim)(stack)),
}


def medians(device: str) -> dict[str, Callable[[Tensor], Tensor] | None]:
    return EVERYWHERE | (ON_GPU if device == "cuda" else ON_CPU)
