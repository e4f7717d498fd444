"""Fused rounds that are enqueued, and rounds captured in CUDA graphs."""

import pytest
import torch
from fused_rounds import Arrivals, drive, make, pair
from states import identical

from secureafl_ext import SecureAFL

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@needs_gpu
def test_captured_in_a_cuda_graph():
    cpu, gpu = pair("cuda", 20, 3000)
    twin = make("cuda", 20, 3000)
    arrivals = Arrivals(20, 3000)
    drive((cpu, gpu, twin), arrivals, 40)
    client, update, version = arrivals.next(cpu)
    held = update.cuda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        receipt = gpu.submit(client, held, version)
    graph.replay()
    expected = twin.submit(client, held, version)
    assert torch.equal(receipt.accepted, expected.accepted)
    assert torch.equal(receipt.factor, expected.factor) or receipt.factor.isnan() == expected.factor.isnan()
    assert torch.equal(gpu.model, twin.model)


@pytest.mark.parametrize("memory", [3, 0])
@pytest.mark.parametrize("n", [20, 300])
def test_an_enqueued_round_is_a_submitted_one(device, n, memory):
    one, other = (make(device, n, 300, memory=memory) for _ in range(2))
    arrivals = Arrivals(n, 300)
    for _ in range(30):
        client, update, version = arrivals.next(one)
        update = update.to(device)
        trained_on = other.models[version % len(other.models)].clone()
        receipts = (
            one.submit(client, update, version),
            other.enqueue(torch.tensor([client], device=device), update, trained_on),
        )
        assert len({receipt.reason for receipt in receipts}) == 1
        assert receipts[1].staleness is None
    identical(one, other)


@needs_gpu
@pytest.mark.parametrize("memory", [3, 0])
@pytest.mark.parametrize("n", [20, 300])
def test_one_captured_round_serves_every_client(n, memory):
    d, rows = 3000, 6
    one, twin = (make("cuda", n, d, memory=memory) for _ in range(2))
    arrivals = Arrivals(n, d)
    client, update, trained_on = torch.zeros(1, dtype=torch.int64).cuda(), torch.zeros(d).cuda(), torch.zeros(d).cuda()
    one.submit(0, update, 0), twin.submit(0, update, 0)
    torch.cuda.synchronize()
    graphs = {}
    for _ in range(4 * rows):
        who, sent, version = arrivals.next(twin)
        client.fill_(who), update.copy_(sent), trained_on.copy_(twin.model_at(version))
        if one.phase() not in graphs:
            phase, graph = one.phase(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                receipt = one.enqueue(client, update, trained_on)
            graphs[phase] = graph, receipt
        else:
            phase, one.version = one.phase(), one.version + 1
        graphs[phase][0].replay()
        expected = twin.submit(who, update, version)
        assert graphs[phase][1].reason == expected.reason
    assert len(graphs) == rows
    identical(one, twin)


def test_a_composed_server_is_not_enqueued_to():
    server = SecureAFL(torch.zeros(8), 4, memory=0, quorum=0.5)
    with pytest.raises(ValueError, match=r"enqueue: not supported with quorum=0.5; use submit"):
        server.enqueue(torch.tensor([1]), torch.ones(8), torch.zeros(8))
    assert not server.capturable and server.version == 0
