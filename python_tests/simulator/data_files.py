"""Files of data sets, written by hand."""

import numpy as np
import torch

RANDOM = np.random.default_rng(4)


def pixels(*shape: int) -> np.ndarray:
    return RANDOM.integers(256, size=shape, dtype=np.uint8)


def write(path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def same(got: torch.Tensor, expected) -> bool:
    return got.shape == np.shape(expected) and np.array_equal(got.cpu(), torch.as_tensor(expected).cpu())
