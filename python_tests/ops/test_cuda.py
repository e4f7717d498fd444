"""What only a GPU can show."""

import pytest
import torch
from oracles import make_history, relative_error

from secureafl_ext import aggregate, estimate, lipschitz, median, trimmed_mean

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cpu_and_gpu_agree(random, dtype):
    history = make_history(random, 40, 5, 3000, pairs=[k % 6 for k in range(40)], dtype=dtype)
    gpu, mask = history.to("cuda"), torch.tensor([True, False, True, True] * 10)
    bound = 1e-12 if dtype == torch.float64 else 1e-7
    assert torch.equal(median(gpu.last_updates, mask.cuda()).cpu(), median(history.last_updates, mask))
    assert relative_error(trimmed_mean(gpu.last_updates, 7), trimmed_mean(history.last_updates, 7)) < bound
    four = history.last_updates[:4]
    assert relative_error(lipschitz(*four.cuda()), lipschitz(*four)) < 1e-12
    assert relative_error(estimate(*gpu.tensors()), estimate(*history.tensors())) < bound
    for rule in ("median", "trimmed_mean", "mean"):
        host, device = (
            aggregate(h.model, h.model, 1, torch.tensor(True).to(h.model.device), *h.rest(), m, rule=rule, trim=3)
            for h, m in ((history, mask), (gpu, mask.cuda()))
        )
        assert relative_error(device, host) < bound


def test_aggregate_never_stores_the_estimates(random):
    n, d = 100, 100_000
    history = make_history(random, n, 2, d, dtype=torch.float32).to("cuda")
    accepted, seen = torch.tensor(True, device="cuda"), torch.ones(n, dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    aggregate(history.model, history.model, 0, accepted, *history.rest(), seen)
    assert torch.cuda.max_memory_allocated() - before < n * d * 4 / 10


def test_bad_pair_counts_read_as_none(random):
    history = make_history(random, 4, 2, 50)
    history.pairs[:] = torch.tensor([3, -1, 2**40, 2])
    result = estimate(*history.to("cuda").tensors()).cpu()
    assert torch.equal(result[:3], history.last_updates[:3])
    assert not torch.equal(result[3], history.last_updates[3])


def test_follows_the_current_stream(random):
    updates = torch.randn(64, 50_000, generator=random).cuda()
    expected = median(-updates)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # anything on another stream would run ahead of the negation
        result = median(updates.neg_())
    stream.synchronize()
    assert torch.equal(result, expected)


def test_offsets_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 75 << 30:
        pytest.skip("needs an NVIDIA GPU with 75 GiB of free memory")
    d = 2**31 + 77
    updates = torch.empty(3, d, dtype=torch.bfloat16, device="cuda")  # 3 d > 2^32 elements
    updates[0], updates[1], updates[2] = 1, 2, 4
    updates[:, -1] = torch.tensor([-8.0, -2.0, 1.0])
    updates[2, 2**31 + 5] = 1.5
    result = median(updates)
    assert (result[: 2**31] == 2).all() and result[-1] == -2 and result[2**31 + 5] == 1.5
    assert (result[2**31 + 6 : -1] == 2).all()
    del updates, result

    zeros, last = torch.zeros(2, d, device="cuda")
    last[-1] = 3
    assert lipschitz(zeros, last, last, zeros).item() == 1
    rows = torch.stack([last, 2 * last])
    pairs = torch.empty(2, 0, d, device="cuda"), torch.empty(2, 0, d, device="cuda"), torch.zeros(2, dtype=int).cuda()
    yes = torch.tensor([True, True], device="cuda")
    assert estimate(zeros, rows, rows, *pairs)[:, -1].tolist() == [3, 6]
    assert aggregate(zeros, last, 0, yes[0], rows, rows, *pairs, yes)[-1] == 4.5


def test_more_rows_than_shared_memory_holds_are_refused():
    with pytest.raises(RuntimeError, match="a column of 100000 rows does not fit this GPU's shared memory"):
        median(torch.ones(100_000, 2, device="cuda"))
