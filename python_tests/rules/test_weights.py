"""weights() and left_out(): what the rule does with each client, against the step that the server really makes."""

from functools import cache

import numpy as np
import pytest
import torch
from compared import F64, pair, reference

from secureafl_ext import SecureAFL
from secureafl_ext.defenses import make
from secureafl_ext.engines import support
from secureafl_ext.engines.support import FusedSupport
from secureafl_ext.rules.row_rules import left_out
from secureafl_ext.sim import loop, metrics
from secureafl_ext.sim.settings import Settings

N, SIZE, LR = 20, 40, 0.1
MALICIOUS = [0, 1, 2, 3]
AVERAGING = ("kinship", "support")  # which must have met clients often before they tell them apart
ALWAYS = {"expiry": None, "probation": 0, "filter": False, "memory": 0}


def server_of(rule, device="cpu", rounds=None, dtype=F64, **settings):
    """A server after many rounds, and what each client sends. Four clients send one push, the others differ."""
    rounds = rounds if rounds is not None else (20 if rule in AVERAGING else 4) * N + 1
    random = np.random.default_rng(3)
    means = random.normal(size=(N, SIZE)) / SIZE**0.5
    means[MALICIOUS] = random.normal(size=SIZE) / SIZE**0.5
    settings = {**ALWAYS, "history_dtype": dtype, **settings}
    server = SecureAFL(torch.zeros(SIZE, dtype=dtype, device=device), N, lr=LR, rule=rule, **settings)
    for t in range(rounds):
        update = means[t % N] + 0.3 * random.normal(size=SIZE) / SIZE**0.5
        server.submit(t % N, torch.tensor(update, dtype=dtype, device=device), server.version)
    return server


@cache
def trained(rule, device):
    return server_of(rule, device).state_dict()


def trained_server(rule, device="cpu"):
    """As server_of(rule, device), whose rounds take seconds: they are made once for all tests."""
    server = server_of(rule, device, rounds=0)
    server.load_state_dict(trained(rule, device))
    return server


ROW_WISE = ("mean", "kinship", "support", "krum", "geometric_median", "spectral", "centered_clip")


