"""The compared defenses' rules by hand, where the spec has numbers."""

import math

import numpy as np
import pytest
import torch
from compared import pair, reference

from secureafl_ext.defenses import Trusted


def test_kardam_compares_with_what_was_applied_last():
    server, send = pair("kardam", [3.0, 4.0], dampening="off", malicious=0)
    assert float(send(0, [0.6, 0.8], 0).factor) == pytest.approx(0.2)  # nothing applied yet: |g| / |w| = 1 / 5
    receipt = send(0, [0.6, 1.8], 1)  # own and candidate coefficient are both 1 / 1
    assert receipt.accepted
    assert float(receipt.factor) == pytest.approx(1)
    receipt = send(1, [0.6, 3.8], 2)  # 2 over |(0.6, 1.8)|, above client 0's 1; client 1 has none yet
    assert not receipt.accepted
    assert float(receipt.factor) == pytest.approx(2 / math.hypot(0.6, 1.8))
    assert server.model.tolist() == pytest.approx([1.8, 1.4])


def test_kardam_ignores_an_upload_at_the_same_model():
    server, send = pair("kardam", [1.0, 1.0])
    send(0, [0.1, 0.0], 0)
    send(0, [9.0, 9.0], 0)
    assert server.rule.pushed.tolist() == [0, 0, 0]
    assert server.rule.last_updates[0].tolist() == [0.1, 0.0]


@pytest.mark.parametrize(
    ("clients", "malicious", "share"), [(30, 3, 0.2), (30, 8, 0.53), (30, 14, 0.93), (50, 10, 0.4)]
)
def test_kardam_strict_frequency_drops_two_f_of_n(clients, malicious, share):
    """Spec 7.4; constant updates have coefficient 0 and pass every other test."""
    _, send = pair("kardam", [1.0], clients, lr=1e-3, malicious=malicious, frequency="strict")
    chosen = np.random.default_rng(0).integers(clients, size=700)
    dropped = [not send(int(client), [1.0], version).accepted for version, client in enumerate(chosen)]
    assert np.mean(dropped[2 * clients :]) == pytest.approx(share, abs=0.04)
    assert not any(dropped[:1])


@pytest.mark.parametrize(("buffers", "updates"), [(5, 11.4), (10, 29.3)])
def test_basgd_needs_as_many_updates_as_a_coupon_collector(buffers, updates):
    """Spec 7.5"""
    server, send = pair("basgd", [1.0], buffers, buffers=buffers, interval=10**9)
    chosen = np.random.default_rng(1).integers(buffers, size=1200)
    for version, client in enumerate(chosen):
        send(int(client), [0.0], version)
    assert 1200 / int(server.rule.steps) == pytest.approx(updates, rel=0.15)


def test_basgd_steps_along_the_median_of_means():
    server, send = pair("basgd", [0.0, 0.0], buffers=3)
    send(0, [1.0, 0.0], 0)
    send(0, [3.0, 0.0], 1)  # mean 2
    send(1, [100.0, -7.0], 2)
    assert server.model.tolist() == [0, 0]
    assert send(2, [5.0, 1.0], 3).reason == "accepted: no buffer empty, a step"
    assert server.model.tolist() == [-5, 0]
    send(0, [1.0, 1.0], 4)  # an emptied buffer forgets
    send(1, [1.0, 1.0], 5)
    send(2, [1.0, 1.0], 6)
    assert server.model.tolist() == [-6, -1]


def test_basgd_spreads_the_clients_it_hears_from():
    server, send = pair("basgd", [0.0], clients=4, buffers=2, interval=3)
    for version, client in enumerate([0, 2, 0]):  # all in buffer 0
        send(client, [1.0], version)
    assert server.rule.mapping.tolist() == [0, 1, 1, 3]
    assert send(2, [3.0], 3).reason == "accepted: no buffer empty, a step"
    assert server.model.tolist() == [-2]


