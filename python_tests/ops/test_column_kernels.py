"""The GPU's kernels of median and trimmed_mean that keep a column in registers, on an emulated GPU."""

import pytest
import torch
from emulated import call, library

from secureafl_ext import median, trimmed_mean

MEDIAN, TRIMMED = 0, 1  # enum Rule in csrc/coordinate_wise/rank.h
# Around every edge at which a column is kept in another way (reduce_in_registers, csrc/coordinate_wise).
EDGES = [0, 1, 2, 3, 15, 16, 17, 32, 33, 50, 52, 53, 64, 65, 127, 128, 129, 300, 320, 321, 640, 641, 1000, 1023, 1024]
SORTED = 64  # up to so many rows a column is sorted, and its sum is that of the CPU bit for bit


def on_gpu(updates, mask=None, trim=None, seed=1):
    """What the kernels make of updates (n, d): the median, or with a trim the trimmed mean."""
    out = torch.full(updates.shape[1:], torch.nan)
    rule = MEDIAN if trim is None else TRIMMED
    kept = torch.zeros(0, dtype=torch.bool) if mask is None else mask
    whole = *updates.shape, mask is not None, rule, trim or 0
    call(library("columns").columns, (updates, kept, out), whole, (), seed)
    return out


def hard_columns(random, n):
    """(n, 40): equal values, close ones, zeros of both signs, tiny and huge ones, infinities, NaN of both signs."""
    d, tiny = 4, torch.finfo(torch.float32).smallest_normal

    def pick(*values):
        return torch.tensor(values)[torch.randint(len(values), (n, d), generator=random)]

    plain = torch.randn(n, d, generator=random)
    return torch.cat([
        plain,
        pick(0.0, 1.0),
        pick(-0.0, 0.0, tiny / 8, -tiny / 8, 1e-45, -1e-45),
        1 + torch.randint(100, (n, d), generator=random) * torch.finfo(torch.float32).eps,
        torch.where(torch.rand(n, d, generator=random) < 0.2, 200 * plain, 1e-3 * plain),
        pick(1e-30, 3e38, -2e38, 1.5),
        pick(3.0, 2.0, torch.inf, 1.0),
        torch.where(torch.rand(n, d, generator=random) < 0.4, torch.nan, plain),
        torch.where(torch.rand(n, d, generator=random) < 0.05, -torch.tensor(torch.nan), plain),
        pick(torch.nan, torch.inf, -torch.inf),
    ], 1)  # fmt: skip


def masks(random, n):
    """No mask, all rows, none, one, the last two, most."""
    at = torch.arange(n)
    return None, at >= 0, at < 0, at == n // 2, at >= n - 2, torch.rand(n, generator=random) > 0.1


def same_bits(result, expected):
    return torch.equal(result.nan_to_num(0.5).view(torch.int32), expected.nan_to_num(0.5).view(torch.int32)) and (
        torch.equal(result.isnan(), expected.isnan())
    )


@pytest.mark.parametrize("n", EDGES)
def test_the_kernels_give_the_median_of_the_cpu(random, n):
    updates = hard_columns(random, n)
    for mask in masks(random, n):
        assert same_bits(on_gpu(updates, mask), median(updates, mask))


@pytest.mark.parametrize("n", EDGES[1:])
def test_the_kernels_give_the_trimmed_mean_of_the_cpu(random, n):
    updates = hard_columns(random, n)
    for mask in masks(random, n):
        kept = n if mask is None else int(mask.sum())
        for trim in {0, 1, kept // 5, max(kept // 2 - 1, 0), max(kept - 1, 0) // 2}:
            result = on_gpu(updates, mask, trim)
            if 2 * trim >= kept:  # refused where the host knows it
                assert torch.equal(result, torch.zeros_like(result))
                continue
            expected = trimmed_mean(updates, trim, mask)
            if n <= SORTED:
                assert same_bits(result, expected)
            torch.testing.assert_close(result, expected, rtol=2e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [40, 100, 700])
def test_no_order_of_lanes_and_rows_changes_a_bit(random, n):
    updates = torch.randn(n, 37, generator=random)
    mask = torch.rand(n, generator=random) > 0.1
    shuffle = torch.randperm(n, generator=random)
    for trim in (None, n // 5):
        first = on_gpu(updates, mask, trim)
        assert same_bits(first, on_gpu(updates, mask, trim, seed=2))
        assert same_bits(first, on_gpu(updates[shuffle].contiguous(), mask[shuffle], trim))