@pytest.mark.parametrize("rule", ROW_WISE)
def test_the_next_step_has_these_weights(rule, device):
    """A client that repeats its last update changes no row, so the step is the one that weights() speaks of."""
    server = trained_server(rule, device)
    weights, state, before = server.weights().cpu().numpy(), server.state_dict(), server.model.cpu().numpy()
    assert weights.dtype == np.float64 and weights.shape == (N,)
    rows = state["last_updates"].cpu().numpy()
    scale = np.ones(N)
    if rule in AVERAGING:  # these two clip to the median norm after they have weighed
        norms = np.linalg.norm(rows, axis=1)
        scale = np.minimum(1, np.median(norms) / norms)
    step = (weights * scale) @ rows
    if rule == "centered_clip":  # the centre has the rest of the weight
        step += (1 - weights.sum()) * state["centre"].cpu().numpy()
    receipt = server.submit(7, state["last_updates"][7].to(device), server.version)
    assert np.allclose((before - server.model.cpu().numpy()) / LR, step, rtol=1e-9, atol=1e-12)
    if rule == "mean":  # a coordinate-wise rule, as the median
        assert receipt.weight is None
    else:
        assert receipt.weight.dtype == F64 and float(receipt.weight) == pytest.approx(weights[7], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("rule", ["support", "kinship"])
def test_a_receipt_has_the_weight_of_its_update(rule, dtype, device):
    server = server_of(rule, device, dtype=dtype, quorum=0.5)
    honest, pushed = (server.last(torch.tensor([k], device=device))[0].clone() for k in (7, 0))
    assert float(server.submit(7, honest, server.version).weight) > 0.5 / N
    assert float(server.submit(0, pushed, server.version).weight) < 0.1 / N, "it is left out"
    assert float(server.submit(7, torch.full_like(honest, torch.nan), server.version).weight) == 0, "rejected"
    assert server.submit(7, honest, server.version - 99).weight is None, "refused"


def test_the_step_of_buckets_and_of_estimates_has_these_weights():
    bucketed = server_of("krum", buckets=2).weights()
    assert sorted(bucketed.tolist())[-3:] == [0, 0.5, 0.5], "the mean of one bucket of two"
    corrected = server_of("geometric_median", memory=2)
    weights, before, rows = corrected.weights(), corrected.model.clone(), corrected.estimates()
    corrected.submit(7, rows[7], corrected.version)
    assert torch.allclose((before - corrected.model) / LR, weights @ rows, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["kinship", "support"])
def test_colluders_are_left_out_and_counted(rule, device):
    server = trained_server(rule, device)
    weights = server.weights()
    assert weights[MALICIOUS].tolist() == [0] * 4 and bool((weights[4:] > 0.1 / N).all())
    assert server.left_out().nonzero()[:, 0].tolist() == MALICIOUS
    assert server.stats()["left_out"] == 4 and server.stats()["present"] == N
    if rule == "kinship":
        assert weights[4:].tolist() == pytest.approx([1 / 16] * 16)


def test_fused_and_composed_support_have_the_same_weights(monkeypatch):
    fused = server_of("support", dtype=torch.float32)
    monkeypatch.setattr(support, "fits", lambda *_: False)
    composed = server_of("support", dtype=torch.float32)
    assert isinstance(fused._engine, FusedSupport) and not isinstance(composed._engine, FusedSupport)
    assert torch.allclose(fused.weights(), composed.weights(), rtol=1e-5, atol=1e-7)
    assert (fused.weights() - 1 / N).abs().max() > 0.04, "the rule has shifted weights"


@pytest.mark.parametrize("settings", [{"rule": "median"}, {"rule": "trimmed_mean", "trim": 2}, {"rule": "mean"}])
@pytest.mark.parametrize("memory", [0, 2])
def test_rules_without_weights_have_equal_ones(settings, memory, device):
    server = server_of(**settings, device=device, memory=memory, rounds=3 * N)
    server.leave(5)
    assert server.weights().tolist() == pytest.approx([1 / 19] * 5 + [0] + [1 / 19] * 14)
    assert server.stats()["left_out"] == 0
    if settings["rule"] != "mean":
        assert server.left_out() is None


@pytest.mark.parametrize("rule", ["median", *ROW_WISE])
def test_clients_that_do_not_count_have_no_weight_and_are_not_left_out(rule):
    server = server_of(rule, rounds=0)
    assert server.weights().tolist() == [0] * N and server.stats()["left_out"] == 0
    server = trained_server(rule)
    for client in MALICIOUS:
        server.leave(client)
    assert server.weights()[MALICIOUS].tolist() == [0] * 4 and float(server.weights().sum()) > 0
    out = server.left_out()
    assert out is None or not out[MALICIOUS].any()


def test_without_estimates_nothing_remembered_has_a_weight():
    for rule in ("median", "krum"):
        server = server_of(rule, estimate=False, rounds=2 * N)
        assert server.weights().tolist() == [0] * N and server.left_out() is None
        assert server.stats()["left_out"] == 0 and server.stats()["present"] == N


@pytest.mark.parametrize("rule", ["median", *ROW_WISE])
def test_asking_changes_nothing(rule):
    server = server_of(rule, rounds=3 * N)
    before = server.state_dict()
    server.weights().fill_(9)
    server.left_out()
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(v)) for k, v in server.state_dict().items())


def test_a_tenth_of_the_mean_weight_is_the_bound():
    mask = torch.tensor([True] * 4 + [False])
    weights = torch.tensor([0.5, 0.4, 0.021, 0.019, 0.0], dtype=F64)  # a tenth of their mean is .0235
    assert left_out(weights, mask).tolist() == [False, False, True, True, False]
    assert left_out(weights / 1000, mask).tolist() == [False, False, True, True, False], "weights need no sum of 1"
    assert not left_out(torch.zeros(5, dtype=F64), mask).any(), "no step, nobody left out"
    assert not left_out(weights, torch.zeros(5, dtype=torch.bool)).any()


WEIGHING = (
    "foolsgold",
    "fltrust",
    "flame",
    "dnc",
    "nnm-geometric-median",
    "krum",
    "centered-clip",
    "demoa",
    "weighted",
)


