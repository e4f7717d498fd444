"""The numbers of a run: errors, attack success, verdicts, the error of estimates."""

import math

import pytest
import scenes
import torch

from secureafl_ext import attacks
from secureafl_ext.sim import loop, metrics


def test_an_error_that_is_no_number_is_wrong():
    data = scenes.dataset("grey")
    net = scenes.small_net(data)
    broken = torch.full((net.size,), torch.nan)
    assert metrics.error(net, data, broken) == 1.0
    assert metrics.error(net, data, torch.full((net.size,), 1e38)) == 1.0
    still = torch.zeros(net.size)  # every image is of class 0
    assert metrics.error(net, data, still) == pytest.approx(float((data.test_y != 0).double().mean()))
    roads = scenes.dataset("regression")
    net = scenes.small_net(roads)
    assert metrics.error(net, roads, torch.full((net.size,), torch.nan)) == math.inf
    expected = math.sqrt(float(roads.test_y.double().square().mean()))
    assert metrics.error(net, roads, torch.zeros(net.size)) == pytest.approx(expected)
    assert loop.diverged(math.inf, 0) and not loop.diverged(3.0, 0)
    assert loop.diverged(0.9, 10) and loop.diverged(1.0, 10) and not loop.diverged(0.89, 10)


def test_success_is_of_other_classes_with_the_whole_trigger():
    data = scenes.dataset("grey")
    net = scenes.small_net(data)
    attack = attacks.make("dba", scenes.scene("grey"))
    looked_at = []

    class Spy:
        target = 3

        @staticmethod
        def apply(pixels, part=None):
            assert part is None
            looked_at.append(pixels)
            return attack.trigger.apply(pixels)

    still = torch.zeros(net.size)
    still[-10 + 3] = 1.0  # the bias of class 3
    assert metrics.success(net, data, still, Spy) == 1.0
    assert torch.equal(torch.cat(looked_at), data.test_x[data.test_y != 3])
    assert metrics.success(net, data, torch.full((net.size,), torch.nan), Spy) == 0.0


def test_verdicts_by_hand():
    accepted = torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.bool)
    malicious = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.bool)
    found = metrics.verdicts(accepted, malicious)
    assert found == {
        "accepted": 0.5,
        "rejected_honest": pytest.approx(1 / 3),
        "rejected_malicious": pytest.approx(2 / 3),
        "precision": pytest.approx(2 / 3),
        "recall": pytest.approx(2 / 3),
    }
    nobody = metrics.verdicts(accepted, torch.zeros(6, dtype=torch.bool))
    assert (nobody["precision"], nobody["recall"], nobody["rejected_malicious"]) == (None, None, None)
    assert metrics.verdicts(torch.ones(6, dtype=torch.bool), malicious)["precision"] is None


def test_the_error_of_estimates_by_hand():
    gradients = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert metrics.estimation(gradients + torch.tensor([[5.0, 0.0], [0.0, 1.0]]), gradients) == pytest.approx(0.75)
