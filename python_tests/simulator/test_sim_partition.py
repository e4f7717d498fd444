import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secureafl_ext.tasks.partition import dirichlet, skewed, stretches

CLASSES, PER_CLASS = 10, 3000
LABELS = torch.arange(CLASSES).repeat(PER_CLASS)


def counts(shares: list[torch.Tensor], labels: torch.Tensor = LABELS, classes: int = CLASSES) -> torch.Tensor:
    """(clients, classes)"""
    return torch.stack([labels[share].bincount(minlength=classes) for share in shares])


def close(count: torch.Tensor, trials: int, probability: float) -> bool:
    """Within five deviations of a binomial count."""
    deviation = math.sqrt(trials * probability * (1 - probability))
    return bool(((count - trials * probability).abs() <= 5 * deviation).all())


def whole(shares: list[torch.Tensor], samples: int) -> bool:
    ascending = all(bool((share[1:] > share[:-1]).all()) for share in shares)
    return ascending and min(map(len, shares)) > 0 and torch.cat(shares).sort()[0].tolist() == list(range(samples))


@pytest.mark.parametrize("degree", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("clients", [50, 10])
def test_a_label_goes_to_its_group_with_that_probability(degree, clients):
    table = counts(skewed(LABELS, CLASSES, clients, degree, seed=1))
    group = table.argmax(1)
    assert group.bincount(minlength=CLASSES).tolist() == [clients // CLASSES] * CLASSES
    by_group = torch.zeros(CLASSES, CLASSES, dtype=torch.int64).index_add_(0, group, table)  # (group, label)
    own = torch.eye(CLASSES, dtype=torch.bool)
    assert close(by_group[own], PER_CLASS, degree)
    assert close(by_group[~own], PER_CLASS, (1 - degree) / (CLASSES - 1))
    assert close(table[torch.arange(clients), group], PER_CLASS, degree * CLASSES / clients), "alike within the group"


def test_degree_of_no_skew_and_of_all():
    table = counts(skewed(LABELS, CLASSES, 20, 1 / CLASSES, seed=2))
    assert close(table, PER_CLASS, 1 / 20)
    table = counts(skewed(LABELS, CLASSES, 20, 1.0, seed=2))
    assert ((table > 0).sum(1) == 1).all() and ((table > 0).sum(0) == 2).all()


def test_groups_of_unequal_size():
    """12 clients in ten groups: two groups of two, and each of their clients has half as much."""
    sizes = counts(skewed(LABELS, CLASSES, 12, 1.0, seed=3)).sum(1).sort()[0]
    assert close(sizes[:4], PER_CLASS, 0.5) and sizes[4:].tolist() == [PER_CLASS] * 8


def test_fewer_clients_than_classes_share_the_labels_out():
    table = counts(skewed(LABELS, CLASSES, 4, 1.0, seed=4))
    owned = sorted(tuple(row.nonzero()[:, 0].tolist()) for row in table)
    assert owned == [(0, 4, 8), (1, 5, 9), (2, 6), (3, 7)]
    assert close(counts(skewed(LABELS, CLASSES, 4, 0.25, seed=4)), PER_CLASS, 0.25)


def test_clients_are_dealt_into_groups_at_random():
    groups = {tuple(counts(skewed(LABELS, CLASSES, 10, 1.0, seed)).argmax(1).tolist()) for seed in range(5)}
    assert len(groups) == 5 and tuple(range(10)) not in groups


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    """E p = 1 / n and E p^2 = (alpha + 1) / (n (n alpha + 1)), over 200 labels."""
    labels, clients = torch.arange(200).repeat(500), 10
    for alpha in (0.1, 1.0, 100.0):
        share = counts(dirichlet(labels, clients, alpha, seed=5), labels, 200) / 500
        second = (alpha + 1) / (clients * (clients * alpha + 1))
        second += (1 / clients - second) / 500  # 500 draws add their own variance, p (1 - p) / 500
        assert abs(float(share.square().mean()) / second - 1) < 0.2, alpha
        assert (share.mean(1) - 1 / clients).abs().max() < 0.1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 12), st.floats(0, 1), st.integers(0, 2**40))
def test_every_sample_has_one_client_and_every_client_a_sample(clients, more, classes, degree, seed):
    samples = clients + more
    labels = torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(seed))
    assert whole(skewed(labels, classes, clients, degree, seed), samples)
    assert whole(dirichlet(labels, clients, degree + 1e-3, seed), samples)
    assert whole(stretches(samples, clients), samples)


def test_the_same_seed_gives_the_same_shares():
    for split in (
        lambda seed: skewed(LABELS, CLASSES, 50, 0.5, seed),
        lambda seed: dirichlet(LABELS, 50, 0.5, seed),
    ):
        torch.manual_seed(1)
        first = split(7)
        torch.manual_seed(2)
        assert all(map(torch.equal, first, split(7)))
        assert not all(map(torch.equal, first, split(8)))


def test_a_recording_is_cut_into_stretches():
    assert [share.tolist() for share in stretches(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_refusals():
    with pytest.raises(ValueError, match="partition: clients must be 1 to 3, the number of samples, got 4"):
        skewed(LABELS[:3], CLASSES, 4, 0.5, 0)
    with pytest.raises(ValueError, match=r"degree must be between 0 and 1, got 1\.5"):
        skewed(LABELS, CLASSES, 4, 1.5, 0)
    with pytest.raises(ValueError, match="alpha must be positive, got 0"):
        dirichlet(LABELS, 4, 0, 0)
    with pytest.raises(ValueError, match="clients must be 1 to 4, the number of samples, got 0"):
        stretches(4, 0)
