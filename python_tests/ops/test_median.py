"""median and trimmed_mean, the two rules over stored rows."""

import hypothesis.extra.numpy as hnp
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peaks import peak, start_peak

from secureafl_ext import median, reference, trimmed_mean
from secureafl_ext.sim.runner import cpu_threads

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# n: one, even, odd, around a warp, more than a warp's two rounds. d: one column, around a tile, many tiles.
SIZES = [(1, 1), (2, 31), (3, 32), (4, 33), (5, 1100), (31, 7), (32, 64), (33, 65), (64, 5), (65, 129), (300, 40)]
# Every row 300 times leaves the median as it is, and the trimmed mean too if the trim grows alike. The CPU sorts up to
# 1024 rows and searches more of them, as the GPU does any number: both must pass the same cases.
REPEATS = [1, 300]


def rows(random, n, d, dtype=torch.float32):
    return torch.randn(n, d, generator=random, dtype=torch.float64).to(dtype)


def as_numpy(tensor):
    """Two-byte floats widen exactly; NumPy has no bfloat16."""
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).cpu().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_median_is_the_middle_of_the_sorted_column(random, device, n, d, dtype):
    updates = rows(random, n, d, dtype)
    assert oracles.same(median(updates.to(device)), oracles.median(as_numpy(updates)))


# n: around every edge at which a GPU keeps a column in another way (csrc/coordinate_wise/in_registers.cuh).
EDGES = [15, 16, 17, 32, 33, 50, 52, 53, 64, 65, 100, 127, 128, 129, 299, 300, 320, 321, 640, 641, 1000, 1024, 1025]


