"""The defenses on the memory of last updates: that each does what it is for, by hand, and what they refuse."""

import math

import numpy as np
import pytest
import torch
from compared import F64, pair, reference

from secureafl_ext.defenses import RuleServer, make
from secureafl_ext.defenses.candidates import CANDIDATES, TRIALS
from secureafl_ext.defenses.centered_clip import CenteredClip
from secureafl_ext.defenses.flame import FLAME, gaussian, majority_cluster
from secureafl_ext.defenses.memory_rows import counter_hash
from secureafl_ext.sim import loop
from secureafl_ext.sim.settings import Settings

MEMORY = ("foolsgold", "fltrust", "flame", "dnc", "nnm-trimmed-mean", "nnm-geometric-median", "krum", "centered-clip",
          "demoa", "weighted")  # fmt: skip
NEW = (*MEMORY, "fedbuff-trimmed-mean")


def fleet(name, attack, seed=0, **settings):
    """Ten clients whose honest gradient is about (1, .., 1); clients 3 and 7 send `attack`. The model after 40 uploads,
    with lr 1 / 40: minus the mean step."""
    random = np.random.default_rng(seed)
    start, trusted = torch.zeros(20, dtype=F64), reference(*[1.0] * 20)
    server = make(name, start, 10, 1 / 40, 4, trusted, **settings)
    for t in range(40):
        client = t % 10
        update = torch.tensor(1 + random.normal(size=20))
        server.submit(client, attack(update) if client in (3, 7) else update, t)
    return server


@pytest.mark.parametrize("name", [name for name in NEW if name != "foolsgold"])  # it is made for sybils, below
@pytest.mark.parametrize("attack", [lambda g: torch.full_like(g, -1e6), lambda g: -30 * g], ids=["huge", "flipped"])
def test_two_of_ten_attackers_do_not_turn_the_model(name, attack):
    settings = {"centered-clip": {"radius": 0.0}}.get(name, {})
    away = float(-fleet(name, attack, **settings).model.mean())
    undefended = float(-fleet("async-sgd", attack).model.mean())
    assert undefended < -4, "the attack must work without a defense"
    # FedBuff makes four steps in 40 uploads.
    assert 0.05 < away < 1.2


def test_foolsgold_takes_the_weight_of_sybils():
    server, send = pair("foolsgold", [0.0] * 4, clients=4)
    sent = [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 1.0], [0, 0, 2.0, 2.0]]  # 2 and 3 have one goal
    for t, update in enumerate(sent):
        receipt = send(t, update, t)
    assert receipt.reason == "accepted: its weight in the step is 0"
    before = server.model.clone()
    assert send(0, sent[0], 4).reason == "accepted"
    assert (before - server.model).tolist() == pytest.approx([0.25, 0.25, 0, 0])  # the sum over four clients


def test_foolsgold_compares_sums_not_single_updates():
    """Sybils that alternate opposite noise look different in each update, and alike in the sum."""
    server, send = pair("foolsgold", [0.0] * 3, clients=3)
    send(2, [0.0, 0.0, 1.0], 0)
    factors = []
    for t in range(8):
        for client, sign in ((0, 1.0), (1, -1.0)):
            receipt = send(client, [1.0, 9 * sign * (-1) ** t, 0.0], server.version)
        factors.append(float(receipt.factor))
    assert factors[0] == pytest.approx(1 / 3) and factors[1::2] == [0] * 4


def test_fltrust_rescales_and_ignores_what_opposes():
    server, send = pair("fltrust", [0.0, 0.0], clients=3, trusted=reference(2.0, 0.0))
    assert send(0, [300.0, 400.0], 0).reason == "accepted: too few clients are known for a step"
    assert send(1, [-5.0, 1.0], 1).reason == "accepted: its weight in the step is 0"
    assert server.model.tolist() == pytest.approx([-1.2, -1.6])  # the other's direction, at the trusted length 2
    assert float(send(0, [300.0, 400.0], 2).factor) == pytest.approx(2 / 500)
    before = server.model.clone()
    send(2, [7.0, 0.0], 3)  # scores .6 and 1
    assert (before - server.model).tolist() == pytest.approx([(0.6 * 1.2 + 2) / 1.6, 0.6 * 1.6 / 1.6])


