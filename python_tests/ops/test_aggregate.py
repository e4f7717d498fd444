import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import make_history, relative_error

from secureafl_ext import aggregate, estimate, median, ops, reference, trimmed_mean

INF = float("inf")
RULES = [("median", 0), ("trimmed_mean", 2), ("mean", 0)]


def run(history, update, client, accepted, seen, device, **options):
    moved = history.to(device)
    return aggregate(
        moved.model,
        update.to(device),
        client,
        torch.tensor(accepted, device=device),
        *moved.rest(),
        torch.as_tensor(seen).to(device),
        **options,
    )


def expected_rows(history, update, client, accepted, seen, trust):
    rows = oracles.estimates(history, trust)
    rows[client] = update.double().numpy()
    takes_part = np.array(seen, dtype=bool)
    takes_part[client] = accepted
    return rows[takes_part]


def by_rule(rows, rule, trim):
    return oracles.median(rows) if rule == "median" else oracles.trimmed(rows, trim)


@pytest.mark.parametrize(("rule", "trim"), RULES)
@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("trust", [1.0, INF])
def test_rule_over_estimates_and_accepted_update(random, device, rule, trim, accepted, trust):
    for n in (7, 8, 40):
        history = make_history(random, n, 3, 100, pairs=[k % 4 for k in range(n)])
        update = 50 * torch.randn(100, generator=random, dtype=torch.float64)  # far out: its presence shows
        seen = [k % 5 != 3 for k in range(n)]
        result = run(history, update, 2, accepted, seen, device, trust=trust, rule=rule, trim=trim)
        rows = expected_rows(history, update, 2, accepted, seen, trust)
        assert relative_error(result, by_rule(rows, rule, trim)) < 1e-10


def test_float32(random, device):
    history = make_history(random, 20, 3, 500, dtype=torch.float32)
    update = torch.randn(500, generator=random)
    result = run(history, update, 0, True, [True] * 20, device)
    assert result.dtype == torch.float32
    assert relative_error(result, oracles.median(expected_rows(history, update, 0, True, [True] * 20, 1.0))) < 1e-6


def test_equals_the_ops_it_fuses(random, device):
    history = make_history(random, 9, 2, 70, dtype=torch.float32).to(device)
    update = torch.randn(70, generator=random).to(device)
    seen = torch.tensor([True] * 7 + [False] * 2, device=device)
    rows = estimate(*history.tensors())
    rows[4] = update
    for accepted in (True, False):
        keep = seen.clone()
        keep[4] = accepted
        assert torch.equal(run(history, update, 4, accepted, seen, device), median(rows, keep))
        trimmed = run(history, update, 4, accepted, seen, device, rule="trimmed_mean", trim=1)
        assert torch.equal(trimmed, trimmed_mean(rows, 1, keep))


def test_agrees_with_the_reference(random, device):
    history = make_history(random, 9, 2, 70)
    update, seen = torch.randn(70, generator=random, dtype=torch.float64), torch.tensor([True] * 9)
    for rule, trim in RULES:
        expected = reference.aggregate(
            history.model, update, 4, torch.tensor(True), *history.rest(), seen, 0.5, rule, trim
        )
        assert (
            relative_error(run(history, update, 4, True, seen, device, trust=0.5, rule=rule, trim=trim), expected)
            < 1e-10
        )


def test_what_takes_no_part_is_not_looked_at(random, device):
    """NaN and nonsense in unseen clients, in the arriving client's past and in a rejected update change nothing."""
    history = make_history(random, 8, 3, 60)
    update = torch.randn(60, generator=random, dtype=torch.float64)
    seen = torch.tensor([True, True, False, True, True, False, True, True])
    clean = run(history, update, 1, False, seen, device)
    for k in (1, 2, 5):
        history.last_updates[k], history.last_models[k] = torch.nan, torch.inf
        history.dw[k], history.dg[k] = torch.nan, torch.nan
    history.pairs[2], history.pairs[5] = 99, -7
    update[:] = torch.nan
    assert torch.equal(run(history, update, 1, False, seen, device), clean)


def test_whether_the_arriving_client_was_seen_does_not_matter(random, device):
    history = make_history(random, 5, 2, 30)
    update = torch.randn(30, generator=random, dtype=torch.float64)
    known = run(history, update, 3, True, [True] * 5, device)
    assert torch.equal(run(history, update, 3, True, [True, True, True, False, True], device), known)


