"""rule="support": groups that are too large, clients whom others oppose, and who gains what they lose."""

import numpy as np
import pytest
import torch
from support_fleets import SIZE, fleet, products_of, unit, weights

from secureafl_ext.rules import support


def sizes_of(rows):
    """Of the group of each client."""
    return support.group_sizes(support.signed_kin(torch.from_numpy(products_of(rows))))


def share_of(rows, first):
    """Of the weight of all, that of the clients from this one on."""
    return weights(rows)[first:].sum() / weights(rows).sum()


def flippers(seed, groups=8):
    """40 honest clients in groups, then ten that push back what one group wants, each another."""
    random = np.random.default_rng(seed)
    rows = fleet(random, 50, common=0.1, group=0.7, own=0.2, groups=groups)
    rows[40:] = -rows[:10]
    return rows


def test_who_pushes_back_what_its_kin_want_has_no_weight():
    for seed in range(5):
        rows = flippers(seed)
        assert share_of(rows, 40) < 0.05
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(support, "OPPOSED", 98.0), patch.setattr(support, "OPPOSED_END", 99.0)
            patch.setattr(support, "APART", 98.0), patch.setattr(support, "APART_END", 99.0)
            assert share_of(rows, 40) > 0.1


def test_who_differs_from_its_kin_as_few_others_do_has_no_weight():
    """One attacker in each of ten groups sends what its kin send, a push that all attackers share, some more and some
    less of it, and noise: a backdoor where every client has the data of one class."""
    left = []
    for seed in range(5):
        random = np.random.default_rng(seed)
        rows = fleet(random, 50, common=0.1, group=0.7, own=0.2, groups=10)
        rows[40:, -1] += random.uniform(0.1, 0.5, 10)
        rows[40:] += 0.4 * unit(random, 10, SIZE + 1)
        assert share_of(rows, 40) < 0.01 and np.median(weights(rows)[:40]) > 1 / 50
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(support, "APART", 98.0), patch.setattr(support, "APART_END", 99.0)
            left.append(share_of(rows, 40))
    assert min(left) > 0.02 and np.mean(left) > 0.05


def test_without_an_odd_direction_no_client_loses_weight_by_distance():
    assert (support.kept_by_distance(torch.zeros(9, 0, dtype=torch.float64)) == 1).all()


def test_of_a_one_sided_direction_only_the_far_side_loses_weight():
    """The others there are the honest kin of the attackers, whose push is subtracted from their residuals."""
    loads = torch.tensor([0.01, -0.01, 0.02, -0.02, 0.01, -0.01, 0.01, 0.5, 0.4, -0.2], dtype=torch.float64)[:, None]
    assert support.kept_by_distance(loads)[[7, 8, 9]].tolist() == [0, 0, 1]
    assert support.kept_by_distance(-loads)[[7, 8, 9]].tolist() == [0, 0, 1]
    loads[9] = -0.4  # two camps
    assert support.kept_by_distance(loads)[[7, 8]].tolist() == [0, 0]
    loads[7] = loads[9].abs()
    loads[8] = 0.0
    assert support.kept_by_distance(loads)[[7, 9]].tolist() == [0, 0]  # as far on both sides: both lose


def test_a_group_that_many_oppose_keeps_its_weight():
    """Ten attackers send the opposite of one group, to have it left out. They are the larger group, and lose votes."""
    for seed in range(5):
        rows = flippers(seed)
        group = np.flatnonzero(rows[:40] @ rows[0] > 0.3)
        rows[40:] = -rows[group].mean(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(support, "OPPOSED", 98.0), patch.setattr(support, "OPPOSED_END", 99.0)
            without = weights(rows)[group].sum()
        assert weights(rows)[group].sum() >= 0.9 * without and 3 <= len(group) <= 7


def test_what_left_out_clients_lose_the_others_gain():
    rows = flippers(0)
    assert 0.99 < weights(rows).sum() < 1 + 1e-9  # a few are at the bound of a weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "FILL", 1.0)
        assert weights(rows).sum() < 0.9
        patch.setattr(support, "FILL", 1.05)
        assert weights(rows).sum() < 0.95  # not by more than this


@pytest.mark.parametrize("length", [0.25, 0.3, 0.4])
def test_attackers_who_all_send_the_same_weigh_no_more_than_one_group_however_short_it_is(length):
    """Too short for a crowd: their group is what gives them away. n = 50, f = 10, honest groups of four or five."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        rows = fleet(random, 50, common=0.1, group=0.6, own=0.2, groups=10)
        rows[40:] = length * unit(random, SIZE + 1)
        assert share_of(rows, 40) < 0.1 and weights(rows)[:40].sum() > 0.6  # a group of five weighs 0.1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(support, "GROUP", np.inf)
            assert share_of(rows, 40) > 0.1
            patch.undo()
            patch.setattr(support, "GROUP_LEFT", 0.0)
            assert share_of(rows, 40) < 0.01


def test_a_group_that_is_too_large_keeps_most_of_the_weight_of_a_usual_one():
    """14 of 50 clients are alike, the others in groups of four: too many for the bound, and maybe all honest. If they
    lost everything, nobody would learn their classes, and all clients that have these would join the group."""
    groups = np.concatenate([np.repeat(np.arange(9), 4), np.full(14, 9)])
    rows = 0.7 * np.eye(10)[groups] + 0.15 * unit(np.random.default_rng(0), 50, 10)
    sizes = sizes_of(rows)
    kept = support.kept_by_group(sizes)
    assert kept[:36].min() == 1
    assert 0.5 < kept[36:].sum() / sizes.median() < 1  # all together, in usual groups


def test_groups_of_different_size_keep_their_weight():
    """Sizes 1 to 8: a bound by the median size alone would take all weight from the largest."""
    sizes = np.repeat(np.arange(8), np.arange(1, 9))  # the group of each of 36 clients
    rows = 0.7 * np.eye(8)[sizes] + 0.2 * unit(np.random.default_rng(0), 36, 8)
    kept = support.kept_by_group(sizes_of(rows))
    assert kept.min() > 0.9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "GROUP_SPREADS", 0.0)
        patch.setattr(support, "GROUP_LEFT", 0.0)
        assert support.kept_by_group(sizes_of(rows)).min() < 0.7


def test_a_group_of_four_in_fifty_keeps_its_weight_where_hardly_anyone_is_alike():
    """As after harm: the updates of the harmed classes are long and alike, all others are mostly noise."""
    sizes = torch.ones(50, dtype=torch.float64)
    sizes[:4] = 4
    assert support.kept_by_group(sizes).min() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "GROUP_LEAST", 0.0)
        assert support.kept_by_group(sizes)[:4].max() < 0.5
    sizes[:6] = 6  # more than GROUP_LEAST of the clients, and more than the usual
    assert support.kept_by_group(sizes)[:6].max() < 0.5
