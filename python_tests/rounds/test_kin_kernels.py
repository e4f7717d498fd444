"""The GPU's kernels of the kinship rule's round on an emulated GPU: the same rounds as the op on a CPU."""

import pytest
import torch
from emulated import emulate
from kin_rounds import Arrivals, Emulated, agree, drive, left_out, make
from states import identical

from secureafl_ext.engines import kinship


@pytest.mark.parametrize(("n", "d"), [(5, 33), (16, 64), (40, 300)])
def test_the_kernels_source_agrees_with_the_cpu(monkeypatch, n, d):
    plain, ours = make("cpu", n, d), emulate(monkeypatch, make("cpu", n, d), Emulated(1), kinship)
    drive((plain, ours), Arrivals(n, d), 100)
    agree(ours, plain)


def alike_and_colluding(servers, n, d, rounds):
    """All take turns; two thirds are alike, the others too: kin that only show without the centre."""
    random = torch.Generator().manual_seed(4)
    honest, other = torch.randn(2, d, generator=random)
    for t in range(rounds):
        client = t * 5 % n
        update = (honest if client % 3 else other) + 0.3 * torch.randn(d, generator=random)
        reasons = {server.submit(client, update, server.version).reason for server in servers}
        assert len(reasons) == 1


def test_no_thread_of_the_kernels_runs_ahead(monkeypatch):
    """Warps in any order give the same bits: no barrier is missing."""
    n, d = 36, 24
    plain, one, other = (make("cpu", n, d, filter=False) for _ in range(3))
    emulate(monkeypatch, one, Emulated(1), kinship), emulate(monkeypatch, other, Emulated(2), kinship)
    alike_and_colluding((plain, one, other), n, d, 6 * n)
    identical(one, other)
    agree(one, plain)
    assert left_out(one).tolist() == [k % 3 == 0 for k in range(n)]
