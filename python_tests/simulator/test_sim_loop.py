"""The loop: who comes when and with what, one round after the other, and that nothing but the seed decides."""

import math
import threading
from dataclasses import replace

import pytest
import scenes
import torch

from secureafl_ext import RECOMMENDED, SecureAFL, attacks, defenses
from secureafl_ext.attacks.crafted import PRESETS
from secureafl_ext.engines import fused
from secureafl_ext.sim import arrivals, federation, loop
from secureafl_ext.sim.settings import Settings, UndefinedError
from secureafl_ext.tasks import models

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DATASETS = {"fashion-mnist": "grey", "udacity": "regression"} | dict.fromkeys(
    ["cifar10", "cifar100", "tiny-imagenet"], "colour"
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Data sets of noise and a small net under the names of the real ones."""
    monkeypatch.setattr(federation, "loaded", lambda name, _, __, device: scenes.dataset(DATASETS[name], device))
    for name in models.MODELS:
        monkeypatch.setitem(models.MODELS, name, lambda shape, classes: scenes.small_net(Shaped(shape, classes)))


class Shaped:
    def __init__(self, shape, classes):
        self.shape, self.classes = shape, classes


def settings(device="cpu", **changed):
    few = {"clients": 8, "malicious": 0.25, "rounds": 24, "batch": 4, "evaluations": 3, "lr": 0.05}
    return Settings(**{"dataset": "fashion-mnist", "device": device, "trusted": 20, **few, **changed})


def final(chosen):
    """(Rounds after the last one, the model)"""
    chosen = chosen.resolve()
    with loop.side_stream(chosen.device), loop.exact():
        rounds = loop.Rounds(chosen)
        for _ in range(3):
            rounds.advance(8)
        return rounds, rounds.server.model.clone()


def test_uniform_arrivals_are_any_client_on_any_kept_version():
    client, staleness, late = arrivals.uniform(20_000, 5, 3, seed=1)
    assert late == 0
    assert (staleness[:4] <= torch.arange(4)).all() and staleness.max() == 3
    for values, kinds in ((client, 5), (staleness, 4)):
        shares = values.bincount(minlength=kinds) / 20_000
        assert (shares - 1 / kinds).abs().max() < 0.015
    together = (client * 4 + staleness).bincount(minlength=20) / 20_000
    assert (together - 1 / 20).abs().max() < 0.01


def test_the_clock_counts_the_rounds_between_a_client_and_itself():
    """Every client takes the newest version as it uploads: its next staleness is the number of rounds in between."""
    client, staleness, late = arrivals.clock(3_000, 7, delay=10_000, spread=1.0, seed=2)
    assert late == 0
    last = dict.fromkeys(range(7), 0)
    for t, (k, tau) in enumerate(zip(client.tolist(), staleness.tolist(), strict=True)):
        assert tau == t - last[k]
        last[k] = t + 1
    shares = client.bincount(minlength=7).sort().values / 3_000
    assert shares[-1] > 4 * shares[0]  # individual speeds


def test_clocks_of_one_pace_take_turns():
    client, staleness, _ = arrivals.clock(700, 7, delay=100, spread=0.0, seed=2)
    assert client.bincount(minlength=7).min() > 90
    assert 5.5 < staleness[50:].double().mean() < 6.5  # six others in between


def test_what_comes_too_late_is_counted_and_no_round():
    client, staleness, late = arrivals.clock(500, 7, delay=8, spread=1.0, seed=2)
    assert len(client) == len(staleness) == 500 and staleness.max() <= 8 and late > 0
    slow, fast = (arrivals.clock(500, 7, 8, 1.0, seed)[0] for seed in (2, 3))
    assert torch.equal(slow, client) and not torch.equal(fast, client)


def test_minibatches_are_of_the_clients_own_samples():
    fed = federation.Federation(settings(degree=1.0).resolve())
    shares = federation.split(fed.settings, fed.data)
    clients = torch.arange(8).repeat(20).view(20, 8)
    drawn = fed.draw(clients, "samples")
    assert drawn.shape == (20, 8, 4)
    for k, share in enumerate(shares):
        assert set(drawn[:, k].flatten().tolist()) <= set(share.tolist())
        assert len(drawn[:, k].unique()) > min(len(share), 4) / 2


def test_a_stream_of_chance_for_every_purpose():
    one = federation.Federation(settings(attack="sign-flip").resolve())
    other = federation.Federation(settings(attack="min-max", defense="async-sgd").resolve())
    assert torch.equal(one.malicious, other.malicious) and len(one.malicious) == 2
    assert torch.equal(one.start, other.start) and torch.equal(one.arrivals.client, other.arrivals.client)
    assert sorted([*one.malicious.tolist(), *one.honest.tolist()]) == list(range(8))
    changed = federation.Federation(settings(attack="sign-flip", seed=1).resolve())
    assert not torch.equal(one.start, changed.start)
    assert not torch.equal(one.arrivals.client, changed.arrivals.client)


def test_rounds_are_those_of_a_plain_loop(device):
    """Client, stale model, gradient of its minibatch, submit: written out once more."""
    chosen = settings(device, defense="secureafl", attack="none").resolve()
    rounds, model = final(chosen)
    fed = federation.Federation(chosen)
    server = SecureAFL(fed.start, 8, lr=0.05)
    for start in (0, 8, 16):
        clients, staleness = (table[start : start + 8] for table in fed.arrivals[:2])
        for client, tau, samples in zip(
            clients.tolist(), staleness.tolist(), fed.draw(clients, "samples"), strict=True
        ):
            version = server.version - tau
            x, y = fed.data.train(samples.to(device))
            server.submit(client, fed.net.gradient(server.model_at(version), x, y), version)
    assert server.version == rounds.server.version == 24
    torch.testing.assert_close(server.model, model, rtol=0, atol=0 if device == "cpu" else 1e-5)


def test_an_attack_sees_its_own_and_honest_samples_and_nobody_elses():
    chosen = settings(attack="min-max", rounds=60, evaluations=1).resolve()
    rounds = loop.Rounds(chosen)
    shares = [set(share.tolist()) for share in federation.split(chosen, rounds.data)]
    honest = rounds.federation.honest.tolist()
    seen, update = [], rounds.attack.update
    rounds.attack = replace(rounds.attack, own=3, update=lambda view: seen.append(view) or update(view))
    rounds.extra = torch.zeros(int(rounds.is_malicious.sum()), 2 + len(honest), 4, dtype=torch.int64)
    rounds.advance(60)
    came = rounds.federation.arrivals.client[rounds.is_malicious]
    assert [int(view.client) for view in seen] == came.tolist()
    assert set(came.tolist()) <= set(rounds.federation.malicious.tolist())
    for view in seen:
        assert view.own.shape == (3, 4)
        assert set(view.own.flatten().tolist()) <= shares[int(view.client)]
        for k, row in zip(honest, view.honest, strict=True):
            assert set(row.tolist()) <= shares[k]


def test_some_honest_clients_are_others_every_round():
    fed = federation.Federation(settings(attack="min-max").resolve())
    chosen = fed.some_honest(50, 3)
    assert chosen.shape == (50, 3) and torch.isin(chosen, fed.honest).all()
    assert all(len(row.unique()) == 3 for row in chosen) and len(chosen.unique()) == 6
    assert fed.some_honest(2, 6).tolist() == [fed.honest.tolist()] * 2


@pytest.mark.parametrize("attack", ["gaussian", "3dfed", "adaptive"])
@pytest.mark.parametrize("defense", ["secureafl", "zeno++"])
def test_one_seed_one_result(device, defense, attack):
    chosen = settings(device, attack=attack, defense=defense)
    first, again, other = (loop.run(replace(chosen, seed=seed)) for seed in (0, 0, 1))
    assert first.curve == again.curve != other.curve
    models = [final(replace(chosen, seed=seed))[1] for seed in (0, 0, 1)]
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])


WITH_ALL_ATTACKS = ("async-sgd", "kardam", "basgd", "zeno++", "sageflow", "aflguard", "secureafl")
OTHERS = [name for name in defenses.DEFENSES if not name.startswith("secureafl") and name not in WITH_ALL_ATTACKS]
CAPTURED = [(defense, attack) for defense in WITH_ALL_ATTACKS for attack in attacks.ATTACKS] + [
    (defense, attack) for defense in OTHERS for attack in ("none", "gaussian", "adaptive")
]


@needs_gpu
@pytest.mark.parametrize(("defense", "attack"), CAPTURED)
def test_captured_rounds_are_the_eager_ones(defense, attack):
    chosen = settings("cuda", attack=attack, defense=defense, rounds=72, evaluations=3, delay=2).resolve()
    with loop.side_stream("cuda"), loop.exact():
        captured, eager = loop.Rounds(chosen), loop.Rounds(chosen)
        eager.captured = None
        for _ in range(3):
            captured.advance(24)
            eager.advance(24)
        graphs, kinds = captured.captured.graphs, {False} if attack == "none" else {False, True}
        if attack not in ("ghost", "freeze"):  # these have too few malicious rounds
            assert {malicious for malicious, phase in graphs} == kinds and len(graphs) >= 2 * len(kinds)
        assert torch.equal(captured.server.model, eager.server.model)
        assert torch.equal(captured.accepted, eager.accepted)


@pytest.mark.parametrize("dataset", ["fashion-mnist", "cifar10", "udacity"])  # one of each kind
@pytest.mark.parametrize("defense", defenses.DEFENSES)
def test_every_defense_meets_every_attack(dataset, defense, device):
    """Defined for each data set, or undefined for a reason."""
    names = sorted(attacks.ATTACKS.keys() - (PRESETS.keys() - {"squad-backdoor"}))  # the others are crafted once more
    if dataset != "fashion-mnist":  # every pair, not every triple; "adaptive" has code of its own for each defense
        names = {"adaptive", *names[list(defenses.DEFENSES).index(defense) % 3 :: 3]}
    for attack in names:
        chosen = settings(device, dataset=dataset, defense=defense, attack=attack, rounds=6, evaluations=2)
        undefined = dataset == "udacity" and (attacks.ATTACKS[attack].needs_labels or defense == "sageflow")
        if undefined:
            with pytest.raises(UndefinedError, match=r"udacity .*regression"):
                loop.run(chosen)
            continue
        outcome = loop.run(chosen)
        assert [point.round for point in outcome.curve] == [3, 6]
        backdoor = outcome.curve[-1].asr is not None
        assert backdoor == (attack in ("scaling", "dba", "pgd", "neurotoxin", "3dfed", "squad-backdoor"))
        assert outcome.curve[-1].error >= 0 and 0 <= outcome.summary["accepted"] <= 1


def test_a_server_without_a_fused_round_runs_too(monkeypatch):
    monkeypatch.setattr(fused, "unsupported", lambda *_: "this test")
    rounds, model = final(settings())
    assert not rounds.server.capturable and rounds.server.version == 24
    assert not torch.equal(model, rounds.federation.start)


def test_the_clock_runs_and_its_server_keeps_what_it_hands_out():
    chosen = settings(arrivals="clock", defense="secureafl").resolve()
    assert chosen.delay == 32
    outcome = loop.run(chosen)
    assert outcome.curve[-1].round == 24 and outcome.summary["late"] == 0


def test_estimates_are_compared_with_gradients_where_there_are_any():
    asked = settings(estimation_error=True)
    assert loop.run(asked).summary["estimation_error"] > 0
    assert loop.run(replace(asked, defense="async-sgd")).summary["estimation_error"] is None
    assert loop.run(settings()).summary["estimation_error"] is None


def test_looking_on_changes_nothing():
    """Nor does an attack that asks for more samples change what honest clients train on."""
    plain, watched = settings(), settings(estimation_error=True)
    assert loop.run(plain).curve == loop.run(watched).curve
    plans = []
    for attack in ("sign-flip", "min-max", "pgd"):
        rounds = loop.Rounds(settings(attack=attack).resolve())
        rounds.advance(8)
        rounds.advance(8)
        plans.append(rounds.plan)
    assert torch.equal(plans[0], plans[1]) and torch.equal(plans[0], plans[2])


def test_estimates_without_correction_are_off_by_what_a_gradient_changed():
    """trust 0: an estimate is the client's last upload, so at lr 0 only the minibatch tells them apart."""
    rounds = loop.Rounds(settings(trust=0.0, lr=0.0, batch=4, rounds=64, evaluations=1).resolve())
    rounds.advance(64)
    fed = rounds.federation
    whole = {k: share for k, share in enumerate(federation.split(rounds.settings, rounds.data))}
    fed.draw = lambda known, purpose: torch.stack([whole[int(k)][:1].expand(4) for k in known])
    error = rounds.estimation_error()
    known = fed.honest[rounds.server.seen[fed.honest]]
    expected = []
    for k in known.tolist():
        last, _ = rounds.server.last(torch.tensor([k]))
        x, y = rounds.data.train(whole[k][:1].expand(4))
        true = rounds.net.gradient(rounds.server.model, x, y)
        expected.append(float((last - true).norm() / true.norm()))
    assert error == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_a_stopped_run_ends():
    stop = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        loop.run(settings(), lambda point: stop.set(), stop)


def test_a_setting_that_a_defense_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="unknown setting 'radius' of kardam"):
        loop.run(settings(defense="kardam", defense_options={"radius": 3}))


