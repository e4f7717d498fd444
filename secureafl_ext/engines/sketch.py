"""Sketch: a vector of d numbers as k numbers, so that inner products and distances stay about the same.

A count sketch (Charikar et al. 2002): every k neighbouring coordinates are dealt to the k buckets by a secret
permutation of their own, and a bucket is the sum of its coordinates with secret signs. The inner product of two
sketches is that of the vectors, with an error of about 1 / sqrt(k) times their norms. An attacker who does not know the
seed cannot choose a vector whose sketch is short. One permutation of all d coordinates would do the same, but its reads
would be scattered over the whole memory.
"""

import torch
from torch import Tensor

MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # of SplitMix64
GOLDEN = 0x9E3779B97F4A7C15


class Sketch:
    """order: (rows * k) int64, the coordinate in each place; bucket b has the places b, b + k, ..
    signs: (rows * k) 1 or -1; 0 where a place has no coordinate
    """

    def __init__(self, size: int, width: int, seed: int, dtype: torch.dtype, device: torch.device):
        self.width = width
        places = -(-size // width) * width
        within = hashed(places, seed, device).view(-1, width).argsort(dim=1, stable=True)  # (rows, k)
        order = (within + torch.arange(0, places, width, device=device)[:, None]).view(-1)
        signs = 1 - 2 * (hashed(places, seed + 1, device) & 1)
        self.order = torch.where(order < size, order, 0)
        self.signs = torch.where(order < size, signs, 0).to(dtype)

    def of(self, vector: Tensor) -> Tensor:
        """(k) of a vector (d). It stays finite if the vector is."""
        placed = vector.index_select(0, self.order) * self.signs
        sums = placed.view(-1, self.width).sum(0, dtype=torch.float64)
        most = torch.finfo(vector.dtype).max
        return sums.clamp(-most, most).to(vector.dtype)  # NaN stays NaN


def hashed(count: int, seed: int, device: torch.device) -> Tensor:
    """(count) int64: SplitMix64 of the numbers 0, 1, .. under this seed. The same on all devices and versions of torch,
    unlike torch's own random numbers: a checkpoint must find its sketches again."""
    seed = int(_mixed(torch.tensor(seed)))
    return _mixed(seed + torch.arange(count, device=device) * _signed(GOLDEN))


def _mixed(x: Tensor) -> Tensor:
    """The output function of SplitMix64, for each value of x int64."""
    for shift, factor in MIX:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits as unsigned numbers."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of this unsigned number."""
    return value - 2**64 if value >= 2**63 else value
