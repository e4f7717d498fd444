"""forget() erases: no number that the server kept of the client alone is in its state any more."""

import pytest
import torch
from engines import ENGINES, D, make, run
from splits import SETTINGS, history_of_arrivals, replay, start

from secureafl_ext.engines.ranks import SLICED

GONE = 2
SHARED = {"models", "last_models", "counts", "rounds", "version", "stale", "too_soon", "centre", "turns", "clock"}
PAIRED = ("products", "kinship", "similarity")
POOLED = {"factors", "recorded"}  # shared too, where Q is pooled


def numbers(state, names):
    """Every value but 0 and 1 of these tensors, without its sign and power of two: float16 pairs are scaled by one."""
    values = torch.cat([torch.as_tensor(state[name]).cpu().double().flatten() for name in names])
    return set(values[(values != 0) & (values != 1)].frexp().mantissa.abs().tolist())


def shared_in(server):
    return SHARED | POOLED if server.config.factors == "pooled" else SHARED


def of_client(state, client, shared):
    """What only this client's uploads have made: its rows, and its columns of what clients have in pairs."""
    rows = {name: value[client] for name, value in state.items() if name not in {*shared, "basis", "trials"}}
    return rows | ({"last_models": state["last_models"][client]} if "last_models" in state else {})


@pytest.mark.parametrize("engine", ENGINES)
def test_no_number_of_a_forgotten_client_is_left(engine, device):
    server, blank = make(engine, device), make(engine, device)
    run(server, 60)
    before = server.state_dict()
    shared = shared_in(server)
    kept = of_client(before, GONE, shared)
    rows = ("last_updates", "mean_updates", "dw", "dg", "gram", "along", "products")
    told = numbers(kept, [name for name in rows if name in kept])
    others = [k for k in range(server.clients) if k != GONE]
    two_bytes = {name: before[name][others] for name in ("dw", "dg", "mean_updates") if name in before}
    told -= numbers(two_bytes, two_bytes)  # there are few to choose from
    least = 2 if server.config.history_dtype == "bfloat16" else D
    assert len(told) >= least and told <= numbers(before, before)
    server.forget(GONE)
    after, fresh = server.state_dict(), blank.state_dict()
    assert not told & numbers(after, after)
    for name, value in of_client(after, GONE, shared).items():
        assert torch.equal(value, fresh[name][GONE]), name
    if server.config.keeps_last:
        assert not any(part.any() for part in server.last(torch.tensor([GONE], device=device)))
    for name in PAIRED:  # both of a pair
        assert name not in after or not after[name][:, GONE].any()
    for name, value in before.items():
        if name in shared:
            assert torch.equal(torch.as_tensor(after[name]), torch.as_tensor(value)) or name == "last_models", name
        elif name in PAIRED:
            assert torch.equal(after[name][others][:, others], value[others][:, others]), name
        elif name == "trials":  # that the number is forgotten must stay known
            rows = [k + 1 for k in others]
            assert torch.equal(after[name][rows], value[rows])
            assert after[name][GONE + 1].tolist() == [-1, -1, 0, server.config.trial]
        elif name == "basis":  # eigenvectors of all clients together
            assert torch.equal(after[name], fresh[name]), name
        else:
            assert torch.equal(after[name][others], value[others]), name


def forget_one(group, arrivals):
    server = start(SETTINGS, group)
    replay(server, arrivals, group)  # the last of them is the client's: its sums still wait for a message
    server.forget(arrivals[-1][0])
    engine = server._engine
    left = {"_changes": engine._changes, "_verdict": engine._verdict, "_update_sums": engine._update_sums}
    return server.state_dict(), {name: bool(value.any()) for name, value in left.items()}


def test_no_number_of_a_forgotten_client_is_left_on_any_rank(ranks):
    arrivals, *_ = history_of_arrivals(SETTINGS, 40)
    blank = history_of_arrivals(SETTINGS, 0)[-1].state_dict()
    gone = arrivals[-1][0]
    for state, left in ranks.run(2, forget_one, arrivals):
        assert state["seen"].sum() >= 3 and not any(left.values()), left
        for name, value in of_client(state, gone, SHARED).items():
            expected = blank[name][gone]
            if name in SLICED:
                expected = expected[..., : value.shape[-1]]
            assert torch.equal(value, expected), name
