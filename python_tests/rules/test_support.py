"""rule="support": its shifts against an oracle in NumPy, and what they do to fleets with and without attackers.

Lengths are in units of the median norm of an upload, as in Similarity; a mean update is shorter, as noise cancels.
"""

import numpy as np
import pytest
import support_oracle
import torch
from support_fleets import ALIKE, APART, SIZE, fleet, lone, mosaic, products_of, pushing, shifts, squads, unit, weights

from secureafl_ext.rules.support import Support

KINDS = {
    "groups": lambda random: fleet(random, 24),
    "alike": lambda random: fleet(random, 15, **ALIKE),
    "push": lambda random: pushing(random, 24, 5, random.uniform(0.2, 2), hide=0),
    "hidden push": lambda random: pushing(random, 40, 9, random.uniform(0.2, 1), hide=1),
    "squads": lambda random: squads(random, 30, 6),
    "mosaic": lambda random: mosaic(random, 30, 7),
    "lone clients": lambda random: lone(random, 9),
    "identical": lambda random: np.tile(unit(random, 5), (8, 1)),
    "one": lambda random: unit(random, 1, 4),
    "two": lambda random: unit(random, 2, 4),
    "three": lambda random: unit(random, 3, 4) * random.uniform(0, 1, (3, 1)),
    "noise": lambda random: 0.7 * unit(random, 20, 10),
    "nothing": lambda random: np.zeros((7, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_shifts_are_those_of_the_oracle(kind):
    random, moved = np.random.default_rng(0), 0.0
    for _ in range(20):
        products = products_of(KINDS[kind](random))
        ours = shifts(products)
        np.testing.assert_allclose(ours, support_oracle.shifts(products), rtol=0, atol=1e-9)
        moved = max(moved, np.abs(ours).max() * len(ours))
    assert (moved > 0.6) == (kind not in ("alike", "identical", "one", "two", "nothing"))


def test_shifts_of_averages_that_no_vectors_have():
    """A client that turns its updates around each time has a negative product with itself: M is not positive."""
    random, moved = np.random.default_rng(1), 0.0
    for n in (1, 2, 3, 10, 30):
        for _ in range(20):
            drawn = random.uniform(-1, 1, (n, n)) * random.choice([0.2, 1.0])
            products = np.triu(drawn) + np.triu(drawn, 1).T
            ours = shifts(products)
            assert np.isfinite(ours).all()
            np.testing.assert_allclose(ours, support_oracle.shifts(products), rtol=0, atol=1e-7)
            moved = max(moved, np.abs(ours).max())
    assert moved > 0.1


@pytest.mark.parametrize("value", [1e300, -1e300, 1e155, 5e-324, 1.0])
@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_no_value_makes_a_shift_that_is_not_finite(n, value):
    random = np.random.default_rng(2)
    made, everyone = Support(n, torch.device("cpu")), torch.ones(n, dtype=torch.bool)
    for share in (0.1, 0.5, 1.0):
        made.means.copy_(torch.from_numpy(products_of(unit(random, n, 5))))
        hit = np.triu(random.random((n, n)) < share)
        made.means[torch.from_numpy(hit | hit.T)] = value
        made.refresh(everyone)
        assert made.shift.isfinite().all() and (made.weights(everyone) >= 0).all()


@pytest.mark.parametrize("n", [10, 20, 50])
def test_without_attackers_the_weights_are_those_of_the_mean(n):
    """Clients that are alike up to 3 %; groups of the same size, and clients with nothing in common, exactly."""
    random = np.random.default_rng(3)
    for _ in range(10):
        assert np.abs(weights(fleet(random, n, common=0.5, group=0)) * n - 1).max() < 0.03
    equal = 0.7 * np.eye(n)[np.arange(n) % 5]
    np.testing.assert_allclose(weights(equal), 1 / n, rtol=1e-9)
    np.testing.assert_allclose(weights(0.6 * np.eye(n)), 1 / n, rtol=1e-9)


def test_weak_groups_with_nothing_in_common_lose_everything():
    """A limit of the rule: their eigenvalue is above its floor, the usual one is held down by SHORT_LEVEL. So each
    group is a crowd for the rest, and nobody has weight. A little in common is enough to end this."""
    groups, common = 0.4 * np.eye(20)[np.arange(20) % 5], 0.2 * np.eye(20)[19]
    assert weights(groups).sum() < 1e-9
    assert weights(groups + common).sum() > 0.9


@pytest.mark.parametrize("settings", [{}, APART], ids=str)
def test_without_attackers_the_step_is_near_the_mean(settings):
    """Groups whose eigenvalues differ are not all usual: the largest lose a part. The step stays near the mean."""
    random = np.random.default_rng(4)
    for _ in range(20):
        rows = fleet(random, 40, **settings)
        step, mean = weights(rows) @ rows, rows.mean(0)
        assert step @ mean > 0.85 * np.linalg.norm(step) * np.linalg.norm(mean)
        assert 0.6 < np.linalg.norm(step) / np.linalg.norm(mean) < 1.3


# (settings, hidden, strengths at which the push must lose its pull, and the share of it that may be left on average)
PUSHES = [
    (ALIKE, 0, (0.2, 0.3, 0.5, 1.0, 2.0), 0.05),
    (ALIKE, 1, (0.2, 0.3, 0.5, 1.0, 2.0), 0.2),
    (APART, 0, (0.2, 0.3, 0.5, 1.0, 2.0), 0.05),
    (APART, 1, (0.5, 1.0, 2.0), 0.25),
    ({}, 0, (0.5, 1.0, 2.0), 0.05),
    ({}, 1, (0.2, 0.3, 0.5, 1.0, 2.0), 0.6),
]


@pytest.mark.parametrize(("settings", "hide", "strengths", "most"), PUSHES, ids=str)
def test_a_common_push_of_less_than_a_quarter_loses_most_of_its_pull(settings, hide, strengths, most):
    """n = 50, f = 12. Strengths that are not listed do not stand out from honest groups, and keep their pull."""
    n, f = 50, 12
    for strength in strengths:
        left = []
        for seed in range(8):
            rows = pushing(np.random.default_rng(seed), n, f, strength, hide, **settings)
            left.append((weights(rows) @ rows)[-1] / rows.mean(0)[-1])
        assert np.mean(left) < most, (strength, left)


def test_the_order_of_clients_does_not_matter():
    random = np.random.default_rng(5)
    for kind in ("push", "hidden push", "mosaic", "squads", "groups"):
        rows = KINDS[kind](random)
        order = random.permutation(len(rows))
        np.testing.assert_allclose(weights(rows[order]), weights(rows)[order], rtol=0, atol=1e-9)


def test_absent_clients_have_no_weight_and_no_influence():
    random = np.random.default_rng(6)
    rows, mask = pushing(random, 30, 7, 0.5, hide=0), torch.from_numpy(random.random(30) < 0.7)
    found = []
    for absent in (0.0, 1.0, -1.0):
        made = Support(30, torch.device("cpu"))
        made.means.copy_(torch.from_numpy(products_of(rows)))
        made.means[~mask] = made.means[:, ~mask] = absent
        made.shift.fill_(0.1)  # of an earlier refresh
        made.refresh(mask)
        assert not made.shift[~mask].any()  # what they had gained is gone
        found.append(made.weights(mask).numpy())
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    chosen = mask.numpy()
    np.testing.assert_allclose(found[0][chosen], weights(rows[chosen]), rtol=0, atol=1e-12)
    assert not found[0][~chosen].any() and np.abs(found[0][chosen] * chosen.sum() - 1).max() > 0.9
    nobody, before = torch.zeros(30, dtype=torch.bool), made.shift.clone()
    assert before.min() < -0.01 and before.max() > 0
    made.refresh(nobody)
    assert torch.equal(made.shift, before.clamp(max=0)) and not made.weights(nobody).any()


def test_a_forgotten_client_leaves_no_trace():
    made = Support(5, torch.device("cpu"))
    made.means.fill_(0.5)
    made.shift.fill_(0.1)
    made.basis.copy_(torch.linalg.qr(torch.randn(3, 5, 5, dtype=torch.float64))[0])
    made.forget(2)
    assert not made.means[2].any() and not made.means[:, 2].any() and made.means[0, 1] == 0.5
    assert made.shift.tolist() == [0.1, 0.1, 0, 0.1, 0.1]
    assert torch.equal(made.basis, torch.eye(5, dtype=torch.float64).expand(3, 5, 5))


def searched(seed, tries, n, f, **settings):
    """The largest pull along the last axis that f attackers among n reach: random starts, then small changes."""
    random = np.random.default_rng(seed)
    honest, axis, best, found = fleet(random, n - f, **settings), np.eye(SIZE + 1)[-1], -1.0, None

    def sideways(count):
        return np.concatenate([unit(random, count, SIZE), np.zeros((count, 1))], 1)

    for _ in range(tries):
        if found is None or random.random() < 0.3:
            mix = random.random((f, n - f)) * (random.random((f, n - f)) < random.choice([0.1, 0.3, 1]))
            mix *= random.choice([0, 1, 1, 2]) / np.maximum(mix.sum(1, keepdims=True), 1e-9)
            attack = mix @ honest + random.random((random.choice([1, f]), 1)) * axis
            attack = attack + random.choice([0, 0.1, 0.3, 0.6]) * sideways(f)
        else:
            who, size = random.integers(f) if random.random() < 0.5 else slice(None), 10 ** random.uniform(-2, 0)
            attack = found.copy()
            moves = axis * random.normal(), honest[random.integers(n - f)] * random.normal(), sideways(1)[0]
            kind = random.integers(4)
            attack[who] = (
                attack[who] * np.exp(size * random.normal()) if kind == 3 else attack[who] + size * moves[kind]
            )
        attack = attack / np.maximum(np.linalg.norm(attack, axis=1, keepdims=True), 1)
        rows = np.concatenate([honest, attack])
        pull = (weights(rows) @ rows)[-1]
        if pull > best:
            best, found = pull, attack
    return best


@pytest.mark.parametrize(("settings", "bound"), [({}, 0.8), (ALIKE, 0.35)], ids=str)
def test_no_search_moves_the_step_further_than_said(settings, bound):
    """Bounds in units of f / n, what f of n clients reach in a mean. n = 20, f = 4: 300 tries find .57 among groups,
    .23 among clients that are alike.

    This is no proof: with 50 clients in groups and other seeds 400 tries found 1.2, as a client's weight can grow to
    several times 1 / n.
    """
    n, f = 20, 4
    best = max(searched(seed, 300, n, f, **settings) for seed in range(2))
    print(f"\nlargest pull {settings}: {best * n / f:.3f} f / n")
    assert 0.1 < best * n / f < bound
