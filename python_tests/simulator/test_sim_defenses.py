"""Every compared defense against its slow twin, and that each of its settings matters."""

from functools import cache

import numpy as np
import pytest
import torch
from compared import CASES, SLOW, STALENESS, arrivals, drive

from secureafl_ext.defenses import DEFENSES


@pytest.mark.parametrize("case", CASES)
def test_follows_its_slow_twin(case, device):
    name, settings, words = CASES[case]
    server, twin, verdicts = drive(name, settings, device=device)
    for receipt, (accepted, factor, reason) in verdicts:
        assert bool(receipt.accepted) == accepted
        assert receipt.reason.startswith(reason)
        np.testing.assert_allclose(float(receipt.factor), factor, rtol=1e-9, atol=1e-10)
    for version in range(server.version - STALENESS, server.version + 1):
        got = server.model_at(version).cpu().numpy()
        np.testing.assert_allclose(got, twin.models[version], rtol=1e-9, atol=1e-9)
    reasons = [receipt.reason for receipt, _ in verdicts]
    for word in [*words, "rejected: not finite"]:
        assert any(reason.startswith(word) for reason in reasons), f"{word} never occurred"


@pytest.mark.parametrize("name", SLOW)
def test_float32_follows_too(name, device):
    server, twin, verdicts = drive(name, {}, device=device, dtype=torch.float32)
    assert all(bool(receipt.accepted) == accepted for receipt, (accepted, *_) in verdicts)
    assert server.model.dtype == torch.float32
    np.testing.assert_allclose(server.model.cpu().numpy(), twin.models[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DEFENSES)
def test_same_seed_same_bits(name):
    ends = [arrivals(name, seed).model for seed in (3, 3, 4)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


OTHER_SETTINGS = {
    "kardam": {"malicious": 3, "quantile": 0.3, "kept": 1, "patience": 2, "frequency": "strict", "dampening": "off",
               "decay": 0.4},
    "basgd": {"buffers": 3, "interval": 1, "trim": 0},
    "sageflow": {"threshold": 0.5, "classes": 4, "decay": 1.0, "warmup": 30, "mode": "anchored",
                 "candidate": "trained"},
    "zeno++": {"rho": 0.04, "eps": 0.5, "every": 2},
    "aflguard": {"radius": 0.9, "test": "cosine", "every": 20},
    "async-defender": {"momentum": 0.5, "weight": "shifted", "reference": "last", "max_norm": 1.0, "warmup": 2,
                       "credibility": True},
    "foolsgold": {"confidence": 0.5, "pardon": False, "normalize": True, "momentum": 0.5},
    "fltrust": {"every": 20, "momentum": 0.5},
    "flame": {"noise": 0.1, "clip": False, "momentum": 0.5},
    "dnc": {"malicious": 2, "remove": 2.0, "iterations": 1, "coordinates": 2, "momentum": 0.5},
    "nnm-trimmed-mean": {"malicious": 2, "momentum": 0.5},
    "nnm-geometric-median": {"malicious": 2, "momentum": 0.5},
    "krum": {"malicious": 2, "selected": 2, "momentum": 0.5},
    "centered-clip": {"radius": 0.5, "iterations": 1, "momentum": 0.5},
    "demoa": {"momentum": 0.5, "aggregator": "median", "malicious": 2},
    "weighted": {"base": "median", "trim": 0.4, "momentum": 0.5},
    "fedbuff-trimmed-mean": {"buffer": 5, "trim": 4, "server_lr": 0.5, "staleness": "off"},
}  # fmt: skip
NEEDS = {
    "sageflow": {"warmup": 10, "threshold": 1.5},  # so that the filter shows
    "dnc": {"coordinates": 4},  # with all of them every iteration is the same
    "demoa": {"aggregator": "trimmed_mean"},  # the default has no f
}


@cache
def usual_model(name):
    return arrivals(name, 0, 150, **NEEDS.get(name, {})).model


@pytest.mark.parametrize(
    ("name", "setting"), [(name, setting) for name, others in OTHER_SETTINGS.items() for setting in others]
)
def test_every_setting_matters(name, setting):
    changed = {**NEEDS.get(name, {}), setting: OTHER_SETTINGS[name][setting]}
    assert not torch.equal(usual_model(name), arrivals(name, 0, 150, **changed).model)


def test_every_setting_is_covered_above():
    delta = {"sageflow": {"delta"}}  # matters in one mode alone, where a twin has it
    for name, others in OTHER_SETTINGS.items():
        assert set(DEFENSES[name].settings) - set(others) == delta.get(name, set())
