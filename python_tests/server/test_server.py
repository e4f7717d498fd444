"""The stateful contract of SecureAFL, against a slow server in NumPy."""

import threading
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from oracles import relative_error
from server_rounds import CLIENTS, SETTINGS, SIZE, World, drive, make

from secureafl_ext import SecureAFL


@cache
def driven(name, device):
    """(server, the slow one, flags) after 80 rounds: a rounding error grows some tenfold in 20."""
    server = make(device, **SETTINGS[name])
    return server, *drive(server, 80)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_follows_the_slow_server(name, device):
    server, slow, flags = driven(name, device)
    assert all(ours == theirs for ours, theirs in flags)
    assert len({theirs for _, theirs in flags}) == 2 or name == "Variant III"  # both verdicts occur
    assert relative_error(server.model, slow.model) < 1e-9
    assert server.version == 80
    stats = server.stats()
    assert stats["accepted"] == sum(theirs for _, theirs in flags) and stats["accepted"] + stats["rejected"] == 80


def test_settings_matter():
    finals = [driven(name, "cpu")[1].models[60] for name in SETTINGS]
    assert all(not np.allclose(a, b) for i, a in enumerate(finals) for b in finals[i + 1 :])


def test_a_server_and_a_receipt_say_in_words_what_they_are(device):
    server = SecureAFL(torch.zeros(5, device=device), 3)
    receipt = server.submit(0, torch.ones(5, device=device), 0)
    assert repr(receipt) == "Receipt(kind='accepted', reason='accepted: first contact', staleness=0, version=1)"
    assert repr(server) == "SecureAFL(rule='median', 3 clients, 5 parameters, version 1)"


def test_first_contact_is_clipped_and_accepted_without_a_factor(device):
    server = make(device, max_norm=2.0, estimate=False, lr=1.0)
    update = torch.full((SIZE,), 10.0, dtype=torch.float64, device=device)
    receipt = server.submit(3, update, 0)
    assert receipt.accepted and receipt.factor.isnan() and receipt.reason == "accepted: first contact"
    assert server.model.norm().item() == pytest.approx(2)
    assert server.state_dict()["last_updates"][3].norm().item() == pytest.approx(2)


def test_same_version_again_is_accepted_only_with_the_same_update(device):
    server = make(device)
    update = torch.ones(SIZE, dtype=torch.float64, device=device)
    server.submit(1, update, 0)
    again = server.submit(1, update, 0)
    assert again.accepted and again.factor.isnan()
    other = server.submit(1, 2 * update, 0)
    assert not other.accepted
    assert other.reason == "rejected: same model version as last time, another update"


def test_a_steep_update_is_rejected_with_its_reason(device):
    server = make(device, quantile=0.5)
    drive(server, 60)
    for scale in (1.0, 1e6):
        model, version = server.checkout()
        receipt = server.submit(2, scale * (model + 1), version)
    assert not receipt.accepted and receipt.reason == "rejected: factor above the quantile of all factors"
    assert receipt.factor > 1e3 and receipt.staleness == 0 and receipt.version == server.version == 62


@pytest.mark.parametrize("name", ["default", "paper", "no pairs", "as printed", "Variant I", "store all"])
def test_a_forgotten_client_is_a_new_one(name, device):
    server = make(device, **SETTINGS[name])
    world = World()
    slow, _ = drive(server, 60, world=world)
    server.forget(3)
    del slow.last[3]
    slow.buffer[3] = []
    slow.lists.pop(3, None)
    slow.clock.forget(3)
    assert server.seen.tolist() == [True, True, True, False, True, True]
    _, flags = drive(server, 60, world=world, slow=slow)
    assert all(ours == theirs for ours, theirs in flags) and server.seen.all()
    assert relative_error(server.model, slow.model) < 1e-9


def test_sixteen_threads_lose_no_round(device):
    received_alone = {"estimate": False, "filter": False, "expiry": None, "probation": 0}
    server = make(device, lr=1.0, max_norm=1e9, max_staleness=400, **received_alone)
    start = threading.Barrier(16)
    receipts = [[] for _ in range(16)]

    def work(i):
        start.wait()
        for j in range(20):
            update = torch.zeros(SIZE, dtype=torch.float64, device=device)
            update[j % SIZE] = 1.0 + i
            receipts[i].append(server.submit(i % CLIENTS, update, server.version))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.version == 320 and server.stats()["accepted"] == 320
    assert sorted(receipt.version for own in receipts for receipt in own) == list(range(1, 321))
    assert all(a.version < b.version for own in receipts for a, b in pairwise(own))
    assert -server.model.sum().item() == 20 * sum(1 + i for i in range(16))  # every update, once


def test_checkout_is_a_copy_and_model_the_newest(device):
    server = make(device)
    drive(server, 10)
    model, version = server.checkout()
    assert version == 10 and torch.equal(model, server.model)
    model.zero_()
    assert server.model.any()


def test_a_float32_model_may_have_a_float64_history():
    server = SecureAFL(torch.zeros(SIZE), CLIENTS, history_dtype=torch.float64)
    server.submit(0, torch.ones(SIZE), 0)
    assert server.model.dtype == torch.float32 and server.state_dict()["dw"].dtype == torch.float64


def test_memory_at_the_papers_size():
    """n = 50, d = 139,960, float32: at most 0.30 GB (the paper reports 0.456)."""
    server = SecureAFL(torch.zeros(139_960), 50)
    held = sum(value.nbytes for value in server.state_dict().values() if isinstance(value, torch.Tensor))
    assert held <= 0.30e9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_round_is_captured_in_a_cuda_graph_and_waits_for_nothing():
    server, twin = make("cuda"), make("cuda")
    for one in (server, twin):
        drive(one, 30)
    update = torch.ones(SIZE, dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        receipt = server.submit(2, update, 28)
    graph.replay()
    expected = twin.submit(2, update, 28)
    assert torch.equal(receipt.accepted, expected.accepted) and torch.equal(receipt.factor, expected.factor)
    assert torch.equal(server.model, twin.model)