def test_status_tells_what_became_of_each_correction(random, device):
    history = make_history(random, 6, 2, 40, pairs=[2, 2, 0, 2, 2, 2])
    history.last_updates[4] *= 1e3  # too long for the cap to matter
    history.last_updates[1] *= 1e-3
    history.dw[3] = 0
    seen = torch.tensor([True, True, True, True, True, False])
    moved = history.to(device)
    direction, status = torch.ops.secureafl.aggregate_status(
        moved.model, moved.model, 0, torch.tensor(True, device=device), *moved.rest(), seen.to(device)
    )
    assert torch.equal(direction, run(history, history.model, 0, True, seen, device))
    named = [ops.STATUS[code] for code in status.tolist()]
    assert named == ["absent", "capped", "no_pairs", "fallback", "corrected", "absent"]


@pytest.mark.parametrize(("rule", "trim"), RULES)
def test_nobody_takes_part(random, device, rule, trim):
    history = make_history(random, 6, 2, 30)
    result = run(history, history.model, 0, False, [False] * 6, device, rule=rule, trim=trim)
    assert torch.equal(result.cpu(), torch.zeros(30, dtype=torch.float64))


def test_one_client(random, device):
    history = make_history(random, 1, 2, 30)
    update = torch.randn(30, generator=random, dtype=torch.float64)
    for rule in ("median", "trimmed_mean", "mean"):
        assert torch.equal(run(history, update, 0, True, [False], device, rule=rule).cpu(), update)
        assert not run(history, update, 0, False, [True], device, rule=rule).any()


def test_too_few_rows_for_the_trim_give_zeros(random, device):
    history = make_history(random, 9, 2, 30)
    seen = [True] * 4 + [False] * 5
    result = run(history, history.model, 8, False, seen, device, rule="trimmed_mean", trim=2)
    assert not result.any()
    assert run(history, history.model, 8, True, seen, device, rule="trimmed_mean", trim=2).any()


def test_empty_dimensions(random, device):
    no_parameters = make_history(random, 3, 2, 0)
    assert run(no_parameters, no_parameters.model, 0, True, [True] * 3, device).shape == (0,)
    no_pairs = make_history(random, 3, 0, 10)
    result = run(no_pairs, no_pairs.model, 0, False, [True] * 3, device, rule="mean")
    torch.testing.assert_close(result.cpu(), no_pairs.last_updates[1:].mean(0))


def test_ten_thousand_clients(random, device):
    n = 10_000
    history = make_history(random, n, 2, 5)
    rows = expected_rows(history, history.model, 7, True, [True] * n, 1.0)
    for rule, trim in RULES:
        result = run(history, history.model, 7, True, [True] * n, device, rule=rule, trim=trim)
        assert relative_error(result, by_rule(rows, rule, trim)) < 1e-10


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 12),
    m=st.integers(0, 4),
    d=st.integers(5, 70),
    data=st.data(),
)
def test_any_federation(seed, n, m, d, data):
    random = torch.Generator().manual_seed(seed)
    history = make_history(random, n, m, d, pairs=data.draw(st.lists(st.integers(0, m), min_size=n, max_size=n)))
    seen = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    client, accepted = data.draw(st.integers(0, n - 1)), data.draw(st.booleans())
    update = torch.randn(d, generator=random, dtype=torch.float64)
    rows = expected_rows(history, update, client, accepted, seen, 1.0)
    result = run(history, update, client, accepted, seen, "cpu")
    torch.testing.assert_close(result, torch.from_numpy(oracles.median(rows)), rtol=1e-8, atol=1e-10)


def test_a_hundred_repeats_are_bit_equal(random, device):
    history = make_history(random, 30, 3, 4000, dtype=torch.float32)
    for rule, trim in RULES:
        first = run(history, history.model, 3, True, [True] * 30, device, rule=rule, trim=trim)
        repeats = (run(history, history.model, 3, True, [True] * 30, device, rule=rule, trim=trim) for _ in range(100))
        assert all(torch.equal(result, first) for result in repeats)


def test_arguments_are_left_as_they_were(random, device):
    history = make_history(random, 5, 2, 40, dtype=torch.float32).to(device)
    before = [tensor.clone() for tensor in history.tensors()]
    run(history, history.model, 0, True, [True] * 5, device)
    estimate(*history.tensors())
    assert all(torch.equal(old, new) for old, new in zip(before, history.tensors(), strict=True))
