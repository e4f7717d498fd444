"""step="received": the memory gives every client its weight, and the model moves along the update that arrives."""

import pytest
import torch
from kin_rounds import Arrivals

from secureafl_ext import SecureAFL
from secureafl_ext.rules.support import MOST

RULES = ["kinship", "support"]
N, D = 12, 40


def make(rule, device="cpu", size=D, **settings):
    settings = {"rule": rule, "memory": 0, "lr": 0.1, "filter": False, "step": "received", **settings}
    return SecureAFL(torch.zeros(size, device=device), N, **settings)


def moved(server, client, update):
    before = server.model.clone()
    server.submit(client, update.to(before), server.version)
    return before - server.model


def unit(seed, size=D):
    update = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return update / update.norm()


@pytest.mark.parametrize("rule", RULES)
def test_without_a_reason_for_other_weights_it_is_plain_sgd(rule, device):
    """All as long, all different: each step is the update times the learning rate, whatever is remembered.
    In many dimensions: in few, random updates are similar or opposed by chance."""
    size = 100_000
    server = make(rule, device, size, expiry=None, probation=0)
    for i in range(3 * N):
        update = unit(i, size)
        assert torch.allclose(moved(server, i % N, update).cpu(), 0.1 * update, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_at_most_twice_as_long_as_the_usual_update(rule, device):
    server, arrivals = make(rule, device), Arrivals(N, D, pull=3.0)
    lengths = []
    for _ in range(300):
        client, update, version = arrivals.next(server)
        before = server.model.clone()
        server.submit(client, update.to(before), version)
        norms = server.state_dict()["products"].diagonal().sqrt()[server.present]
        usual = float(norms.quantile(0.5, interpolation="higher")) if len(norms) else 0.0
        lengths.append(float((before - server.model).norm()))
        assert lengths[-1] <= 0.1 * MOST * usual * (1 + 1e-5)
    assert max(lengths) > 0.1


@pytest.mark.parametrize("rule", RULES)
def test_a_client_without_weight_moves_nothing(rule, device):
    """Eight honest clients, all different, and four that send the same: these lose their weight, or most of it."""
    server = make(rule, device, probation=0)
    share = []
    for i in range(60 * N):
        client = i % N
        update = 3 * unit(99) + 0.2 * unit(i) if client >= 8 else unit(client) + 0.3 * unit(i)
        step = moved(server, client, update)
        if client >= 8 and i > 50 * N:
            share.append(float(step.norm()) / 0.1)
    weights = server.weights()[8:].cpu()
    most = {"kinship": 0.0, "support": 0.8}[rule]  # support leaves a group some weight
    assert weights.max() < 0.5 / N and max(share) <= most


@pytest.mark.parametrize("rule", RULES)
def test_a_newcomer_on_probation_moves_nothing(rule, device):
    server = make(rule, device, expiry=8, probation=3)
    for i in range(5 * (N - 1)):
        moved(server, i % (N - 1), unit(i))
    for i in range(2):
        assert not moved(server, N - 1, unit(1_000 + i)).any() and not server.present[N - 1]
    third = moved(server, N - 1, unit(1_002))
    assert server.present[N - 1] and (third.any() or rule == "kinship")  # kinship wants three comparisons first


@pytest.mark.parametrize("rule", RULES)
def test_who_uploads_without_a_pause_hardly_moves_more(rule, device):
    """Its steps within an epoch add up to about two. With expiry=None every one is full."""
    pulled = {}
    for expiry in (8, None):
        server = make(rule, device, expiry=expiry, probation=0)
        for i in range(2 * N):
            moved(server, i % N, unit(i))
        start = server.model.clone()
        for _ in range(30):
            moved(server, 0, unit(0))
        pulled[expiry] = float((start - server.model).norm())
    assert pulled[8] < 0.1 * 3.5 and pulled[None] > 0.1 * 20


@pytest.mark.parametrize(
    "settings",
    [{"rule": "median", "memory": 3}, {"rule": "krum"}, {"receive": False}, {"estimate": False}],
    ids=str,
)
def test_it_needs_weights_and_the_update(settings):
    with pytest.raises(ValueError, match=r"SecureAFL: step must be 'all' unless rule is kinship or support"):
        make(**{"rule": "support", **settings})


def test_an_unknown_step_is_refused():
    with pytest.raises(ValueError, match="SecureAFL: step must be one of all, received, got 'some'"):
        make("support", step="some")
