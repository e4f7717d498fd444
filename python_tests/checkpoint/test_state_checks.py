"""A state is untrusted input: whatever is wrong with it, it is refused in words and nothing has changed."""

import math

import pytest
import torch
from damage import DAMAGE, damages
from engines import ENGINES, make, run
from splits import SETTINGS, digest, history_of_arrivals, replay, start
from states import identical

from secureafl_ext import SecureAFL


def bits(state):
    return {name: torch.as_tensor(value).clone() for name, value in state.items()}


def unchanged(server, before):
    after = server.state_dict()
    return before.keys() == after.keys() and all(
        torch.equal(torch.as_tensor(after[name]).nan_to_num(), value.nan_to_num()) for name, value in before.items()
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_state_is_refused_and_changes_nothing(engine, device):
    server, donor = make(engine, device), make(engine, device)
    run(server, 25)
    run(donor, 40)
    before, good = bits(server.state_dict()), donor.state_dict()
    kinds = set()
    for kind, name, bad in damages(good, server.config):
        with pytest.raises(ValueError) as refusal:
            server.load_state_dict(bad)
        assert str(refusal.value).startswith("SecureAFL.load_state_dict: ") and name in str(refusal.value), kind
        assert unchanged(server, before), kind
        kinds.add(kind)
    assert len(kinds) > 100
    for other in (None, [], "state", 5):
        with pytest.raises(ValueError, match="state must be a dict, got"):
            server.load_state_dict(other)
    server.load_state_dict(good)
    identical(server, donor)


LAST = 2**52  # version


def forged(state, clients, version):
    """The state at this version, with every counter as large as may be."""
    most = LAST + version
    largest = {
        **{name: most for name in ("rounds", "met", "uploads")},
        **{"counts": LAST + clients * version, "last_epoch": most - 9, "turns": 0},
        **({} if "factor_counts" in state else {"recorded": most, "factors": 1.0}),
    }
    new = {name: torch.full_like(state[name], value) for name, value in largest.items() if name in state} | {
        "clock": torch.tensor([most - 9, most, 1]),
        "models": state["models"].roll(version - state["version"], 0),  # version v lies in row v % rows
    }
    return {**state, **new, "version": version, "stale": 2 * LAST, "too_soon": 2 * LAST}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_follows_a_state_with_the_largest_numbers_loads_again(engine):
    """A forged checkpoint must not end in one that is lost."""
    server, again = make(engine), make(engine)
    run(server, 25)
    good, update = server.state_dict(), torch.ones(len(server.model))
    state = forged(good, server.clients, LAST - 5)
    for name in ("rounds", "met", "recorded", "clock", "last_epoch", "uploads", "counts"):
        if name not in state or (name == "recorded" and "factor_counts" in state):  # its sums do not fit then
            continue
        with pytest.raises(ValueError, match=f"SecureAFL.load_state_dict: {name} must be "):
            server.load_state_dict({**state, name: state[name] + LAST})
    server.load_state_dict(state)
    for client in (0, 1, 2, 0, 1):
        assert server.submit(client, update, server.version - 5).kind == "stale"
        server.submit(client, update, server.version)
        again.load_state_dict(server.state_dict())
        identical(server, again)
    words = r"the server's version must be below 2\*\*52, got 4503599627370496"
    with pytest.raises(ValueError, match=f"SecureAFL.submit: {words}"):
        server.submit(0, update, server.version)
    again.load_state_dict(server.state_dict())
    with pytest.raises(ValueError, match=r"version must be a whole number, 0 or more, at most 2\*\*52"):
        server.load_state_dict({**state, "version": LAST + 1})


def test_every_kind_of_damage_is_tried_on_some_engine():
    tried = set()
    for engine in ENGINES:
        server = make(engine)
        run(server, 25)
        tried |= {kind for kind, *_ in damages(server.state_dict(), server.config)}
    skipped = {"oldest missing"}
    assert set(DAMAGE) - tried == skipped


def refuse_all(group, arrivals):
    """A damaged state on rank 1 alone, then on all."""
    server = start(SETTINGS, group, d=11)
    replay(server, arrivals, group)
    good = server.state_dict()
    before, told = digest(good), []
    for kind, name, bad in damages(good, server.config):
        for state in (bad if group.rank() else good, bad):
            try:
                server.load_state_dict(state)
                told.append(f"{kind}: taken")
            except ValueError as error:
                if state is bad and name not in str(error):
                    told.append(f"{kind}: {error}")
            if digest(server.state_dict()) != before:
                told.append(f"{kind}: changed")
    other = {**good, "counts": good["counts"] + group.rank()}  # fits, but is not the state that the other rank has
    try:
        server.load_state_dict(other)
        told.append("another state: taken")
    except ValueError as error:
        if "what ranks share must be the same on all ranks" not in str(error):
            told.append(str(error))
    server.load_state_dict(good)
    return told, digest(server.state_dict()) == before


def test_a_damaged_state_on_one_rank_is_refused_on_all(ranks):
    arrivals, *_ = history_of_arrivals(SETTINGS, 25, d=11)
    assert ranks.run(2, refuse_all, arrivals) == [([], True)] * 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e38])
def test_every_state_that_a_server_gives_is_one_that_it_takes(engine, size, device):
    """Also after updates, and models, near the largest and the smallest float."""
    random = torch.Generator().manual_seed(7)
    server, other = (make(engine, device, lr=1.0, max_norm=math.inf, filter=False) for _ in range(2))
    for step in range(30):
        update = size * (2 * torch.rand(len(server.model), generator=random) - 1)
        if step % 5 == 0:
            update = size * update.sign()
        if step % 7 == 0:
            update[0] = math.nan
        client = int(torch.randint(server.clients, (), generator=random))
        server.submit(client, update.to(server.model), max(0, server.version - step % 4))
        if step % 20 == 19:
            server.forget(client)
        other.load_state_dict(server.state_dict())
        assert unchanged(other, bits(server.state_dict()))


def test_a_model_that_is_kept_in_float64_must_be_finite_in_float32_too(device):
    server = SecureAFL(torch.zeros(3, device=device), 2, history_dtype=torch.float64)
    state = server.state_dict()
    state["models"][1, 2] = 1e77
    with pytest.raises(ValueError, match="models must be finite in float32, got other values"):
        server.load_state_dict(state)
    assert not server.model.any()


def test_float64_updates_may_be_longer_than_their_products_can_say():
    server, other = (
        SecureAFL(
            torch.zeros(7).double(), 5, history_dtype=torch.float64, rule="krum", memory=0, max_norm=1e300, filter=False
        )
        for _ in range(2)
    )
    for step in range(20):
        server.submit(step % 5, torch.full((7,), 1e200 * (-1) ** step, dtype=torch.float64), server.version)
    assert not server.state_dict()["products"].isfinite().all()
    other.load_state_dict(server.state_dict())
    identical(other, server)
