"""The kinship rule alone, on averages that are given: its bounds are as said."""

import numpy as np
import pytest
import torch

from secureafl_ext.rules.kinship import KIN, KNOWN, TURNED, Kinship

F64 = torch.float64


def met(device, means, count=KNOWN):
    kinship = Kinship(len(means), torch.device(device))
    kinship.means.copy_(torch.as_tensor(means, dtype=F64))
    kinship.met.fill_(count)
    return kinship


def everyone(n, device="cpu"):
    return torch.ones(n, dtype=torch.bool, device=device)


def test_the_bounds_are_as_said(device):
    """Seven clients and a group of three: kin 3 against a median of 1 is a crowd, against 2 it is none."""
    group = np.eye(7)
    group[:3, :3] += (KIN + 1e-6) * (1 - np.eye(3))
    pairs = group.copy()
    pairs[3, 4] = pairs[4, 3] = KIN + 1e-6
    all_kept = [True] * 7
    assert met(device, group).kept(everyone(7, device)).tolist() == [False] * 3 + [True] * 4
    assert met(device, pairs).kept(everyone(7, device)).tolist() == all_kept
    assert met(device, group - 2e-6 * (group < 1)).kept(everyone(7, device)).tolist() == all_kept  # just no kin
    assert met(device, group, KNOWN - 1).kept(everyone(7, device)).tolist() == all_kept  # not known yet
    few = torch.tensor([True, True, False, True, True, True, True], device=device)
    assert met(device, group).kept(few).tolist() == [False, False, False, True, True, True, True]
    few[1] = False
    assert met(device, group).kept(few).tolist() == few.tolist()  # who is away is nobody's kin


@pytest.mark.parametrize(("cosine", "stays"), [(1.01 * TURNED, False), (0.99 * TURNED, True)])
def test_who_is_turned_against_the_sum_by_more_than_said_is_left_out(cosine, stays, device):
    """Four clients across each other, and a fifth of the same length: x with each makes its cosine to the sum this."""
    low, high = -0.5, 0.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if (1 + 4 * x) / np.sqrt(5 + 8 * x) < cosine else (low, x)
    means = np.eye(5)
    means[4, :4] = means[:4, 4] = x
    assert met(device, means).kept(everyone(5, device)).tolist() == [True] * 4 + [stays]
    assert met(device, means, KNOWN - 1).kept(everyone(5, device)).all()


def test_nobody_known_keeps_everyone(device):
    assert Kinship(4, torch.device(device)).kept(everyone(4, device)).all()
