import numpy as np
import oracles
import pytest
import torch
from oracles import make_history, relative_error

from secureafl_ext import estimate, reference
from secureafl_ext.sim.runner import cpu_threads

INF = float("inf")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-7}  # float32: the result's own rounding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16])
def test_agrees_with_the_dense_bfgs_recursion(random, device, m, dtype):
    history = make_history(random, 4, m, 40, dtype=dtype)
    for trust in (INF, 1.0, 0.1):
        result = estimate(*history.to(device).tensors(), trust)
        assert relative_error(result, oracles.estimates(history, trust)) < TOLERANCE[dtype]


@pytest.mark.parametrize("d", [1, 2, 7, 8, 9, 127, 128, 129, 255, 256, 257, 1500])
def test_any_length(random, device, d):
    history = make_history(random, 3, 2, d, pairs=[2, 1, 0] if d > 1 else [1, 1, 0])
    result = estimate(*history.to(device).tensors(), INF)
    assert relative_error(result, oracles.estimates(history, INF)) < 1e-9


@pytest.mark.parametrize("d", [2047, 2048, 2049, 600_001])  # around a chunk of the GPU's sums, and longer ones
def test_long_vectors_agree_with_the_reference(random, device, d):
    history = make_history(random, 2, 2, d, pairs=[2, 1])
    expected = reference.estimate(*history.tensors(), INF)
    assert relative_error(estimate(*history.to(device).tensors(), INF), expected) < 1e-11


def test_each_client_uses_its_own_number_of_pairs(random, device):
    history = make_history(random, 7, 4, 30, pairs=[0, 1, 2, 3, 4, 0, 2])  # unused slots hold NaN
    result = estimate(*history.to(device).tensors(), INF)
    assert relative_error(result, oracles.estimates(history, INF)) < 1e-10
    assert torch.equal(result[0].cpu(), history.last_updates[0])


@pytest.mark.parametrize("m", [1, 3, 6])
def test_secant_equation_of_the_newest_pair(random, device, m):
    history = make_history(random, 5, m, 50)
    for k in range(5):
        moved = history.but(model=history.last_models[k] + history.dw[k, -1])
        result = estimate(*moved.to(device).tensors(), INF)[k]
        assert relative_error(result, history.last_updates[k] + history.dg[k, -1]) < 1e-12


def test_proportional_pairs_give_proportional_corrections(random, device):
    history = make_history(random, 4, 3, 60)
    history = history.but(dg=2.5 * history.dw)
    result = estimate(*history.to(device).tensors(), INF)
    expected = history.last_updates + 2.5 * (history.model - history.last_models)
    assert relative_error(result, expected) < 1e-12


def test_exact_on_a_quadratic_with_conjugate_steps(random, device):
    """d steps along H's eigenvectors teach B all of H: the estimate is the gradient itself."""
    d = 6
    half = torch.randn(d, d, generator=random, dtype=torch.float64)
    hessian = half @ half.T + torch.eye(d, dtype=torch.float64)
    directions = torch.linalg.eigh(hessian).eigenvectors.T.contiguous()
    history = make_history(random, 1, d, d)
    history = history.but(
        dw=directions[None], dg=(directions @ hessian)[None], last_updates=(history.last_models @ hessian)
    )
    result = estimate(*history.to(device).tensors(), INF)
    assert relative_error(result[0], hessian @ history.model) < 1e-12


def test_pairs_of_very_different_length(random, device):
    """Early training takes long steps, late training short ones: the solve must not lose either."""
    history = make_history(random, 3, 3, 40)
    scale = torch.tensor([1e4, 1.0, 1e-6], dtype=torch.float64)[:, None]
    history = history.but(dw=history.dw * scale, dg=history.dg * scale)
    result = estimate(*history.to(device).tensors(), INF)
    assert relative_error(result, oracles.estimates(history, INF)) < 1e-10


def test_a_zero_on_the_diagonal_is_no_reason_to_give_up(random, device):
    """An older pair without curvature leaves M invertible; only pivoting finds the solution."""
    history = make_history(random, 1, 2, 12)
    history.dw[0, 0], history.dg[0, 0] = 0, 0
    history.dw[0, 0, 0], history.dg[0, 0, 1] = 1, 1
    expected = reference.estimate(*history.tensors(), INF)
    assert relative_error(expected, history.last_updates) > 0.1
    assert relative_error(estimate(*history.to(device).tensors(), INF), expected) < 1e-10


@pytest.mark.parametrize("trust", [0.0, 1e-3, 0.3, 1.0])
def test_trust_caps_the_length_and_keeps_the_direction(random, device, trust):
    history = make_history(random, 5, 3, 80)
    history = history.but(last_updates=0.1 * history.last_updates)  # short updates: every correction is too long
    free = (estimate(*history.to(device).tensors(), INF).cpu() - history.last_updates).squeeze()
    capped = (estimate(*history.to(device).tensors(), trust).cpu() - history.last_updates).squeeze()
    lengths = trust * history.last_updates.norm(dim=1)
    assert (free.norm(dim=1) > lengths).all()
    torch.testing.assert_close(capped, free * (lengths / free.norm(dim=1))[:, None], rtol=1e-9, atol=1e-12)


