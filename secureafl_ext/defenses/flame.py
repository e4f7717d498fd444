"""FLAME: the majority cluster by cosine, clipped to the median norm, with noise."""

import math

import torch
from torch import Tensor

from ..rules.row_rules import clip_to, median_of
from .base import Arrival, Verdict, need
from .memory_rows import LastUpdates, counter_hash

CHUNK = 2**22  # values that one step of `bottlenecks` holds at a time


class FLAME(LastUpdates):
    """Keeps the rows of the majority cluster by cosine distance, clips them to the median norm S of all rows, averages
    them and adds Gaussian noise of standard deviation noise * S.

    Source: Nguyen et al., USENIX Security 2022. It clusters with HDBSCAN: min_cluster_size = n // 2 + 1, min_samples =
    1, one cluster allowed. With these values HDBSCAN is single linkage that stops at the first cluster of more than
    half of the rows (see `majority_cluster`), which is computed here exactly, without a library.
    noise: lambda, 0.001 in the source for images
    clip: False leaves the clipping out
    momentum: of each client's row, beta * row + (1 - beta) * update; not in the source
    Fed with the memory of last updates. The source clusters local models. Here these started from models of different
    age, which their cosines would show first, so the updates are clustered.
    """

    def __init__(self, model: Tensor, clients: int, *, noise: float = 0.001, clip: bool = True, momentum: float = 0.0):
        need(0 <= noise < math.inf, "FLAME", "noise", "0 or more, finite", noise)
        super().__init__(model, clients, momentum)
        self.noise, self.clip = noise, clip
        self.rounds = torch.zeros((), dtype=torch.int64, device=model.device)

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        norms = self.products.diagonal().sqrt()  # (n)
        lengths = norms[:, None] * norms
        distance = 1 - torch.where(lengths > 0, self.products / lengths, 0)
        kept = majority_cluster(distance, self.seen)
        weights = kept / kept.sum(dtype=torch.float64).clamp(min=1)
        median = torch.where(self.ready(), median_of(norms, self.seen), 0)
        if self.clip:
            weights = weights * clip_to(norms, median)
        step, *rest = self.weighted(arrival, stored, weights)
        if self.noise:
            step = step + (self.noise * median).to(step.dtype) * gaussian(self.rounds, len(step)).to(step.dtype)
        self.rounds += 1
        return Verdict(step, *rest)


def majority_cluster(distance: Tensor, mask: Tensor) -> Tensor:
    """(n) bool: the first single-linkage cluster with more than half of the rows in mask. distance: (n, n)

    Why this is HDBSCAN: with min_samples = 1 the mutual reachability is the distance itself. A cluster needs more than
    half of the rows, so no split of the tree leaves two clusters. The root stays the only cluster, and the rows that
    leave it before it falls below that size are noise.
    """
    both = mask[:, None] & mask
    reach = bottlenecks(torch.where(both, distance, torch.inf).fill_diagonal_(0))  # (n, n)
    half = (mask.sum() // 2).expand(len(mask), 1)
    # The distance at which the cluster of each row has more than half of the rows.
    joins = torch.where(mask, reach.sort(1).values.gather(1, half)[:, 0], torch.inf)
    return mask & (joins <= joins.min())


def bottlenecks(distance: Tensor) -> Tensor:
    """(n, n): the least possible longest hop on a path between two rows. distance: (n, n), 0 on the diagonal

    A row and another are in one single-linkage cluster at every threshold from this value on. Each step doubles the
    number of hops that a path may have.
    """
    n = len(distance)
    rows = max(1, CHUNK // (n * n))
    for _ in range(max(1, math.ceil(math.log2(n)))):
        parts = [torch.maximum(part[:, :, None], distance).amin(1) for part in distance.split(rows)]
        distance = torch.cat(parts)
    return distance


def gaussian(counter: Tensor, size: int) -> Tensor:
    """(size) float64, standard normal, other values for each counter () int64 (Box-Muller)."""
    one, two = (counter_hash(counter, size, stream).double() for stream in (0, 1))
    return (-2 * ((one + 1) / 2**32).log()).sqrt() * (2 * math.pi * two / 2**32).cos()
