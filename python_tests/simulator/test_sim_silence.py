"""Who uploads: clients that fall silent, malicious clients that flood, and how far the run is."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scenes
import torch

from secureafl_ext.attacks.timing import Timing
from secureafl_ext.cli.names import run_name
from secureafl_ext.sim import arrivals, federation, loop, results
from secureafl_ext.sim.settings import Settings, UndefinedError
from secureafl_ext.tasks import models


@pytest.fixture
def tiny(monkeypatch):
    """Noise and a small net under the names of the real ones."""
    monkeypatch.setattr(federation, "loaded", lambda name, _, __, device: scenes.dataset("grey", device))
    monkeypatch.setitem(models.MODELS, "cnn", lambda shape, classes: scenes.small_net(scenes.dataset("grey")))


def settings(**changed):
    few = {"clients": 10, "malicious": 0.3, "rounds": 60, "batch": 4, "evaluations": 3, "lr": 0.05, "device": "cpu"}
    return Settings(**{"defense": "async-sgd", **few, **changed}).resolve()


# When an attacker attacks


def quiet(client, malicious, start, stop, duty, period, silence):
    """The uploads by a plain loop over the rounds."""
    harmful, keeps = dict.fromkeys(set(client), 0), []
    for t, (who, bad) in enumerate(zip(client, malicious, strict=True)):
        keeps.append(not (bad and silence and harmful[who] >= silence))
        done = t / len(client)
        harmful[who] += start <= done < stop and math.modf(done / period)[0] < duty
    return keeps


@pytest.mark.parametrize(
    "timing", [(0, 1, 1, 0.05, 1), (0.25, 1, 1, 0.05, 1), (0.1, 0.7, 0.4, 0.13, 3), (0, 1, 1, 1, 0)]
)
def test_silence_counts_attacking_uploads(timing):
    client = np.random.default_rng(3).integers(7, size=200)
    malicious = np.isin(client, [2, 5])
    got = Timing(*timing).uploads(torch.tensor(client), torch.tensor(malicious))
    assert got.dtype == torch.bool and got.tolist() == quiet(client, malicious, *timing)
    assert got[torch.tensor(~malicious)].all() and got.all() == (timing[-1] == 0)


def test_a_ghost_uploads_once_and_honest_clients_take_its_place(tiny):
    planned = federation.Federation(settings(attack="ghost")).arrivals
    rounds = loop.Rounds(settings(attack="ghost"))
    fed = rounds.federation
    came = fed.arrivals.client
    per_client = came.bincount(minlength=10)
    assert per_client[fed.malicious].tolist() == [1, 1, 1] and len(came) == 60
    assert torch.equal(fed.arrivals.staleness, planned.staleness)
    first = torch.tensor([int((planned.client == one).nonzero()[0]) for one in fed.malicious])
    assert rounds.is_malicious.nonzero().flatten().tolist() == sorted(first.tolist())
    kept = torch.isin(planned.client, fed.honest)
    kept[first] = True
    assert torch.equal(came[kept], planned.client[kept])
    assert torch.isin(came[~kept], fed.honest).all() and len(came[~kept].unique()) > 3
    for _ in range(3):
        rounds.advance(20)
    assert rounds.server.version == 60


def test_a_frozen_client_is_honest_first(tiny):
    rounds = loop.Rounds(settings(attack="freeze"))
    late = torch.arange(60) >= 15
    came, bad = rounds.federation.arrivals.client, rounds.is_malicious
    assert all(((came == one) & late).sum() <= 1 for one in rounds.federation.malicious) and (bad & late).any()
    planned = federation.Federation(rounds.settings).arrivals.client
    assert torch.equal(came[:15], planned[:15]) and bad[:15].any()


def test_an_attack_that_never_falls_silent_changes_no_arrival(tiny):
    one, other = (loop.Rounds(settings(attack=name)).federation.arrivals for name in ("squads", "sign-flip"))
    assert torch.equal(one.client, other.client) and torch.equal(one.staleness, other.staleness)


def test_silence_has_a_random_stream_of_its_own(tiny):
    one, again, other = (loop.Rounds(settings(attack="ghost", seed=seed)).federation for seed in (0, 0, 1))
    assert torch.equal(one.arrivals.client, again.arrivals.client)
    assert not torch.equal(one.arrivals.client, other.arrivals.client)


@pytest.mark.parametrize(
    "answer", [torch.ones(59, dtype=torch.bool), torch.ones(60), torch.ones(60, 1, dtype=torch.bool)]
)
def test_a_wrong_answer_about_uploads_is_named(tiny, answer):
    fed = federation.Federation(settings(attack="ghost"))
    with pytest.raises(ValueError, match=r"attack 'ghost': uploads\(\) must return \(60,\) bool, got "):
        fed.silence(answer)


def test_an_honest_client_cannot_be_silenced(tiny):
    fed = federation.Federation(settings(attack="ghost"))
    planned = fed.arrivals.client
    fed.silence(torch.isin(planned, fed.malicious))  # False for all honest clients
    assert torch.equal(fed.arrivals.client, planned)


def test_somebody_must_be_left_to_upload(tiny):
    fed = federation.Federation(settings(attack="sign-flip", malicious=1.0))
    with pytest.raises(ValueError, match=r"malicious must leave an honest client .* fall silent, got 1.0"):
        fed.silence(torch.zeros(60, dtype=torch.bool))


# Progress


def test_a_view_says_how_far_the_run_is(tiny):
    rounds = loop.Rounds(settings(attack="sign-flip"))
    seen, update = [], rounds.attack.update
    rounds.attack = replace(rounds.attack, update=lambda view: seen.append(view.progress) or update(view))
    for _ in range(3):
        rounds.advance(20)
    assert all(one.dtype == torch.float64 and one.shape == () for one in seen)
    expected = rounds.is_malicious.nonzero().flatten().double() / 60
    assert [one.item() for one in seen] == expected.tolist() and len(seen) > 5


def test_device_and_host_agree_when_it_attacks(tiny):
    """A client falls silent right after its attacking upload, and never before it."""
    options = {"start": 0.3, "duty": 0.5, "period": 0.2, "silence": 1}
    rounds = loop.Rounds(settings(attack="crafted", attack_options=options, rounds=240, evaluations=12))
    active, update = [], rounds.attack.update

    def watched(view):
        active.append((int(view.client), bool(rounds.attack.timing.attacks(view.progress))))
        return update(view)

    rounds.attack.update = watched
    for _ in range(12):
        rounds.advance(20)
    for one in rounds.federation.malicious.tolist():
        its = [attacks for who, attacks in active if who == one]
        assert sum(its) == 1 and its[-1]


# Floods


@pytest.mark.parametrize("share", [0.33, 0.94])
@pytest.mark.parametrize("kind", ["uniform", "clock"])
def test_a_flood_is_that_share_of_the_uploads(kind, share):
    chosen = settings(attack="sign-flip", arrivals=kind, flood=share, rounds=20_000, spread=0.5)
    malicious = torch.tensor([1, 4, 7])
    client, staleness, late = federation.draw_arrivals(chosen, malicious)
    counts = client.bincount(minlength=10).double() / 20_000
    assert counts[malicious].sum().item() == pytest.approx(share, abs=0.02)
    assert (staleness <= chosen.delay).all() and late < 400
    if kind == "uniform":
        assert counts[malicious].std() < 0.02 and (counts > 0).all()


def test_without_a_flood_arrivals_are_those_of_before():
    """The first numbers of a run as they were when there were no floods."""
    client, staleness, _ = arrivals.uniform(6, 50, 10, seed=5)
    generator = torch.Generator().manual_seed(5)
    assert client.tolist() == torch.randint(50, (6,), generator=generator).tolist()
    kept = torch.arange(1, 7).double()
    assert staleness.tolist() == (torch.rand(6, generator=generator, dtype=torch.float64) * kept).long().tolist()


def test_the_clocks_delay_grows_so_that_honest_uploads_are_in_time():
    assert settings(attack="sign-flip", arrivals="clock").delay == 40
    assert settings(attack="sign-flip", arrivals="clock", flood=0.9).delay == 40 * 7
    assert settings(attack="sign-flip", arrivals="clock", flood=0.05).delay == 40
    assert settings(attack="sign-flip", arrivals="clock", flood=0.9, delay=3).delay == 3
    assert settings(attack="sign-flip", flood=0.9).delay == 10


@pytest.mark.parametrize("flood", [0.0, 1.0, -0.5, math.nan])
def test_a_flood_is_a_share(flood):
    with pytest.raises(ValueError, match=r"flood must be 0.01 to 0.99, got"):
        settings(attack="sign-flip", flood=flood)


@pytest.mark.parametrize("changed", [{"attack": "none"}, {"malicious": 0.0}, {"malicious": 1.0}])
def test_a_flood_needs_both_kinds_of_clients(changed):
    with pytest.raises(UndefinedError, match="flood needs malicious and honest clients, got"):
        settings(**{"attack": "sign-flip", "flood": 0.5, **changed})


def test_a_result_from_before_floods_is_the_run_of_today(tmp_path):
    chosen = settings(attack="sign-flip")
    outcome = loop.Outcome(chosen, [loop.Point(60, 0.5, None)], {"error": 0.5, "seconds": 1.0})
    path = tmp_path / results.NAME
    results.append(path, results.record(outcome))
    assert "flood" not in path.read_text()  # a line as it was before there were floods
    [read] = results.read(path)
    assert read.outcome.settings == chosen
    flooded = settings(attack="sign-flip", flood=0.5)
    results.append(path, results.record(replace(outcome, settings=flooded)))
    assert [record.outcome.settings for record in results.read(path)] == [chosen, flooded]
    assert run_name(chosen) == "fashion-mnist-small-sign-flip-async-sgd-seed=0-7fefa8da"
    assert run_name(flooded) != run_name(chosen)


# Which of the malicious clients uploads


def test_decoys_come_from_the_client_that_pushed(tiny):
    """The rounds of malicious clients stay theirs, but each uploads three times before another does."""
    planned = federation.Federation(settings(attack="crafted")).arrivals.client
    fed = loop.Rounds(settings(attack="crafted", attack_options={"decoys": 2})).federation
    came, bad = fed.arrivals.client, torch.isin(planned, fed.malicious)
    assert torch.equal(torch.isin(came, fed.malicious), bad) and torch.equal(came[~bad], planned[~bad])
    assert came[bad].tolist() == [int(planned[bad][i // 3 * 3]) for i in range(int(bad.sum()))]


@pytest.mark.parametrize(
    ("order", "got"),
    [
        (lambda clients: clients[:-1], r"got \(\d+,\) torch.int64"),
        (lambda clients: clients.float(), "torch.float32"),
        (lambda clients: torch.full_like(clients, -1), "got other clients"),
    ],
)
def test_a_wrong_order_is_refused_and_nothing_changes(tiny, order, got):
    fed = federation.Federation(settings(attack="crafted"))
    before = fed.arrivals.client.clone()
    with pytest.raises(ValueError, match=rf"attack 'crafted': order\(\) must return \(\d+,\) int64, malicious.*{got}"):
        fed.reorder(order)
    assert torch.equal(fed.arrivals.client, before)
