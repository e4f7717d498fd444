"""Sketch: a vector of d numbers as k numbers, so that inner products and distances stay about the same.

A count sketch (Charikar et al. 2002): k neighbouring coordinates, a row, go to the k buckets in turn, from a secret
bucket on, and a bucket is the sum of its coordinates with secret signs. The inner product of two sketches is that of
the vectors, with an error of about 1 / sqrt(k) times their norms: all that the proof needs is that two coordinates of
different rows share a bucket with probability 1 / k. Who does not know the seed cannot choose a vector whose sketch is
short. Memory is read in order, and of the sketch itself only a byte per coordinate.
"""

import torch
from torch import Tensor

MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # of SplitMix64
GOLDEN = 0x9E3779B97F4A7C15


class Sketch:
    """rotations: (rows) int32, 0 to k - 1, the bucket of the first coordinate of each row
    signs: (d) int8, 1 or -1
    """

    def __init__(self, size: int, width: int, seed: int, device: torch.device):
        self.size, self.width = size, width
        self.rotations = (hashed(-(-size // width), seed, device) % width).int()
        self.signs = (1 - 2 * (hashed(size, seed + 1, device) & 1)).to(torch.int8)

    def of(self, vector: Tensor) -> Tensor:
        """(k) of a vector (d). It stays finite if the vector is."""
        rows = len(self.rotations)
        signed = torch.nn.functional.pad(vector * self.signs, (0, rows * self.width - self.size)).view(rows, -1)
        source = (torch.arange(self.width, device=vector.device) - self.rotations[:, None]) % self.width  # (rows, k)
        sums = signed.gather(1, source).sum(0, dtype=torch.float64)
        most = torch.finfo(vector.dtype).max
        return sums.clamp(-most, most).to(vector.dtype)  # NaN stays NaN


def hashed(count: int, seed: int, device: torch.device) -> Tensor:
    """(count) int64: SplitMix64 of the numbers 0, 1, .. under this seed. The same on all devices and versions of torch,
    unlike torch's own random numbers: a checkpoint must find its sketches again."""
    seed = int(_mixed(torch.tensor(seed)))
    return _mixed(seed + torch.arange(count, device=device) * _signed(GOLDEN))


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in MIX:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits as unsigned numbers."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of this unsigned number."""
    return value - 2**64 if value >= 2**63 else value