def test_flame_keeps_the_majority_cluster_and_clips_it():
    server, send = pair("flame", [0.0] * 3, clients=5, noise=0.0)
    sent = [[1.0, 0.1, 0], [1.0, -0.1, 0], [30.0, 0, 0], [0, 0, 1.0], [0, 0.1, 1.0]]
    for t, update in enumerate(sent):
        receipt = send(t, update, t)
    assert receipt.reason == "accepted: its weight in the step is 0"
    before = server.model.clone()
    send(0, sent[0], 5)
    median = math.hypot(1, 0.1)
    assert (before - server.model).tolist() == pytest.approx([(2 + median) / 3, 0, 0])


def test_the_majority_cluster_is_a_chain_if_need_be():
    """Single linkage: neighbors on a line join one by one, although their ends are far apart."""
    places = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 10.5, 20.0], dtype=F64)
    distance = (places[:, None] - places).abs()
    everyone = torch.ones(7, dtype=torch.bool)
    assert majority_cluster(distance, everyone).tolist() == [True] * 4 + [False] * 3
    fewer = everyone.clone()
    fewer[:3] = False  # 3, 10, 10.5, 20: more than half are three
    assert majority_cluster(distance, fewer).nonzero().flatten().tolist() == [3, 4, 5]
    assert not majority_cluster(distance, ~everyone).any()


def test_noise_is_normal_and_new_in_every_round():
    one, two = (gaussian(torch.tensor(t), 100_000) for t in (7, 8))
    for noise in (one, two):
        assert noise.mean().item() == pytest.approx(0, abs=0.02)
        assert noise.std().item() == pytest.approx(1, abs=0.02)
        assert noise.pow(4).mean().item() == pytest.approx(3, abs=0.15)
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1].item()) < 0.02
    assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1].item()) < 0.02
    assert (counter_hash(torch.tensor(3), 1000) != counter_hash(torch.tensor(3), 1000, 1)).all()


def test_flame_adds_noise_of_the_median_norm():
    start = torch.zeros(20_000)
    server = RuleServer(FLAME(start, 1, noise=0.01), "flame", start, 1, 1.0, 2)
    server.submit(0, torch.full_like(start, 0.5), 0)  # norm 70.7
    noise = -server.model - 0.5
    assert noise.std().item() == pytest.approx(0.707, rel=0.03)
    first = server.model.clone()
    server.submit(0, torch.full_like(start, 0.5), 1)
    again = first - server.model - 0.5
    assert abs(torch.corrcoef(torch.stack([noise, again]))[0, 1].item()) < 0.05


def test_dnc_removes_what_stands_out_together():
    random = np.random.default_rng(3)
    _, send = pair("dnc", [0.0] * 30, clients=10, malicious=2, coordinates=10)
    for t in range(20):
        update = random.normal(size=30) + 1
        receipt = send(t % 10, update - 4 if t % 10 in (3, 7) else update, t)
        if t >= 10:
            assert (receipt.reason == "accepted: its weight in the step is 0") == (t % 10 in (3, 7)), t


def test_krum_takes_one_row_and_multi_krum_several():
    sent = [[0.0, 0.0], [1.0, 0.0], [0.9, 0.1], [1.1, 0.2], [-50.0, 9.0]]
    for selected, expected in ((1, [1.0, 0.0]), (3, [1.0, 0.1])):
        server, send = pair("krum", [0.0, 0.0], clients=5, malicious=1, selected=selected)
        for t, update in enumerate(sent):
            receipt = send(t, update, t)
        assert float(receipt.factor) == 0
        before = server.model.clone()
        send(0, sent[0], 5)
        assert (before - server.model).tolist() == pytest.approx(expected)