def test_what_defenses_share_with_the_run():
    chosen = settings(malicious=0.25, memory=2, quantile=0.6, max_norm=7.0, trust=0.5, attack="sign-flip")
    rounds = loop.Rounds(chosen.resolve())
    server = rounds.server
    assert (server.config.memory, server.config.quantile, server.config.max_norm, server.config.trust) == (
        2,
        0.6,
        7.0,
        0.5,
    )
    assert server.config.lr == 0.05 and len(rounds.past) == 11  # the server itself keeps no old models
    rule = loop.Rounds(replace(chosen, defense="kardam").resolve()).server.rule
    assert rule.malicious == 2 and rule.quantile == 0.75
    other = loop.Rounds(replace(chosen, defense="kardam", defense_options={"quantile": 0.5}).resolve()).server.rule
    assert other.quantile == 0.5
    wide = loop.Rounds(replace(chosen, dataset="cifar10", defense="sageflow", attack="none").resolve()).server.rule
    assert wide.bound == pytest.approx(math.log(12) / math.log(10))


def test_support_runs_with_the_recommended_settings():
    chosen = settings(defense="secureafl-support")
    config = loop.Rounds(chosen.resolve()).server.config
    assert {name: getattr(config, name) for name in RECOMMENDED} == RECOMMENDED
    config = loop.Rounds(replace(chosen, defense_options={"filter": True}).resolve()).server.config
    assert config.filter and config.quantile == chosen.quantile