def test_short_corrections_are_not_capped(random, device):
    history = make_history(random, 5, 3, 80)
    history = history.but(model=history.last_models[0] + 1e-3 * history.model)
    free, capped = (estimate(*history.to(device).tensors(), trust)[0] for trust in (INF, 1.0))
    assert torch.equal(free, capped)


def test_default_trust_is_one(random, device):
    tensors = make_history(random, 3, 2, 30).to(device).tensors()
    assert torch.equal(estimate(*tensors), estimate(*tensors, 1.0))
    assert not torch.equal(estimate(*tensors), estimate(*tensors, INF))


def zero_newest_step(h):
    h.dw[0, 2] = 0


def zero_older_pair(h):
    h.dw[0, 0], h.dg[0, 0] = 0, 0


def orthogonal_newest_pair(h):
    h.dw[0, 2], h.dg[0, 2] = 0, 0
    h.dw[0, 2, 0], h.dg[0, 2, 1] = 1, 1


def nan_in_a_pair(h):
    h.dg[0, 1, 5] = torch.nan


def inf_in_a_step(h):
    h.dw[0, 0, 5] = torch.inf


def nan_in_the_old_model(h):
    h.last_models[0, 3] = torch.nan


def overflow_in_the_products(h):
    h.dw[0] *= 1e200


def inf_in_the_update(h):
    h.last_updates[0, 2] = torch.inf


@pytest.mark.parametrize(
    "spoil",
    [
        zero_newest_step,
        zero_older_pair,
        orthogonal_newest_pair,
        nan_in_a_pair,
        inf_in_a_step,
        nan_in_the_old_model,
        overflow_in_the_products,
        inf_in_the_update,
    ],
    ids=lambda spoil: spoil.__name__,
)
@pytest.mark.parametrize("trust", [1.0, INF])
def test_no_solution_falls_back_to_the_last_update(random, device, spoil, trust):
    history = make_history(random, 2, 3, 20)
    spoil(history)
    result = estimate(*history.to(device).tensors(), trust).cpu()
    assert torch.equal(result[0], history.last_updates[0])
    healthy = oracles.estimates(make_history(torch.Generator().manual_seed(20260404), 2, 3, 20), trust)
    assert relative_error(result[1], healthy[1]) < 1e-10


def test_a_non_finite_model_falls_back_everywhere(random, device):
    history = make_history(random, 3, 2, 20)
    history.model[4] = torch.inf
    assert torch.equal(estimate(*history.to(device).tensors()).cpu(), history.last_updates)


def test_no_pairs_no_slots_no_clients_no_parameters(random, device):
    for n, m, d in [(3, 0, 10), (0, 2, 10), (3, 2, 0), (1, 1, 1)]:
        history = make_history(random, n, m, d, pairs=[0] * n)
        result = estimate(*history.to(device).tensors())
        assert torch.equal(result.cpu(), history.last_updates)


def test_no_parameters_with_pairs(random, device):
    history = make_history(random, 3, 2, 0)
    assert estimate(*history.to(device).tensors()).shape == (3, 0)


def test_float32_is_no_worse_than_plain_torch(random, device):
    for m in (1, 3, 8):
        history = make_history(random, 5, m, 3000, dtype=torch.float32)
        exact = reference.estimate(*history.to(torch.float64).tensors(), INF)
        plain = relative_error(reference.estimate(*history.tensors(), INF), exact)
        assert relative_error(estimate(*history.to(device).tensors(), INF), exact) <= 2 * plain + 1e-6


def test_views_give_what_their_copies_give(random, device):
    history = make_history(random, 6, 3, 50, dtype=torch.float32).to(device)
    spread = history.but(
        model=torch.stack([history.model] * 2, dim=1)[:, 0],
        last_updates=history.last_updates.T.contiguous().T,
        last_models=torch.cat([history.last_models] * 2, dim=1)[:, 50:],
        dw=history.dw.transpose(0, 1).contiguous().transpose(0, 1),
        dg=history.dg.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        pairs=torch.stack([history.pairs] * 2, dim=1)[:, 1],
    )
    assert not any(tensor.is_contiguous() for tensor in spread.tensors()[:-1] if tensor is not spread.last_models)
    assert torch.equal(estimate(*spread.tensors()), estimate(*history.tensors()))


def test_a_hundred_repeats_and_any_thread_count_are_bit_equal(random, device):
    tensors = make_history(random, 10, 3, 5000, dtype=torch.float32).to(device).tensors()
    first = estimate(*tensors)
    assert all(torch.equal(estimate(*tensors), first) for _ in range(100))
    for count in (1, 2, 3):
        with cpu_threads(count):
            assert torch.equal(estimate(*tensors), first)


def test_reference_agrees_with_the_dense_recursion(random):
    history = make_history(random, 4, 3, 30, pairs=[3, 2, 1, 0])
    for trust in (INF, 0.5):
        assert relative_error(reference.estimate(*history.tensors(), trust), oracles.estimates(history, trust)) < 1e-10


def test_dense_recursion_obeys_the_secant_equation(random):
    history = make_history(random, 1, 4, 12)
    dw, dg = history.dw[0].numpy(), history.dg[0].numpy()
    np.testing.assert_allclose(oracles.dense_bfgs(dw, dg) @ dw[-1], dg[-1], rtol=1e-10)