def test_sageflow_damps_by_staleness_and_scales_its_threshold():
    calm = Trusted(None, lambda model: (torch.tensor(1.0), torch.tensor(1.5)))
    server, send = pair("sageflow", [0.0], trusted=calm, warmup=1)
    assert send(0, [1.0], 0).reason == "accepted: warm-up"
    receipt = send(0, [1.0], 1)
    assert (receipt.reason, float(receipt.factor)) == ("rejected: entropy not below the threshold", 1.5)
    server, send = pair("sageflow", [0.0], trusted=calm, warmup=0, classes=100)  # threshold 2
    for _ in range(4):
        send(0, [1.0], 0)
    assert server.model.tolist() == pytest.approx([-(1 + 2**-0.5 + 3**-0.5 + 0.5)])


def test_sageflow_rejects_an_entropy_of_nan():
    lost = Trusted(None, lambda model: (torch.tensor(torch.nan), torch.tensor(torch.nan)))
    server, send = pair("sageflow", [2.0], trusted=lost, warmup=0)
    assert not send(0, [1.0], 0).accepted
    server, send = pair("sageflow", [2.0], trusted=lost, warmup=1, mode="anchored")
    send(0, [1.0], 0)
    assert server.model.tolist() == [2]


@pytest.mark.parametrize(("cosine", "rho", "eps", "accepted"), [
    (0.11, 0.001, 0.0, True), (0.09, 0.001, 0.0, False),  # rho / lr = 0.1
    (0.19, 0.002, 0.0, False), (0.21, 0.002, 0.0, True),
    (-0.01, 0.0, 0.0, False), (0.01, 0.0, 0.0, True),
    (-0.09, 0.0, 0.4, True), (-0.11, 0.0, 0.4, False),  # eps / |v|^2 = 0.1
])  # fmt: skip
def test_zeno_is_a_cosine_test(cosine, rho, eps, accepted):
    server, send = pair("zeno++", [0.0, 0.0], lr=0.01, trusted=reference(2.0, 0.0), rho=rho, eps=eps)
    receipt = send(0, [70 * cosine, 70 * math.sqrt(1 - cosine**2)], 0)
    assert bool(receipt.accepted) == accepted
    assert float(server.model.norm()) == pytest.approx(0.02 * accepted)  # always the trusted length


def test_zeno_takes_no_zero_update():
    server, send = pair("zeno++", [1.0, 1.0], trusted=reference(2.0, 0.0))
    assert not send(0, [0.0, 0.0], 0).accepted
    assert server.model.tolist() == [1, 1]


@pytest.mark.parametrize(("update", "radius", "accepted"), [
    ([-0.5, 0.0], 1.5, True),  # a short sign flip passes: r <= lambda - 1
    ([-0.51, 0.0], 1.5, False),
    ([2.5, 0.0], 1.5, True), ([2.51, 0.0], 1.5, False),  # at most (1 + lambda) |g_s|
    ([0.0, 0.1], 1.0, False), ([0.01, 0.1], 1.0, True),  # lambda <= 1 asks for a positive cosine
])  # fmt: skip
def test_aflguard_is_a_ball(update, radius, accepted):
    server, send = pair("aflguard", [0.0, 0.0], trusted=reference(1.0, 0.0), radius=radius)
    assert bool(send(0, update, 0).accepted) == accepted
    assert server.model.tolist() == ([-x for x in update] if accepted else [0, 0])


def test_async_defender_weighs_and_caps():
    server, send = pair("async-defender", [0.0, 0.0], warmup=1, max_norm=5.0)
    send(0, [6.0, 8.0], 0)  # clipped to length 5
    assert server.model.tolist() == pytest.approx([-3, -4])
    receipt = send(1, [0.0, 100.0], 1)  # capped to 5, cosine 0.8
    assert float(receipt.factor) == pytest.approx(0.8)
    assert server.model.tolist() == pytest.approx([-3, -8])
    assert send(2, [-1.0, -1.0], 2).reason == "rejected: cosine not positive (reduced AsyncDefender)"
    assert server.model.tolist() == pytest.approx([-3, -8])