def test_nearest_neighbor_mixing_leaves_out_the_far():
    for name in ("nnm-trimmed-mean", "nnm-geometric-median"):
        server, send = pair(name, [0.0], clients=5, malicious=1)
        for t, value in enumerate([1.0, 2.0, 3.0, 4.0, 1e9]):
            send(t, [value], t)
        before = server.model.clone()
        send(0, [1.0], 5)
        assert (before - server.model).item() == pytest.approx(2.5, rel=1e-6), name  # four rows mix to their mean


def test_centered_clip_bounds_what_one_row_moves():
    server, send = pair("centered-clip", [0.0, 0.0], clients=4, radius=2.0, iterations=1)
    for t in range(3):
        send(t, [1.0, 0.0], t)
    centre = server.rule.centre.clone()
    send(3, [0.0, 1e9], 3)
    moved = server.rule.centre - centre
    assert moved.tolist() == pytest.approx([0, 0.5], abs=1e-6)  # radius over four clients
    rule = CenteredClip(torch.zeros(2), 3, radius=0)
    assert rule.config.radius is None


def test_demoa_keeps_the_momentum_of_the_absent():
    server, send = pair("demoa", [0.0], clients=3, momentum=0.75, aggregator="median")
    for t, (client, value) in enumerate([(0, 4.0), (1, 8.0), (0, 8.0), (2, -100.0), (0, 5.0)]):
        send(client, [value], t)
    assert server.rule.rows.flatten().tolist() == [5.0, 8.0, -100.0]
    assert server.model.item() == -(6 + 6.5 + 5 + 5)  # from the second client on


def test_weighted_counts_uploads_not_clients():
    """One honest client has most uploads: three others, who are the majority of the clients, do not move the rule."""
    server, send = pair("weighted", [0.0], clients=4, momentum=0.0, trim=0.3)
    for t in range(9):
        send(0, [1.0], t)
    for client in (1, 2, 3):
        receipt = send(client, [-5.0], server.version)
    assert float(receipt.factor) == 0
    before = server.model.clone()
    send(0, [1.0], server.version)
    assert (before - server.model).item() == pytest.approx(1)
    server, send = pair("weighted", [0.0], clients=4, momentum=0.0, trim=0.3, base="median")
    for client in range(4):
        send(client, [1.0 if client == 0 else -5.0], client)
    assert float(send(0, [1.0], 4).factor) == pytest.approx(0.5 / 3.5)  # 5 uploads; 3 near the middle, then half of one


def test_fedbuff_waits_trims_and_damps():
    server, send = pair("fedbuff-trimmed-mean", [0.0], clients=3, buffer=4, trim=1, server_lr=2.0)
    for t, value in enumerate([1.0, 3.0, 1e9]):
        send(0, [value], t)
        assert server.model.item() == 0
    assert send(1, [-4.0], 0).reason == "accepted: buffer full, a step"  # three versions late: -2
    assert server.model.item() == pytest.approx(-2 * (1 + 3) / 2)
    send(1, [7.0], 4)
    assert server.model.item() == pytest.approx(-4) and int(server.rule.count) == 1


def test_an_update_too_large_to_square_is_rejected():
    for name in MEMORY:
        server, send = pair(name, [0.0, 0.0], trusted=reference(1.0, 0.0))
        send(0, [1.0, 1.0], 0)
        before = server.rule.products.clone()
        assert send(1, [1e200, 0.0], 1).reason == "rejected: its norm is too large to compute with", name
        assert torch.equal(server.rule.products, before) and not server.rule.seen[1]


