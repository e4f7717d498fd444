"""Rules that weigh whole rows: weights from inner products against the definitions on the rows themselves."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from oracles import median
from slow_rows import TWINS

from secureafl_ext.config import Config
from secureafl_ext.rules.row_rules import WEIGHTS, bucketed

SIZE = 12
F64 = torch.float64


def by_weights(config, rows, centre, mask, device="cpu"):
    """What a rule makes of the rows (n, d) that mask (n) keeps; the others must not even be finite."""
    stack = np.vstack([np.where(mask[:, None], rows, 0), centre[None]]) if config.rule == "centered_clip" else rows
    stack = np.where(np.append(mask, True)[: len(stack), None], stack, 0)
    gram, mask = (torch.from_numpy(array).to(device) for array in (stack @ stack.T, mask))
    weights = WEIGHTS[config.rule](gram, mask, config).cpu()
    assert weights.dtype == F64 and not weights[: len(rows)][~mask.cpu()].any()
    return weights.numpy() @ stack


def scene(seed, n=11):
    """Rows around a common one, some far along one direction; a centre nearby."""
    random = np.random.default_rng(seed)
    common = random.normal(size=SIZE)
    rows = common + random.normal(size=(n, SIZE))
    rows[::4] += 4 * random.normal(size=SIZE)
    rows[5 % n] *= 7
    return rows, common + random.normal(size=SIZE)


MASKS = {
    "all": lambda n: np.ones(n, bool),
    "every second": lambda n: np.arange(n) % 2 == 1,
    "all but one": lambda n: np.arange(n) != 4,
    "three": lambda n: np.isin(np.arange(n), (0, 3, 8)),
    "two": lambda n: np.isin(np.arange(n), (2, 8)),
    "one": lambda n: np.arange(n) == 6,
}
OPTIONS = {
    "centered_clip": [{}, {"radius": 1.5}, {"iterations": 5}, {"radius": 0.3, "iterations": 1}],
    "spectral": [{}, {"remove": 0.4}, {"remove": 0.0}],
    "krum": [{}, {"remove": 0.4}, {"remove": 0.0}, {"remove": 0.9}],
    "geometric_median": [{}],
    "mean": [{}],
}
CASES = [(rule, option) for rule, options in OPTIONS.items() for option in options]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
def test_weights_give_what_the_definition_gives_on_the_rows(rule, options, mask, device):
    config = Config(rule=rule, **options)
    for seed in range(3):
        rows, centre = scene(seed)
        kept = MASKS[mask](len(rows))
        expected = TWINS[rule](rows[kept], centre, config)
        assert np.allclose(by_weights(config, rows, centre, kept, device), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("rule", TWINS)
def test_equal_rows_give_that_row_and_no_rows_no_nan(rule, device):
    config = Config(rule=rule, iterations=60, radius=100.0)
    for row in (np.arange(1.0, SIZE + 1), np.zeros(SIZE)):
        rows = np.tile(row, (5, 1))
        for count in (5, 2, 1):
            result = by_weights(config, rows, np.zeros(SIZE), np.arange(5) < count, device)
            assert np.allclose(result, row, atol=1e-12)
    if rule == "centered_clip":  # by its median radius too, where centre and rows are all the same
        assert np.allclose(by_weights(Config(rule=rule), rows + 2, rows[0] + 2, np.ones(5, bool), device), 2)
    assert np.isfinite(by_weights(config, rows, np.ones(SIZE), np.zeros(5, bool), device)).all()


@pytest.mark.parametrize("rule", TWINS)
def test_two_equal_rows_among_others_count_twice(rule):
    config = Config(rule=rule)
    rows, centre = scene(4)
    rows[3] = rows[7]
    expected = TWINS[rule](rows, centre, config)
    assert np.allclose(by_weights(config, rows, centre, np.ones(len(rows), bool)), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("rule", TWINS)
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_outliers_move_the_mean_and_hardly_a_robust_rule(rule, share):
    random = np.random.default_rng(3)
    honest = 1 + 0.1 * random.normal(size=(20, SIZE))
    rows = honest.copy()
    rows[: int(share * 20)] = 1e6 * random.normal(size=(int(share * 20), SIZE))
    result = by_weights(Config(rule=rule), rows, np.zeros(SIZE), np.ones(20, bool))
    moved = np.linalg.norm(result - honest.mean(0)) / np.linalg.norm(honest.mean(0))
    assert moved > 1e3 if rule == "mean" else moved < 0.3


def test_zero_rows_do_not_hold_the_geometric_median():
    rows = 1 + 0.1 * np.random.default_rng(0).normal(size=(10, SIZE))
    rows[:3] = 0
    assert np.allclose(by_weights(Config(rule="geometric_median"), rows, rows[0], np.ones(10, bool)), 1, atol=0.25)


def test_spectral_removes_colluding_rows_that_move_the_median(device):
    """Min-Max: all malicious rows are the honest mean, shifted alike by less than honest rows differ."""
    random = np.random.default_rng(1)
    honest = random.normal(size=(40, 400))
    shift = -0.9 * honest.std(0) * np.sign(honest.mean(0))
    rows = np.vstack([honest[:17], np.tile(honest.mean(0) + shift, (10, 1)), honest[17:]])
    largest = max(np.linalg.norm(a - b) for a in honest for b in honest)
    assert max(np.linalg.norm(rows[17] - row) for row in honest) < largest
    mask = torch.ones(50, dtype=torch.bool, device=device)
    weights = WEIGHTS["spectral"](torch.from_numpy(rows @ rows.T).to(device), mask, Config(rule="spectral", remove=0.2))
    assert (weights.cpu() > 0).tolist() == [not 17 <= k < 27 for k in range(50)]
    distance = np.linalg.norm(weights.cpu().numpy() @ rows - honest.mean(0))
    assert distance < 0.1 * np.linalg.norm(median(rows) - honest.mean(0))


@pytest.mark.parametrize(("count", "size"), [(11, 2), (11, 3), (10, 5), (4, 7), (1, 2), (0, 3)])
def test_buckets_hold_every_row_once_and_weigh_theirs_alike(count, size, device):
    mask = torch.zeros(11, dtype=torch.bool)
    mask[torch.randperm(11, generator=torch.Generator().manual_seed(count))[:count]] = True
    deal = bucketed(mask.to(device), torch.tensor(5, device=device), size).cpu()
    assert deal.shape == (-(-11 // size), 11)
    assert torch.equal((deal > 0).sum(0), mask.long())
    filled = [size] * (count // size) + [count % size] * (count % size > 0)
    assert (deal > 0).sum(1).tolist() == filled + [0] * (len(deal) - len(filled))
    for bucket, many in zip(deal, filled, strict=False):
        assert torch.equal(bucket[bucket > 0], torch.full((many,), 1 / many, dtype=F64))


def test_buckets_are_dealt_anew_by_every_draw_and_alike_by_the_same():
    mask, together = torch.ones(20, dtype=torch.bool), torch.zeros(20, 20)
    deals = [bucketed(mask, torch.tensor(draw), 2) for draw in range(400)]
    assert torch.equal(deals[7], bucketed(mask, torch.tensor(7), 2))
    assert all(not torch.equal(a, b) for a, b in pairwise(deals))
    for deal in deals:
        together += (deal > 0).float().T @ (deal > 0).float()
    pairs = together[~torch.eye(20, dtype=torch.bool)]  # each pair is expected in 400 / 19 = 21 of the deals
    assert pairs.min() > 5 and pairs.max() < 45
