"""Counts of Lipschitz factors by key, so that a pooled Q keeps all factors in bounded memory.

A key is the exponent of a factor and the first 12 bits of its fraction. The fused rounds do the same in C++
(csrc/round/factor_counts.h).
"""

import torch
from torch import Tensor

ROWS, COLUMNS = 512, 1024  # rows of keys, keys per row
FRACTION = 12  # bits
FIRST = (1023 - 64) << FRACTION  # factors below 2^-64 all have the first key, factors from 2^64 on the last one


def empty_counts(keeps_all: bool, device: torch.device | None = None) -> Tensor:
    """(1 + ROWS, COLUMNS) int64: row 0 has the sums of the others. (0, COLUMNS) if nothing is to be counted."""
    return torch.zeros((1 + ROWS) * keeps_all, COLUMNS, dtype=torch.int64, device=device)


def keys_of(factors: Tensor) -> Tensor:
    """int64, in the order of the factors (float64)."""
    return ((factors.view(torch.int64) >> (52 - FRACTION)) - FIRST).clamp(0, ROWS * COLUMNS - 1)


def largest_with(keys: Tensor) -> Tensor:
    """float64: the largest factors that have these keys."""
    bits = ((keys + FIRST + 1) << (52 - FRACTION)) - 1
    return torch.where(keys < ROWS * COLUMNS - 1, bits.view(torch.float64), torch.inf)


def count_factors(counts: Tensor, factors: Tensor, when: Tensor) -> None:
    """Count the factors (k) for which `when` (k) is true."""
    keys = keys_of(factors)
    counts.view(-1).index_add_(0, torch.cat([keys // COLUMNS, COLUMNS + keys]), when.long().repeat(2))


def counted_below(counts: Tensor, key: Tensor) -> Tensor:
    """() int64: the number of factors with keys below this one ()."""
    row, columns = key // COLUMNS, torch.arange(COLUMNS, device=counts.device)
    in_row = torch.where(columns < key % COLUMNS, counts_of_row(counts, row), 0).sum()
    return torch.where(columns < row, counts[0], 0).sum() + in_row


def counts_of_row(counts: Tensor, row: Tensor) -> Tensor:
    """(COLUMNS): the counts of the keys from row * COLUMNS on. row: ()"""
    return counts.index_select(0, 1 + row.reshape(1))[0]