@pytest.mark.parametrize("n", EDGES)
def test_median_of_columns_that_are_hard_to_search(random, device, n):
    """Equal values, some that differ in their last bits, zeros of both signs, the smallest numbers, huge ones, NaN."""
    d = 24

    def pick(*values):
        return torch.tensor(values)[torch.randint(len(values), (n, d), generator=random)]

    tiny = torch.finfo(torch.float32).smallest_normal
    kinds = [
        rows(random, n, d),
        pick(0.0, 1.0),
        pick(0.0, 0.0, 0.0, -1.0, 1.0),
        pick(-0.0, 0.0, tiny / 8, -tiny / 8, 1e-45, -1e-45),
        1 + torch.randint(100, (n, d), generator=random) * torch.finfo(torch.float32).eps,
        torch.where(torch.rand(n, d, generator=random) < 0.2, 200 * rows(random, n, d), 1e-3 * rows(random, n, d)),
        pick(-3e38, 3e38, 1e-30, torch.inf, -torch.inf),
        torch.where(torch.rand(n, d, generator=random) < 0.5, torch.nan, rows(random, n, d)),
        -(rows(random, n, d).abs() ** 9),
    ]
    updates = torch.cat(kinds, 1)
    assert oracles.same(median(updates.to(device)), oracles.median(as_numpy(updates)))
    mask = torch.rand(n, generator=random) < 0.8
    masked = median(updates.to(device), mask.to(device))
    assert oracles.same(masked, oracles.median(as_numpy(updates[mask])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_trimmed_mean_drops_both_ends(random, device, n, d, dtype):
    updates = rows(random, n, d, dtype)
    for trim in {0, (n - 1) // 4, (n - 1) // 2}:
        result = trimmed_mean(updates.to(device), trim)
        expected = torch.from_numpy(oracles.trimmed(as_numpy(updates), trim))
        torch.testing.assert_close(result.cpu(), expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-14)


@pytest.mark.parametrize("n", EDGES)
def test_trimmed_mean_with_ties_nan_and_a_mask(random, device, n):
    few = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 3.0, torch.nan])
    updates = torch.cat([few[torch.randint(len(few), (n, 20), generator=random)], rows(random, n, 20)], 1)
    updates[0, 20:30] = torch.nan  # the largest rank alone
    mask = torch.rand(n, generator=random) < 0.8
    for keep in (torch.ones(n, dtype=torch.bool), mask):
        kept = int(keep.sum())
        for trim in {0, 1, kept // 5, (kept - 1) // 2}:
            result = trimmed_mean(updates.to(device), trim, keep.to(device)).cpu()
            expected = torch.from_numpy(oracles.trimmed(as_numpy(updates[keep]), trim)).float()
            torch.testing.assert_close(result, expected, rtol=2e-7, atol=1e-14, equal_nan=True)


def test_median_trimmed_mean_and_mean_differ(device):
    updates = torch.tensor([[1.0], [2.0], [4.0], [11.0], [1000.0], [2000.0]], device=device)
    assert median(updates).item() == 7.5
    assert trimmed_mean(updates, 1).item() == (2 + 4 + 11 + 1000) / 4
    assert trimmed_mean(updates, 2).item() == 7.5
    assert trimmed_mean(updates, 0).item() == 503


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("kept", [0, 1, 2, 3, 10, 11])
def test_masked_rows_do_not_count(random, device, kept, repeats):
    updates = rows(random, 11, 50)
    mask = torch.zeros(11, dtype=torch.bool)
    mask[torch.randperm(11, generator=random)[:kept]] = True
    expected = oracles.median(as_numpy(updates[mask]))
    updates[~mask] = torch.nan
    many, many_mask = updates.to(device).repeat(repeats, 1), mask.to(device).repeat(repeats)
    assert oracles.same(median(many, many_mask), expected)
    if kept > 2:
        result = trimmed_mean(many, repeats, many_mask)
        torch.testing.assert_close(result.cpu().double(), torch.from_numpy(oracles.trimmed(as_numpy(updates[mask]), 1)))


def test_no_rows_and_no_columns(device):
    assert torch.equal(median(torch.empty(0, 4, device=device)), torch.zeros(4, device=device))
    assert median(torch.empty(3, 0, device=device)).shape == (0,)
    assert trimmed_mean(torch.empty(3, 0, device=device), 1).shape == (0,)


def test_too_deep_a_trim_is_refused_on_the_host_and_zeros_on_the_device(device):
    updates, mask = torch.ones(5, 3, device=device), torch.tensor([True, True, False, False, False], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"trimmed_mean: trim must leave a row, 2 \* trim < 2, got trim = 1"):
            trimmed_mean(updates, 1, mask)
    else:
        assert torch.equal(trimmed_mean(updates, 1, mask), torch.zeros(3, device=device))


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_values(device, dtype, repeats):
    limits = torch.finfo(dtype)
    least = torch.tensor(limits.smallest_normal, dtype=dtype) * limits.eps  # the smallest denormal
    columns = torch.tensor(
        [
            [limits.max, limits.max, limits.max, limits.max],  # the two middles' sum overflows
            [limits.max, limits.max / 2, limits.max, limits.max / 2],
            [limits.max, -limits.max, limits.max, -limits.max],
            [least, least, least, least],  # halves of it would vanish
            [-least, least, 3 * least, 5 * least],
            [0.0, -0.0, 0.0, -0.0],
            [torch.inf, -torch.inf, 1, 3],
            [7, 7, 7, 9],  # ties
            [torch.inf, torch.inf, torch.inf, 1],
        ],
        dtype=dtype,
    ).T
    result = median(columns.to(device).repeat(repeats, 1)).cpu()
    expected = torch.tensor([limits.max, 0.75 * limits.max, 0, least, 2 * least, 0, 2, 7, torch.inf], dtype=dtype)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("repeats", REPEATS)
def test_trimmed_mean_counts_ties_at_the_border(device, repeats):
    updates = torch.tensor([[1.0], [1], [1], [1], [2], [5], [5], [5], [9]], device=device).repeat(repeats, 1)
    assert trimmed_mean(updates, 2 * repeats).item() == pytest.approx((1 + 1 + 2 + 5 + 5) / 5)
    assert trimmed_mean(updates, 3 * repeats).item() == pytest.approx((1 + 2 + 5) / 3)


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trimmed_mean_of_equal_values_is_that_value(device, dtype, repeats):
    """A sum of them would round, overflow, or turn -0 into +0."""
    values = torch.tensor([0.1, torch.finfo(dtype).max, -0.0, torch.inf], dtype=dtype)
    updates = values.repeat(9 * repeats, 1)
    updates[: 2 * repeats], updates[7 * repeats :] = -torch.inf, torch.nan
    result = trimmed_mean(updates.to(device), 2 * repeats).cpu()
    assert torch.equal(result, values)
    assert result[2].signbit()


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 4, 5, 9, 10])
def test_nan_orders_last_as_in_sort(random, device, dtype, count, repeats):
    updates = rows(random, 10, 64, dtype)
    for column in range(64):
        updates[torch.randperm(10, generator=random)[:count], column] = torch.nan
    updates[:, ::2] = updates[:, ::2].copysign(torch.tensor(-1.0))  # negative NaN is NaN too
    updates[0, :8] = torch.inf
    repeated = updates.to(device).repeat(repeats, 1)
    assert oracles.same(median(repeated), reference.median(updates))
    for trim in (0, 2, 4):
        expected = reference.trimmed_mean(updates, trim)
        torch.testing.assert_close(trimmed_mean(repeated, trim * repeats).cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("repeats", REPEATS)
def test_rows_in_any_order_give_the_same_bits(random, device, repeats):
    updates = rows(random, 24, 200)
    updates[::5, :50] = 0.0
    updates[1::5, :50] = -0.0
    updates = updates.repeat(repeats, 1)
    shuffled = updates[torch.randperm(len(updates), generator=random)]
    first, second = median(updates.to(device)), median(shuffled.to(device))
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("rule", [median, lambda updates: trimmed_mean(updates, 2)], ids=["median", "trimmed_mean"])
def test_views_give_what_their_copies_give(random, device, rule):
    base = rows(random, 40, 80).to(device)
    views = {
        "transposed": base[:, :21].T,
        "strided": base[::3, 5::4],
        "offset": base[7:28, 11:60],
        "expanded": base[:7, :1].expand(7, 33),
        "flipped sign": torch.complex(base, base).conj().imag[:9],  # a lazy negation
    }
    for name, view in views.items():
        assert torch.equal(rule(view), rule(view.clone(memory_format=torch.contiguous_format))), name


def test_masks_may_be_strided(random, device):
    updates, mask = rows(random, 8, 9).to(device), torch.tensor([True, False] * 8, device=device)[::2]
    assert torch.equal(median(updates, mask), median(updates))


finite_or_not = {32: st.floats(width=32), 64: st.floats(width=64)}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), bits=st.sampled_from([32, 64]), n=st.integers(0, 40), d=st.integers(0, 40))
def test_any_floats_any_shape(data, bits, n, d):
    updates = data.draw(hnp.arrays(f"float{bits}", (n, d), elements=finite_or_not[bits]))
    mask = data.draw(hnp.arrays(bool, n))
    kept = updates[mask]
    result = median(torch.from_numpy(updates), torch.from_numpy(mask))
    assert oracles.same(result, oracles.median(kept))
    if len(kept) > 2:
        with np.errstate(over="ignore"):
            expected = torch.from_numpy(oracles.trimmed(kept, 1).astype(updates.dtype))
        largest = float(np.abs(np.where(np.isfinite(kept), kept, 0)).max(initial=0))
        result = trimmed_mean(torch.from_numpy(updates), 1, torch.from_numpy(mask))
        if largest < 1e306:  # else the order of the sum decides whether it overflows
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=largest * 1e-13, equal_nan=True)


