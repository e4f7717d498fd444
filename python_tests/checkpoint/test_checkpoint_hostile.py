"""Forged checkpoints and odd tensors: a ValueError says what is wrong, no memory is taken, and nothing has changed."""

import math
import os

import pytest
import torch
from engines import ENGINES, N, make, run
from peaks import peak, start_peak
from states import identical
from torch._subclasses.fake_tensor import FakeTensorMode

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.checkpoint import files, tensor_file
from secureafl_ext.checkpoint import state as states

F64 = {"history_dtype": torch.float64, "memory": 0}
STEPS = {**RECOMMENDED, "quorum": 0}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.safetensors"


@pytest.mark.parametrize("clients", [10**8, 10**12, 10**18])
def test_a_number_of_clients_with_nothing_behind_it_takes_no_memory(clients, path):
    """`trials` follow from `seen` if a file has none: as many as it has, not as many as the header says."""
    tensors, about = SecureAFL(torch.zeros(4), 3, **RECOMMENDED)._described()
    del tensors["trials"]
    files.write(path, tensors, {**about, "clients": clients})
    assert os.path.getsize(path) < 5000
    before, words = start_peak("cpu"), rf"seen must be \({clients},\) bool, got \(3,\) bool"
    with pytest.raises(ValueError, match=words):
        SecureAFL.load(path)
    state, config = {**tensors, **about["state"]}, SecureAFL(torch.zeros(4), 3, **RECOMMENDED).config
    with pytest.raises(ValueError, match=words):  # as for the checkpoint of a loop, whose log says how many clients
        states.check("audit", state, config, clients, 4)
    assert peak("cpu") - before < 60e6


@pytest.mark.parametrize("dropped", [("trials",), ("clock", "last_epoch", "uploads"), ("seen", "trials")])
def test_what_follows_from_seen_is_not_what_is_wrong(dropped):
    server = SecureAFL(torch.zeros(4), 3, **RECOMMENDED)
    state = {name: value for name, value in server.state_dict().items() if name not in dropped}
    if "seen" in state:
        server.load_state_dict(state)
    with pytest.raises(ValueError, match="seen"):
        server.load_state_dict({**state, "seen": torch.ones(4, dtype=torch.bool)} if "seen" in state else state)


def kept_alone(name, value):
    """That tensor is full of this value; all others are a server's own."""
    return lambda state: {**state, name: torch.full_like(state[name], value)}