@pytest.mark.parametrize("name", WEIGHING)
def test_compared_rules_show_the_weights_of_their_receipts(name):
    random = np.random.default_rng(0)
    server, send = pair(name, [0.0] * 4, clients=5, trusted=reference(1.0, 1.0, 1.0, 1.0))
    for t in range(15):
        receipt = send(t % 5, list(1 + 0.3 * random.normal(size=4)), t)
        assert float(receipt.factor) == float(server.weights()[t % 5])
    assert server.present.all() and float(server.weights().sum()) > 0
    if name == "krum":
        assert int(server.left_out().sum()) == 4 and float(server.weights().sum()) == 1
    server.forget(2)
    assert float(server.weights()[2]) == 0 and not server.present[2] and not server.left_out()[2]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("async-sgd", {}),
        ("kardam", {}),
        ("nnm-trimmed-mean", {}),
        ("demoa", {"aggregator": "median"}),
        ("weighted", {"base": "median", "trim": 0.0}),
    ],
)
def test_compared_rules_without_weights_say_so(name, settings):
    server = make(name, torch.zeros(3), 6, 0.1, 3, **settings)
    server.submit(1, torch.ones(3), 0)
    assert server.weights() is None and server.left_out() is None


def test_precision_and_recall_of_leaving_out_by_hand():
    def look(present, without):
        return torch.tensor([present, without], dtype=torch.bool)

    malicious = torch.tensor([1, 1, 0, 0], dtype=torch.bool)
    looks = [look([1, 1, 1, 1], [1, 0, 1, 0]), look([1, 0, 1, 1], [1, 0, 0, 0])]  # client 1 has expired
    found = metrics.left_out(looks, malicious)
    assert found == {"left_out_precision": pytest.approx(2 / 3), "left_out_recall": pytest.approx(2 / 3)}
    nobody = metrics.left_out([look([1] * 4, [0] * 4)], malicious)
    assert nobody == {"left_out_precision": None, "left_out_recall": 0}
    undefined = {"left_out_precision": None, "left_out_recall": None}
    assert metrics.left_out([None, None], malicious) == metrics.left_out([], malicious) == undefined
    assert metrics.left_out(looks, torch.zeros(4, dtype=torch.bool)) == undefined


def short(**changed: object) -> Settings:
    scene = {"clients": 10, "malicious": 0.2, "rounds": 48, "batch": 4, "device": "cpu", "evaluations": 4}
    return Settings(**{**scene, "attack": "gaussian", "defense": "krum", **changed})


@pytest.mark.parametrize("defense", ["krum", "secureafl-kin", "secureafl-support"])
def test_a_run_says_whom_the_rule_left_out_in_its_second_half(defense, monkeypatch):
    looked, original = [], loop.Rounds.left_out

    def noted(rounds):
        look = original(rounds)
        looked.append((rounds.done, look, rounds.federation.malicious))
        return look

    monkeypatch.setattr(loop.Rounds, "left_out", noted)
    summary = loop.run(short(defense=defense)).summary
    assert [done for done, *_ in looked] == [36, 48]
    bad = {int(client) for client in looked[0][2]}
    pairs = [(client, out) for _, (here, gone), _ in looked for client, out in enumerate(gone.tolist()) if here[client]]
    out = [client for client, is_out in pairs if is_out]
    caught = sum(client in bad for client in out)
    assert len(bad) == 2
    assert summary["left_out_precision"] == (pytest.approx(caught / len(out)) if out else None)
    assert summary["left_out_recall"] == pytest.approx(caught / sum(client in bad for client, _ in pairs))
    if defense == "krum":
        assert len(out) == 18 and summary["left_out_recall"] == 1


def test_runs_without_weights_or_attackers_have_none():
    for changed in ({"defense": "async-sgd"}, {"defense": "secureafl"}, {"attack": "none"}):
        summary = loop.run(short(rounds=20, evaluations=1, **changed)).summary
        assert (summary["left_out_precision"], summary["left_out_recall"]) == (None, None)


def test_looking_at_the_weights_changes_no_run(monkeypatch):
    watched = loop.run(short(defense="secureafl-support")).curve
    monkeypatch.setattr(loop.Rounds, "left_out", lambda rounds: None)
    assert loop.run(short(defense="secureafl-support")).curve == watched
