"""What a fused server makes of huge, tiny and non-finite updates, and which settings it refuses."""

import pytest
import torch
from fused_rounds import HISTORIES, Arrivals, make

from secureafl_ext import SecureAFL
from secureafl_ext.config import Config
from secureafl_ext.engines.fused import unsupported


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30, 1e37])
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_updates_of_any_magnitude(device, magnitude, history):
    server = make(device, 6, 40, max_norm=float("inf"), history_dtype=history, filter=False)
    arrivals = Arrivals(6, 40)
    for _ in range(60):
        client, update, version = arrivals.next(server)
        server.submit(client, (update.clamp(-3, 3) * magnitude).to(device), version)
    state = server.state_dict()
    assert state["pairs"].sum() > 6
    for name in ("models", "last_updates", "last_models", "dw", "dg", "scales", "weights"):
        assert state[name].isfinite().all(), name


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_non_finite_and_huge_updates_leave_everything_finite(device, history):
    settings = {"lr": 10.0, "max_norm": 1e38, "filter": False, "history_dtype": history}
    server = SecureAFL(torch.zeros(40, device=device), 6, **settings)
    for step in range(60):
        update = torch.full((40,), 3e38 * (-1) ** (step // 7), device=device)
        if step % 4 == 3:
            update[step % 40] = (torch.nan, torch.inf, -torch.inf)[step % 3]
        server.submit(step % 6, update, max(0, server.version - step % 4))
    state = server.state_dict()
    for name in ("models", "last_updates", "last_models", "dw", "dg", "scales", "weights"):
        assert state[name].isfinite().all(), name
    assert server.stats()["non_finite"] == 15


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pairs": "rounds"}, "pairs='rounds'"),
        ({"memory": 0}, "memory=0 (there are no pairs)"),
        ({"clients": 4097}, "clients=4097 (at most 4096)"),
        ({"rule": "krum"}, "rule='krum'"),
        ({"rule": "mean", "buckets": 2}, "rule='mean' with buckets=2"),
    ],
)
def test_float16_is_refused_where_no_round_has_it(device, settings, named):
    arguments = {"clients": 6, "history_dtype": torch.float16, **settings}
    with pytest.raises(ValueError) as refusal:
        SecureAFL(torch.zeros(12, device=device), **arguments)
    assert str(refusal.value) == f"SecureAFL: history_dtype=float16 does not support {named}"


@pytest.mark.parametrize(
    ("clients", "memory", "named"),
    [
        (4097, 3, "clients=4097 (at most 4096)"),
        (4097, 0, "clients=4097 (at most 4096)"),
        (1025, 5, "clients=1025 (at most 1024 with memory=5 on cuda)"),
        (1025, 1, "clients=1025 (at most 1024 with memory=1 on cuda)"),
        (513, 6, "clients=513 (at most 512 with memory=6 on cuda)"),
        (513, 16, "clients=513 (at most 512 with memory=16 on cuda)"),
    ],
)
def test_more_than_a_gpus_round_holds_is_known_without_one(clients, memory, named):
    assert unsupported(Config(memory=memory), clients, torch.device("cuda")) == named
