"""What a run draws: trusted samples, malicious clients, arrivals, minibatches; each from the right place, all alike.

Bounds on chi-square have fixed seeds: they hold or fail the same way every time.
"""

import math
from dataclasses import replace

import pytest
import torch

from secureafl_ext.sim import federation
from secureafl_ext.sim.federation import Federation
from secureafl_ext.sim.settings import Settings
from secureafl_ext.tasks.datasets import Dataset

TRAIN, TEST, CLASSES = 600, 400, 10


def numbered() -> Dataset:
    """Every image holds its own number: training samples from 0 on, test samples from TRAIN on. Labels follow it."""

    def part(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = torch.arange(first, first + count)
        x = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = number // 256, number % 256
        return x, number % CLASSES

    one, none = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    return Dataset("numbered", *part(0, TRAIN), *part(TRAIN, TEST), CLASSES, one, none)


def numbers(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0, 0, 0].long() * 256 + x[:, 0, 0, 1].long()


@pytest.fixture(autouse=True)
def data(monkeypatch) -> None:
    def loaded(name, folder, holdout, device) -> Dataset:
        return numbered().held_out(holdout) if holdout else numbered()

    monkeypatch.setattr(federation, "loaded", loaded)


def made(**changed) -> Federation:
    usual = {"clients": 12, "malicious": 0.25, "attack": "sign-flip", "rounds": 50, "batch": 8, "trusted": 40}
    return Federation(Settings(**{"device": "cpu", **usual, **changed}).resolve())


def alike(counts: torch.Tensor) -> bool:
    """Chi-square of equal chances within five deviations of its mean; also not far too regular."""
    expected = counts.sum() / len(counts)
    free = len(counts) - 1
    value = float(((counts - expected) ** 2 / expected).sum())
    return abs(value - free) <= 5 * math.sqrt(2 * free)


# Trusted samples


def trusted(fed: Federation) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and labels of the samples behind both questions that a server may ask."""
    seen = []

    class Net:
        def gradient(self, model, x, y):
            seen.append((numbers(x), y))
            return model

        def predict(self, model, x):
            seen.append((numbers(x), numbers(x) % CLASSES))
            return torch.zeros(len(x), CLASSES)

    fed.net = Net()
    asked = fed.trusted()
    asked.gradient(torch.zeros(3))
    asked.evaluate(torch.zeros(3))
    assert len(seen) == 2 and torch.equal(seen[0][0], seen[1][0])
    return seen[0]


def test_trusted_samples_are_training_samples_with_their_labels():
    number, label = trusted(made())
    assert len(number) == len(number.unique()) == 40
    assert number.max() < TRAIN, "none is of the test set"
    assert torch.equal(label, number % CLASSES)


def test_trusted_samples_are_not_of_the_part_that_is_held_out():
    fed = made(holdout=0.25)
    held_out = numbers(fed.data.test_x)
    assert len(held_out) == TRAIN / 4 and held_out.max() < TRAIN
    number, _ = trusted(fed)
    assert len(number) == 40 and not torch.isin(number, held_out).any()


def test_trusted_samples_are_any_and_fixed_by_the_seed():
    draws = [trusted(made(seed=seed))[0] for seed in range(150)]
    assert alike(torch.cat(draws).bincount(minlength=TRAIN))
    assert torch.equal(draws[0], trusted(made(seed=0, attack="none", defense="zeno++"))[0])
    assert not torch.equal(draws[0], draws[1])


def test_more_trusted_samples_than_there_are_is_all_of_them():
    assert sorted(trusted(made(trusted=10_000))[0].tolist()) == list(range(TRAIN))


# Malicious clients


def test_malicious_clients_are_any_of_the_exact_number():
    draws = [made(seed=seed) for seed in range(120)]
    for fed in draws:
        assert len(fed.malicious) == 3
        assert torch.equal(torch.cat([fed.malicious, fed.honest]).sort().values, torch.arange(12))
        assert torch.equal(fed.malicious, fed.malicious.sort().values)
        assert torch.equal(fed.scene.malicious, fed.malicious)
    counts = torch.cat([fed.malicious for fed in draws]).bincount(minlength=12)
    assert counts.min() > 0 and alike(counts)
    pairs = {tuple(fed.malicious.tolist()) for fed in draws}
    assert len(pairs) > 60, "of 220 triples"
    assert torch.equal(made(seed=5).malicious, draws[5].malicious)


@pytest.mark.parametrize(("malicious", "count"), [(0.0, 0), (0.05, 1), (0.5, 6), (0.96, 12), (1.0, 12)])
def test_the_number_of_attackers_is_the_share_rounded(malicious, count):
    fed = made(malicious=malicious)
    assert len(fed.malicious) == count and len(fed.honest) == 12 - count


def test_without_an_attack_nobody_is_malicious():
    assert len(made(attack="none").malicious) == 0


# Arrivals


@pytest.mark.parametrize("delay", [0, 4])
def test_uniform_arrivals_are_all_alike(delay):
    fed = made(rounds=6000, delay=delay)
    client, staleness, late = fed.arrivals
    assert len(client) == len(staleness) == 6000 and late == 0
    assert alike(client.bincount(minlength=12))
    assert staleness.max() == delay
    if delay:
        assert alike(staleness[delay:].bincount(minlength=delay + 1))
        together = (client * (delay + 1) + staleness)[delay:]
        assert alike(together.bincount(minlength=12 * (delay + 1)))
        after = client[:-1] * 12 + client[1:]
        assert alike(after[::2].bincount(minlength=144)), "who comes next does not hang on who came"


def test_malicious_clients_come_as_often_as_they_are_many():
    fed = made(rounds=6000)
    share = torch.isin(fed.arrivals.client, fed.malicious).double().mean()
    assert abs(float(share) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 6000)


def test_arrivals_change_with_the_seed_and_with_nothing_of_the_defense():
    one, same, other = made(), made(defense="kardam", attack="none"), made(seed=1)
    assert torch.equal(one.arrivals.client, same.arrivals.client)
    assert torch.equal(one.arrivals.staleness, same.arrivals.staleness)
    assert not torch.equal(one.arrivals.client, other.arrivals.client)


# Minibatches


@pytest.mark.parametrize("partition", ["skewed", "dirichlet"])
@pytest.mark.parametrize("purpose", ["samples", "extra", "look"])
def test_a_minibatch_is_of_the_clients_own_samples_all_alike(partition, purpose):
    fed = made(partition=partition)
    shares = federation.split(fed.settings, fed.data)
    assert sorted(torch.cat(shares).tolist()) == list(range(TRAIN)), "each sample has one owner"
    drawn = fed.draw(torch.arange(12).expand(100, -1), purpose)
    assert drawn.shape == (100, 12, 8)
    for client, share in enumerate(shares):
        counts = drawn[:, client].flatten().bincount(minlength=TRAIN)
        assert counts.sum() == counts[share].sum(), "nobody else's"
        assert len(share) == 1 or alike(counts[share])


def test_minibatches_of_one_client_differ_from_round_to_round_and_place_to_place():
    fed = made(clients=2, malicious=0.5)
    drawn = fed.draw(torch.zeros(50, dtype=torch.int64), "samples")
    assert len({tuple(row) for row in drawn.tolist()}) == 50
    assert len({tuple(column) for column in drawn.T.tolist()}) == 8


def test_the_purposes_draw_from_streams_of_their_own():
    """What an attack asks for more must not change what honest clients train on."""
    one, other = made(), made()
    clients = torch.arange(12)
    other.draw(clients, "extra")
    other.draw(clients, "look")
    assert torch.equal(one.draw(clients, "samples"), other.draw(clients, "samples"))
    assert not torch.equal(one.draw(clients, "samples"), one.draw(clients, "extra"))


def test_honest_clients_that_an_attack_sees_are_all_alike():
    fed = made()
    chosen = fed.some_honest(2000, 4)
    assert torch.isin(chosen, fed.honest).all()
    assert alike(chosen.flatten().bincount(minlength=12)[fed.honest])
    assert all(len(row.unique()) == 4 for row in chosen)


def test_every_purpose_has_a_seed_of_its_own():
    settings = made().settings
    purposes = ("start", "samples", "extra", "look", "malice", "attack", "trusted", "partition", "arrivals")
    seeds = {federation.stream(replace(settings, seed=seed), name) for seed in range(50) for name in purposes}
    assert len(seeds) == 50 * len(purposes)