FORGED = {
    "kin_centre": ("kin_centre", {"rule": "kinship", "memory": 2}, kept_alone("kin_centre", 1.7e308)),
    "kinship": ("kinship", {"rule": "kinship", "memory": 2}, kept_alone("kinship", 1.79e308)),
    "similarity": ("similarity", {"rule": "support", "memory": 2}, kept_alone("similarity", -1.79e308)),
    "squares": ("products", {"rule": "kinship", "memory": 0}, kept_alone("products", 1e-200)),
    "long squares": ("products", {"rule": "kinship", "memory": 0}, kept_alone("products", 1.1e300)),
    "long means": ("mean_updates", STEPS, kept_alone("mean_updates", 0.6)),  # of length 1.2
    "norms below zero": ("norms", STEPS, kept_alone("norms", -0.0)),
    **{
        f"updates of {rule}": ("products", {"rule": rule, **F64}, kept_alone("last_updates", 1.7e308))
        for rule in ("kinship", "support", "geometric_median", "krum", "centered_clip")
    },
    "one coordinate": (
        "products",
        {"rule": "krum", **F64},
        lambda state: {**state, "last_updates": state["last_updates"].index_fill(1, torch.tensor([2]), 1e160)},
    ),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_state_that_would_end_in_one_that_is_lost_is_refused(forgery):
    """These loaded, and after a round or two the server's own checkpoint did not."""
    name, settings, forge = FORGED[forgery]
    dtype = settings.get("history_dtype", torch.float32)
    settings = {"filter": False, **settings}
    server, other = (SecureAFL(torch.zeros(4, dtype=dtype), 3, **settings) for _ in range(2))
    random = torch.Generator().manual_seed(0)
    for i in range(9):
        server.submit(i % 3, torch.randn(4, generator=random, dtype=dtype), server.version)
    with pytest.raises(ValueError, match=f"SecureAFL.load_state_dict: {name} must "):
        other.load_state_dict(forge(server.state_dict()))
    identical(other, SecureAFL(torch.zeros(4, dtype=dtype), 3, **settings))
    other.load_state_dict(server.state_dict())


ROW_WISE = ("kinship", "support", "krum", "centered_clip")
SIZES = {torch.float32: (1.0, 1e-30, 3e38, 1e-45), torch.float64: (1.0, 1e-170, 1e149, 3e150, 1e200, 1.7e308, 5e-324)}


@pytest.mark.parametrize("most", [50.0, 1e-44, math.inf])  # the second leaves float32 updates of two digits in binary
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("rule", ROW_WISE)
def test_squares_of_a_servers_own_updates_fit_them(rule, dtype, most):
    server, other = (
        SecureAFL(torch.zeros(5, dtype=dtype), 4, memory=0, rule=rule, history_dtype=dtype, max_norm=most, filter=False)
        for _ in range(2)
    )
    random = torch.Generator().manual_seed(3)
    for i in range(60):
        size = SIZES[dtype][int(torch.randint(len(SIZES[dtype]), (), generator=random))]
        update = size * (2 * torch.rand(5, generator=random, dtype=dtype) - 1)
        if i % 20 == 19:
            server.forget(i % 3)
        server.submit(int(torch.randint(4, (), generator=random)), update, max(0, server.version - i % 3))
        other.load_state_dict(server.state_dict())


def test_products_that_no_round_reads_may_say_anything():
    """With corrections, and with estimate=False, the engine computes none: they stay zero beside the updates."""
    for settings in ({"memory": 2}, {"memory": 0, "estimate": False}):
        server = SecureAFL(torch.zeros(4), 3, rule="krum", **settings)
        for i in range(9):
            server.submit(i % 3, torch.ones(4), server.version)
        state = server.state_dict()
        assert not state["products"].any() and state["last_updates"].any()
        server.load_state_dict(state)


def odd(tensor):
    """Tensors that are no plain ones of this shape and dtype."""
    yield "without values", FakeTensorMode().from_tensor(tensor)
    yield "nested", torch.nested.nested_tensor([tensor.reshape(-1)])
    yield "sparse", tensor.to_sparse()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("engine", [*ENGINES, "recommended"])
def test_a_tensor_that_is_not_plain_is_refused_by_its_name(engine):
    if engine == "recommended":
        ours, theirs = (SecureAFL(torch.zeros(7), N, **RECOMMENDED) for _ in range(2))
    else:
        ours, theirs = make(engine), make(engine)
    run(ours, 9), run(theirs, 12)
    good, before = theirs.state_dict(), ours.state_dict()
    tensors = [name for name, value in good.items() if isinstance(value, torch.Tensor) and value.dim()]
    for name in tensors:
        for kind, bad in odd(good[name]):
            for absent in ((), {"trials"} - {name}, {"clock", "last_epoch", "uploads"} - {name}):
                state = {key: value for key, value in {**good, name: bad}.items() if key not in absent}
                with pytest.raises(ValueError, match=r"SecureAFL\.load_state_dict: ") as refusal:
                    ours.load_state_dict(state)
                told = str(refusal.value)
                named = f"{name} must be (" in told and kind in told
                assert named or (absent and "state must have" in told), told
    after = ours.state_dict()
    assert all(torch.equal(torch.as_tensor(after[name]), torch.as_tensor(before[name])) for name in before)


def test_unsigned_entries_are_kept(path):
    """Those that a model carries beside its parameters may have any dtype of integers."""
    largest = {torch.uint16: 2**16 - 1, torch.uint32: 2**32 - 1, torch.uint64: 2**64 - 1}
    tensors = {str(dtype): torch.tensor([0, 3, most], dtype=dtype) for dtype, most in largest.items()}
    files.write(path, {"models": torch.zeros(1, 1), **tensors}, {})
    found, _ = files.read(path)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].tolist() == tensor.tolist()


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
@pytest.mark.parametrize("bounds", [lambda size: (0, size), lambda size: (0, 3)])
def test_a_tensor_too_large_for_the_memory_is_an_error_that_names_the_file(path, monkeypatch, error, bounds):
    make("fused").save(path)

    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(
        ValueError, match=rf"SecureAFL\.load: {path} must have tensors that fit into memory, got one of"
    ):
        files.read(path, ["models"], bounds)


def test_a_header_that_load_would_refuse_is_not_written(path, monkeypatch):
    """A loop's names every node. The last checkpoint stays."""
    server = make("fused")
    server.save(path)
    before = path.read_bytes()
    run(server, 3)
    monkeypatch.setattr(tensor_file, "LONGEST_HEADER", 1000)
    with pytest.raises(
        ValueError, match=r"SecureAFL\.save: header must have at most 1000 bytes, got \d+: it could not be"
    ):
        server.save(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
