import numpy as np
import pytest
import torch

from secureafl_ext import lipschitz, reference
from secureafl_ext.sim.runner import cpu_threads


def four(random, d, dtype=torch.float32):
    return torch.randn(4, d, generator=random, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 255, 257, 1024, 4096, 4097, 100_003, 1_200_001])
def test_factor_is_the_ratio_of_the_norms(random, device, d, dtype):
    vectors = four(random, d, dtype)
    vectors[1] *= 3
    wide = vectors.double().numpy()
    expected = np.linalg.norm(wide[0] - wide[1]) / np.linalg.norm(wide[2] - wide[3])
    result = lipschitz(*vectors.to(device))
    assert result.dtype == torch.float64 and result.shape == ()
    assert result.item() == pytest.approx(expected, rel=1e-12)
    assert reference.lipschitz(*vectors).item() == pytest.approx(expected, rel=1e-12)


def test_known_triangle(device):
    update, last_update = torch.tensor([3.0, 0.0], device=device), torch.tensor([0.0, 4.0], device=device)
    model, last_model = torch.tensor([1.0, 1.0], device=device), torch.tensor([1.0, -1.0], device=device)
    assert lipschitz(update, last_update, model, last_model).item() == 2.5


def test_no_movement(random, device):
    a, b, c, _ = four(random, 300).to(device)
    assert lipschitz(a, a, b, b).item() == 0
    assert lipschitz(a, a, b, c).item() == 0
    assert lipschitz(a, c, b, b).item() == float("inf")
    nothing = torch.empty(0, device=device)
    assert lipschitz(nothing, nothing, nothing, nothing).item() == 0


def test_small_and_large_differences_survive_in_float32(device):
    tiny, huge = torch.full((10,), 1e-44, device=device), torch.full((10,), 3e38, device=device)
    zero = torch.zeros(10, device=device)
    assert lipschitz(tiny, zero, tiny, zero).item() == 1
    assert lipschitz(huge, -huge, huge, zero).item() == 2


def test_non_finite_updates_give_no_finite_factor(random, device):
    a, b, c, e = four(random, 300).to(device)
    for bad in (torch.nan, torch.inf):
        a[7] = bad
        assert not lipschitz(a, b, c, e).isfinite()
        assert not lipschitz(a, b, c, c).isfinite()


def test_views_repeats_and_threads_do_not_change_a_bit(random, device):
    vectors = four(random, 50_000).to(device)
    first = lipschitz(*vectors)
    assert torch.equal(lipschitz(*vectors.T.contiguous().T), first)
    assert all(torch.equal(lipschitz(*vectors), first) for _ in range(100))
    for count in (1, 2, 3):
        with cpu_threads(count):
            assert torch.equal(lipschitz(*vectors), first)