@pytest.mark.parametrize("rule", [median, lambda updates: trimmed_mean(updates, 9)], ids=["median", "trimmed_mean"])
def test_a_hundred_repeats_and_any_thread_count_are_bit_equal(random, device, rule):
    updates = rows(random, 50, 3000).to(device)
    first = rule(updates)
    assert all(torch.equal(rule(updates), first) for _ in range(100))
    for count in (1, 2, 3):
        with cpu_threads(count):
            assert torch.equal(rule(updates), first)


def test_every_count_of_rows(random, device):
    """The CPU's network differs with each, and in few columns a missing exchange might not show."""
    for n in [*range(1, 140), 1023, 1024, 1025]:
        updates = rows(random, n, 300)
        assert oracles.same(median(updates.to(device)), oracles.median(as_numpy(updates)))
        expected = torch.from_numpy(oracles.trimmed(as_numpy(updates), n // 3))
        torch.testing.assert_close(trimmed_mean(updates.to(device), n // 3).cpu(), expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1100, 1101])
def test_more_rows_than_a_network_sorts(random, device, n, dtype):
    """Beyond some thousand rows the CPU searches the keys as the GPU always does: ties, NaN, zeros, infinities."""
    few = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 3.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    updates = torch.cat([few[torch.randint(len(few), (n, 40), generator=random)], rows(random, n, 40, dtype)], dim=1)
    updates[:, 40:60].round_()  # ties among finite values
    mask = torch.rand(n, generator=random) > 0.02
    for keep in (torch.ones(n, dtype=torch.bool), mask):
        assert oracles.same(median(updates.to(device), keep.to(device)), oracles.median(as_numpy(updates[keep])))
        for trim in (0, 1, 130, 400, (int(keep.sum()) - 1) // 2):
            expected = torch.from_numpy(oracles.trimmed(as_numpy(updates[keep]), trim)).to(dtype)
            result = trimmed_mean(updates.to(device), trim, keep.to(device))
            torch.testing.assert_close(result.cpu(), expected, rtol=torch.finfo(dtype).eps, atol=1e-12, equal_nan=True)


def test_ten_thousand_rows(random, device):
    for dtype in (torch.float32, torch.float64):
        updates = rows(random, 10_000, 5, dtype)
        assert oracles.same(median(updates.to(device)), oracles.median(as_numpy(updates)))


@pytest.mark.parametrize("rule", [median, lambda rows: trimmed_mean(rows, 1)], ids=["median", "trimmed_mean"])
def test_rows_without_columns_take_no_memory(rule):
    """Such a tensor takes none itself, whatever the number of its rows."""
    rows = torch.empty(2**24, 0)
    before = start_peak("cpu")
    assert rule(rows).shape == (0,)
    assert peak("cpu") - before < 2**26
