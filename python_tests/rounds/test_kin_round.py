"""The kinship rule's round as one op against the composed one: same arrivals, same verdicts, averages and models."""

import pytest
import torch
from kin_rounds import (
    SETTINGS,
    VARIED,
    Arrivals,
    agree,
    composed,
    drive,
    left_out,
    make,
    oracle,
    resumed_crosswise,
    with_dtypes,
)
from states import identical

from secureafl_ext import SecureAFL
from secureafl_ext.engines.kinship import FusedKinship
from secureafl_ext.rules.kinship import KNOWN, SPAN

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(("settings", "dtype"), with_dtypes([*VARIED, {"pairs": "rounds"}]), ids=str)
def test_every_setting_over_hundreds_of_rounds(device, settings, dtype):
    plain, ours = oracle(16, 60, dtype, **settings), make(device, 16, 60, **settings)
    arrivals = Arrivals(16, 60)
    reasons = drive((plain, ours), arrivals, 200)
    agree(ours, plain)
    assert left_out(ours).any() and (ours.state_dict()["met"] > KNOWN).any()
    assert len({reason.split(",")[0] for reason in reasons}) >= (3 if settings.get("filter") is False else 4)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 50, 127, 1024])
def test_any_number_of_clients(device, n):
    plain, ours = oracle(n, 40), make(device, n, 40)
    drive((plain, ours), Arrivals(n, 40), 80)
    agree(ours, plain)


def test_first_updates_are_clipped_with_their_products(device):
    servers = oracle(6, 30, max_norm=0.5), make(device, 6, 30, max_norm=0.5)
    for client, update in enumerate(torch.randn(6, 30, generator=torch.Generator().manual_seed(3))):
        for server in servers:
            server.submit(client, update.to(server.model), server.version)
        agree(servers[1], servers[0])
    assert torch.allclose(servers[1].state_dict()["products"].diagonal().cpu(), torch.full((6,), 0.25, dtype=F64))


def test_averages_that_reach_back_no_further_than_said(device):
    plain, ours = oracle(3, 20), make(device, 3, 20)
    drive((plain, ours), Arrivals(3, 20, strange=False), 60 + 5 * SPAN)
    agree(ours, plain)
    assert (ours.state_dict()["met"] > SPAN).all()


def test_nobody_pulls_anywhere(device):
    """Mean updates of no length: what noise makes of their cosines must not count."""
    plain, ours = oracle(12, 400), make(device, 12, 400)
    drive((plain, ours), Arrivals(12, 400, strange=False, pull=0.0), 200)
    agree(ours, plain)
    assert not left_out(ours).any()


@pytest.mark.parametrize("n", [50, 130])
def test_everybody_talks(device, n):
    """Averages of all with all, several meetings each."""
    plain, ours = oracle(n, 24), make(device, n, 24)
    arrivals = Arrivals(n, 24, strange=False)
    base = torch.randn(n // 5, 24, generator=arrivals.random)
    for t in range(5 * n):
        client = t % n
        noise = 0.2 * torch.randn(24, generator=arrivals.random)
        update = noise + (base[0] if client < n // 3 else base[client % len(base)])
        receipts = [
            server.submit(client, update.to(server.model), max(0, server.version - 1)) for server in (plain, ours)
        ]
        assert receipts[0].reason == receipts[1].reason
    agree(ours, plain)
    assert left_out(ours).sum() > n // 6 and torch.equal(left_out(ours).cpu(), left_out(plain))


@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 127, 128, 129, 511, 512, 513, 1000, 4099, 20_012, 300_000])
def test_any_number_of_parameters(device, d):
    plain, ours = oracle(9, d), make(device, 9, d)
    drive((plain, ours), Arrivals(9, d), 70)
    agree(ours, plain)


def test_memory_that_is_not_aligned(device):
    """d allows vectors of four; where update and model begin does not, and must not change a bit."""
    one, other = make(device, 6, 64), make(device, 6, 64)
    arrivals = Arrivals(6, 64)
    for _ in range(40):
        client, update, version = arrivals.next(one)
        if one.version - version > 4:
            continue
        odd = torch.zeros(2, 65, device=device)
        odd[0, 1:], odd[1, 1:] = update.to(device), other.model_at(version)
        one.submit(client, update.to(device), version)
        other.enqueue(torch.tensor([client], device=device), odd[0, 1:], odd[1, 1:])
    identical(one, other)


def test_strided_updates_are_taken(device):
    one, other = make(device, 6, 30), make(device, 6, 30)
    arrivals = Arrivals(6, 30)
    for _ in range(20):
        client, update, version = arrivals.next(one)
        one.submit(client, update.to(device), version)
        other.submit(client, update.to(device)[:, None].expand(30, 3)[:, 1], version)
    identical(one, other)


def test_without_estimates_the_round_is_composed():
    server = SecureAFL(torch.zeros(5), 3, **SETTINGS, estimate=False)
    assert not isinstance(server._engine, FusedKinship)
    server.submit(0, torch.ones(5), 0)
    assert torch.allclose(server.model, torch.full((5,), -0.1))


@pytest.mark.parametrize("store", ["all", "accepted"])
def test_forgotten_clients_start_anew(device, store):
    settings = {"store": store, "on_reject": "step"}
    servers = oracle(16, 60, **settings), make(device, 16, 60, **settings)
    arrivals = Arrivals(16, 60)
    for client in (*arrivals.active[:3], arrivals.active[-1]):
        drive(servers, arrivals, 60)
        for server in servers:
            server.forget(client)
    agree(servers[1], servers[0])
    drive(servers, arrivals, 100)
    agree(servers[1], servers[0])


def test_saved_by_one_engine_resumed_by_the_other(device, tmp_path):
    resumed_crosswise(oracle(16, 60, F32), make(device, 16, 60), composed, tmp_path, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("n", "d"), [(50, 4096), (50, 4099), (1024, 256)])
def test_cpu_and_gpu_agree(n, d):
    cpu, gpu = make("cpu", n, d), make("cuda", n, d)
    drive((cpu, gpu), Arrivals(n, d), 150)
    agree(gpu, cpu)
