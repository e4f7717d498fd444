"""A server with a row-wise rule: enqueued to, without waiting, saved and resumed, told to forget."""

import pytest
import torch
from row_rounds import ROBUST, SIZE, World, arrivals, make
from slow_rows import TWINS
from states import enqueued_like_submitted, identical, never_waits

from secureafl_ext import SecureAFL

F64 = torch.float64


@pytest.mark.parametrize("settings", [{}, {"memory": 2, "buckets": 2}, {"estimate": False}], ids=str)
@pytest.mark.parametrize("rule", TWINS)
def test_enqueued_rounds_are_submitted_ones(rule, settings, device):
    settings = {"buckets": 2, **settings} if rule == "mean" else settings
    one, twin = make(device, rule=rule, **settings), make(device, rule=rule, **settings)
    enqueued_like_submitted(one, twin, arrivals(twin, 24, World()))


def test_a_float32_model_with_a_float64_history_is_enqueued_to():
    server, update = SecureAFL(torch.zeros(3), 2, rule="krum", history_dtype=F64, lr=0.5), torch.ones(3)
    server.enqueue(torch.tensor([1]), update.requires_grad_(), torch.zeros(3))
    assert torch.equal(server.model, torch.full((3,), -0.5)) and not server.model.requires_grad


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"rule": "median"}, "history_dtype=float64"), ({"rule": "krum", "spacing": 1}, "spacing=1")],
)
def test_enqueue_names_the_setting_that_it_does_not_support(settings, named):
    server = make(**settings)
    with pytest.raises(ValueError, match=f"SecureAFL.enqueue: not supported with {named}; use submit"):
        server.enqueue(torch.tensor([0]), torch.ones(SIZE), torch.zeros(SIZE))
    assert not server.capturable


@pytest.mark.parametrize("settings", [{}, {"memory": 2, "buckets": 2}], ids=str)
@pytest.mark.parametrize("rule", TWINS)
def test_a_round_never_waits_for_the_device(rule, settings):
    server = make(rule=rule, **{"buckets": 2, **settings} if rule == "mean" else settings)
    never_waits(server, server._engine, server._engine.history, server._engine.rows)


@pytest.mark.parametrize("settings", [{}, {"memory": 2}, {"buckets": 2}], ids=str)
@pytest.mark.parametrize("rule", ROBUST)
def test_saved_and_resumed_is_bit_identical(rule, settings, device, tmp_path):
    server = make(device, rule=rule, radius=0.9, remove=0.3, iterations=3, **settings)
    for arrival in arrivals(server, 23, world := World()):
        server.submit(*arrival)
    server.save(tmp_path / "server")
    resumed = SecureAFL.load(tmp_path / "server", device=device)
    assert resumed.config == server.config
    for arrival in arrivals(server, 23, world):
        assert server.submit(*arrival).reason == resumed.submit(*arrival).reason
    identical(resumed, server)


def test_a_state_without_inner_products_is_refused():
    server = make(rule="krum")
    with pytest.raises(ValueError, match="state must have centre, products, rounds, got none"):
        server.load_state_dict(make(rule="median").state_dict())


@pytest.mark.parametrize("rule", ["centered_clip", "spectral", "krum", "geometric_median"])
def test_a_forgotten_client_leaves_no_trace_in_the_products(rule):
    """Against a server whose state never had its row."""
    random = torch.Generator().manual_seed(1)
    ours, clean = (SecureAFL(torch.zeros(9), 5, rule=rule, memory=0, max_staleness=40) for _ in range(2))
    for k in range(20):
        ours.submit(k % 5, torch.randn(9, generator=random), ours.version)
    ours.forget(2)
    state = ours.state_dict()
    for name in ("last_updates", "last_models"):
        state[name][2] = 0
    state["products"][2], state["products"][:, 2] = 0, 0
    clean.load_state_dict(state)
    for k in (0, 1, 3, 2, 4, 2):
        update = torch.randn(9, generator=random)
        for server in (ours, clean):
            server.submit(k, update, server.version)
        assert torch.equal(ours.model, clean.model)
