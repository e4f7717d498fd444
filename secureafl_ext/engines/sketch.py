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
MOST_PARAMETERS = 2**31 - 1  # of a sketched vector
NONE = -(2**31)  # a place without a coordinate


class Sketch:
    """places: (rows * k) int32, of each place its coordinate c if it is added, -1 - c if it is subtracted, NONE if it
    has none; bucket b has the places b, b + k, ..
    """

    def __init__(self, size: int, width: int, seed: int, device: torch.device):
        self.width = width
        places = -(-size // width) * width
        within = hashed(places, seed, device).view(-1, width).argsort(dim=1, stable=True)  # (rows, k)
        order = (within + torch.arange(0, places, width, device=device)[:, None]).view(-1)
        minus = (hashed(places, seed + 1, device) & 1).bool()
        self.places = torch.where(order < size, torch.where(minus, -1 - order, order), NONE).int()

    def of(self, vector: Tensor) -> Tensor:
        """(k) of a vector (d). It stays finite if the vector is."""
        minus, none = self.places < 0, self.places == NONE
        order = torch.where(minus, -1 - self.places, self.places).masked_fill_(none, 0)
        placed = vector.index_select(0, order) * (1 - 2 * minus.to(vector.dtype)).masked_fill_(none, 0)
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