@pytest.mark.parametrize(("name", "settings", "words"), [
    ("foolsgold", {"confidence": 0}, "FoolsGold: confidence must be positive, got 0"),
    ("fltrust", {"every": 0}, "FLTrust: every must be 1 or more, got 0"),
    ("flame", {"noise": -1}, "FLAME: noise must be 0 or more, finite, got -1"),
    ("dnc", {"malicious": 3}, "DnC: malicious must be 0 to 2, fewer than half of the clients, got 3"),
    ("dnc", {"remove": -0.5}, "DnC: remove must be 0 or more, with remove"),
    ("dnc", {"iterations": 0}, "DnC: iterations must be 1 or more, got 0"),
    ("dnc", {"coordinates": 0}, "DnC: coordinates must be 1 or more, got 0"),
    ("nnm-trimmed-mean", {"malicious": -1}, "NNMTrimmedMean: malicious must be 0 to 2"),
    ("nnm-geometric-median", {"malicious": 3}, "NNMGeometricMedian: malicious must be 0 to 2"),
    ("krum", {"malicious": 3}, "Krum: malicious must be 0 to 2"),
    ("krum", {"selected": 6}, "Krum: selected must be 1 to 5, got 6"),
    ("centered-clip", {"radius": -1}, "CenteredClip: radius must be 0 or more, got -1"),
    ("centered-clip", {"iterations": 0}, "CenteredClip: iterations must be 1 to 1000, got 0"),
    ("centered-clip", {"iterations": 1001}, "CenteredClip: iterations must be 1 to 1000, got 1001"),
    ("centered-clip", {"momentum": 1.0}, "CenteredClip: momentum must be 0 or more, below 1, got 1.0"),
    ("demoa", {"aggregator": "mean"}, "aggregator must be one of geometric_median, krum, median, .*, got 'mean'"),
    ("demoa", {"momentum": -0.1}, "DeMoA: momentum must be 0 or more"),
    ("demoa", {"malicious": 3}, "DeMoA: malicious must be 0 to 2"),
    ("weighted", {"base": "mean"}, "Weighted: base must be one of geometric_median, median, got 'mean'"),
    ("weighted", {"trim": 0.5}, "Weighted: trim must be 0 or more, below 0.5, got 0.5"),
    ("weighted", {"momentum": 2}, "Weighted: momentum must be 0 or more, below 1, got 2"),
    ("fedbuff-trimmed-mean", {"buffer": 0}, "FedBuffTrimmedMean: buffer must be 1 or more, got 0"),
    ("fedbuff-trimmed-mean", {"buffer": 4, "trim": 2}, "FedBuffTrimmedMean: trim must be 0 to 1, got 2"),
    ("fedbuff-trimmed-mean", {"server_lr": 0}, "FedBuffTrimmedMean: server_lr must be positive, got 0"),
    ("fedbuff-trimmed-mean", {"staleness": "x"}, "staleness must be one of sqrt, off, got 'x'"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(name, settings, words):
    with pytest.raises(ValueError, match=words):
        make(name, torch.zeros(3), 5, 0.1, 3, reference(1.0), **settings)


def test_the_run_tells_a_rule_how_many_are_malicious():
    chosen = Settings(attack="gaussian", clients=8, malicious=0.25, rounds=4, evaluations=1, defense="krum")
    assert loop.defense_settings(chosen.resolve(), 10) == {"malicious": 2}
    most = Settings(attack="gaussian", clients=8, malicious=0.5, rounds=4, evaluations=1, defense="dnc")
    assert loop.defense_settings(most.resolve(), 10) == {"malicious": 3}  # defined for fewer than half
    counted = Settings(attack="gaussian", malicious=0.5, defense="weighted", defense_options={"base": "median"})
    assert loop.defense_settings(counted.resolve(), 10) == {"trim": 0.49, "base": "median"}


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_defense_has_the_same_number_of_candidates(name):
    candidates = CANDIDATES[name]
    assert len(candidates) == TRIALS and candidates[0] == {}
    assert len({repr(sorted(one.items())) for one in candidates}) == TRIALS, "each is tried once"
    for settings in candidates:
        make(name, torch.zeros(3), 50, 0.1, 3, reference(1.0), **settings)
    assert set(NEW) <= set(CANDIDATES)


@pytest.mark.parametrize("name", NEW)
def test_it_learns_on_the_embedded_data(name):
    few = {"fedbuff-trimmed-mean": {"buffer": 3, "server_lr": 3.0}, "fltrust": {"every": 5}}.get(name, {})
    options = {"defense": name, "defense_options": few, "clients": 5, "degree": 0.1, "batch": 16}
    outcome = loop.run(Settings(**options, rounds=50, evaluations=1))
    assert outcome.error < 0.88  # .9 at the start
    assert outcome.summary["accepted"] == 1
