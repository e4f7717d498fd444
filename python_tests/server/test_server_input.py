"""Bad input to SecureAFL: updates, versions, clients, settings and models, and what a refusal leaves unchanged."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from oracles import relative_error
from server_rounds import CLIENTS, SIZE, drive, make
from states import identical

from secureafl_ext import SecureAFL


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_update_is_a_round_that_leaves_no_trace_of_it(device, bad):
    server = make(device)
    slow, _ = drive(server, 50)
    before = server.state_dict()
    update = torch.ones(SIZE, dtype=torch.float64, device=device)
    update[5] = bad
    receipt = server.submit(4, update, server.version)
    assert not receipt.accepted and receipt.factor.isnan() and receipt.reason == "rejected: not finite"
    assert server.version == 51 and server.stats()["non_finite"] == 1
    slow.submit(4, update.cpu().numpy(), 50)
    assert relative_error(server.model, slow.model) < 1e-9  # it went on with the estimates
    after = server.state_dict()
    for name in ("last_updates", "last_models", "dw", "dg", "pairs", "seen", "factors", "recorded"):
        assert torch.equal(before[name], after[name]), name
    new = make(device)
    new.submit(0, update, 0)
    assert not new.state_dict()["seen"].any() and not new.model.any()


def test_huge_updates_never_make_the_model_or_the_history_non_finite(device):
    model = torch.zeros(4, device=device)
    server = SecureAFL(model, 3, lr=10.0, max_norm=1e38, estimate=True, filter=False)
    for step in range(40):
        update = torch.full((4,), 3e38 * (-1) ** (step // 7), device=device)
        server.submit(step % 3, update, max(0, server.version - step % 4))
    state = server.state_dict()
    assert all(state[name].isfinite().all() for name in ("models", "last_updates", "last_models", "dw", "dg"))


def test_stale_versions_are_refused_without_a_round(device):
    server = make(device, max_staleness=3)
    drive(server, 20)
    before = server.state_dict()
    receipt = server.submit(0, torch.ones(SIZE, dtype=torch.float64, device=device), 16)
    assert not receipt.accepted and receipt.staleness == 4 and receipt.version == 20
    assert receipt.reason == "stale: version 16, the server keeps 17 to 20"
    after = server.state_dict()
    assert after.pop("stale") == before.pop("stale") + 1 == server.stats()["stale"]
    assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(after[name])) for name in before)
    assert server.submit(0, torch.ones(SIZE, dtype=torch.float64, device=device), 17).staleness == 3


def nested(*tensors):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: the API is a prototype
        return torch.nested.nested_tensor(list(tensors))


V = torch.ones(SIZE, dtype=torch.float64)
MISTAKES = [
    ((0, V[:3], 0), "update must be a tensor (12,) float64, got (3,) float64"),
    ((0, V.float(), 0), "update must be a tensor (12,) float64, got (12,) float32"),
    ((0, [1.0] * SIZE, 0), "update must be a tensor (12,) float64, got list"),
    ((CLIENTS, V, 0), "client must lie in 0..5, got 6"),
    ((-1, V, 0), "client must lie in 0..5, got -1"),
    ((0, V, 31), "version must lie in 0..30, got 31"),
    ((0, V, -1), "version must lie in 0..30, got -1"),
    ((10**5000, V, 0), "client must lie in 0..5, got an integer of 16610 bits"),  # Python refuses to print it
    ((0, V, -(10**5000)), "version must lie in 0..30, got an integer of 16610 bits"),
    ((0, nested(V), 0), "update must be a tensor (12,) float64, got a nested tensor"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_callers_mistake_is_an_error_and_no_round(arguments, words):
    server = make()
    drive(server, 30)
    before = server.state_dict()
    with pytest.raises(ValueError) as mistake:
        server.submit(*arguments)
    assert str(mistake.value) == f"SecureAFL.submit: {words}"
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(v)) for k, v in server.state_dict().items())


class Strict(torch.Tensor):
    """A tensor class that does not work together with others, as those of image libraries."""


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize("rule", ["median", "krum", "support", "kinship"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_class_of_an_update_makes_no_difference(rule, dtype):
    server, twin = (SecureAFL(torch.zeros(SIZE, dtype=dtype), 3, rule=rule, history_dtype=dtype) for _ in range(2))
    for k, kind in enumerate((Strict, Other, torch.nn.Parameter, Strict, Other)):
        update = torch.arange(SIZE, dtype=dtype) * (-1) ** k
        given = kind(update) if kind is torch.nn.Parameter else update.as_subclass(kind)
        server.submit(k % 3, given, server.version)
        twin.submit(k % 3, update, twin.version)
    state = server.state_dict()
    assert {type(value) for value in state.values()} <= {torch.Tensor, int}
    identical(server, twin)


def test_a_number_that_raises_whatever_it_likes_is_refused():
    class Wild:
        def __index__(self):
            raise KeyError("wild")

    server = make()
    with pytest.raises(ValueError, match=r"SecureAFL.submit: client must be a whole number in 0\.\.5, got Wild"):
        server.submit(Wild(), V, 0)
    with pytest.raises(ValueError, match="clients must be a whole number, 1 or more, got an integer of 16610 bits"):
        SecureAFL(torch.zeros(3), 10**5000)


def test_enqueue_names_what_is_no_tensor():
    server = SecureAFL(torch.zeros(SIZE), 3)
    with pytest.raises(ValueError, match=r"SecureAFL.enqueue: client must be a dense tensor, got int"):
        server.enqueue(0, torch.ones(SIZE), server.model)
    assert server.version == 0


NO_NUMBERS = [True, False, 1.0, "1", None, torch.tensor(True), torch.tensor(1.0), torch.tensor([1, 2]), [1]]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=[f"{type(value).__name__} {value}" for value in NO_NUMBERS])
def test_a_client_or_version_that_is_no_whole_number_is_refused_in_the_same_words_everywhere(value):
    server = make(filter=False, memory=0)
    drive(server, 30)
    before = server.state_dict()
    got = repr(value) if not isinstance(value, (torch.Tensor, list)) else type(value).__name__
    no_client, no_version = (f"must be a whole number in {where}, got {got}" for where in ("0..5", "0..30"))
    calls = {
        "submit: client " + no_client: lambda: server.submit(value, V, 30),
        "submit: version " + no_version: lambda: server.submit(0, V, value),
        "forget: client " + no_client: lambda: server.forget(value),
        "leave: client " + no_client: lambda: server.leave(value),
        "last: client " + no_client: lambda: server.last(value),
        "model_at: version " + no_version.replace("0..30", "20..30"): lambda: server.model_at(value),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError) as mistake:
            call()
        assert str(mistake.value) == f"SecureAFL.{words}"
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(v)) for k, v in server.state_dict().items())


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, torch.tensor], ids=lambda kind: kind.__name__)
def test_whole_numbers_of_other_types_are_taken(kind):
    server = make()
    assert server.submit(kind(1), V, kind(0)).version == 1
    assert torch.equal(server.model_at(kind(1)), server.model)
    for one, other in zip(server.last(kind(1)), server.last(torch.tensor([1])), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(server.threshold(kind(1)), server.threshold(torch.tensor([1])))
    server.leave(kind(1))
    server.forget(kind(1))
    assert not server.seen.any()


def fake(tensor):
    return torch._subclasses.FakeTensorMode().from_tensor(tensor)


WITHOUT_VALUES = {"meta": lambda tensor: tensor.to("meta"), "a fake tensor": fake}


@pytest.mark.parametrize("settings", [{"memory": 0}, {"history_dtype": torch.float32}, {"rule": "krum", "memory": 2}])
@pytest.mark.parametrize(("got", "without"), WITHOUT_VALUES.items(), ids=WITHOUT_VALUES)
def test_a_tensor_without_values_is_refused_before_anything_changes(got, without, settings):
    server = SecureAFL(torch.zeros(SIZE), CLIENTS, filter=False, **{"memory": 3, **settings})
    good = {"client": torch.tensor([3]), "update": V.float(), "trained_on": torch.zeros(SIZE)}
    server.submit(3, V.float(), 0)
    before = server.state_dict()
    with pytest.raises(ValueError) as mistake:
        server.submit(3, without(V.float()), 1)
    assert str(mistake.value) == f"SecureAFL.submit: update must be on cpu, got {got}"
    for name in good:
        with pytest.raises(ValueError) as mistake:
            server.enqueue(**{**good, name: without(good[name])})
        assert str(mistake.value) == f"SecureAFL.enqueue: {name} must be on cpu, got {got}"
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(v)) for k, v in server.state_dict().items())


def test_layouts_without_plain_memory_are_refused():
    server = SecureAFL(torch.zeros(SIZE), CLIENTS)
    for layout, other in {"sparse_coo": V.float().to_sparse(), "_mkldnn": V.float().to_mkldnn()}.items():
        with pytest.raises(ValueError, match=rf"submit: update must be a tensor \(12,\) float32, got .* {layout}$"):
            server.submit(0, other, 0)
        with pytest.raises(ValueError, match=rf"SecureAFL: model must be a flat float32 .* got .* {layout}$"):
            SecureAFL(other, CLIENTS)
    assert server.version == 0


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda call: call.__name__)
def test_a_server_is_not_copied_but_says_what_to_use(call):
    words = "SecureAFL: a server cannot be copied or pickled; use state_dict and load_state_dict, or save"
    with pytest.raises(TypeError, match=words):
        call(make())


def test_load_refuses_a_device_that_it_cannot_use(tmp_path):
    make().save(tmp_path / "server")
    wrong = {
        "meta": "one whose tensors have values, got meta",
        "nowhere": "a device such as 'cpu' or 'cuda', got 'nowhere'",
        "cuda:99": "one that this machine has, got cuda:99: ",
    }
    for device, words in wrong.items():
        with pytest.raises(ValueError, match=f"^SecureAFL.load: device must be {words}"):
            SecureAFL.load(tmp_path / "server", device=device)


BAD_SETTINGS = [
    ({"quantile": 1.5}, "quantile must be a number between 0 and 1, got 1.5"),
    ({"memory": 17}, "memory must be a whole number 0 to 16, got 17"),
    ({"lr": float("nan")}, "lr must be a finite number, got nan"),
    ({"max_norm": 0.0}, "max_norm must be a positive number, got 0.0"),
    ({"trust": -1.0}, "trust must be a number, 0 or more (inf: no cap), got -1.0"),
    ({"store": "some"}, "store must be one of all, accepted, got 'some'"),
    ({"pairs": "mine"}, "pairs must be one of received, rounds, got 'mine'"),
    ({"max_staleness": -1}, "max_staleness must be a whole number, 0 or more, got -1"),
    ({"window": 0}, "window must be None or a positive whole number, got 0"),
    (
        {"history_dtype": torch.int32},
        "history_dtype must be one of float16, bfloat16, float32, float64, got torch.int32",
    ),
    ({"history_dtype": torch.float32}, "history_dtype must be float64 like model, got float32"),
    ({"rule": "trimmed_mean", "trim": 3}, "trim must leave a client, 2 * trim < 6, got 3"),
    ({"iterations": 0}, "iterations must be a whole number 1 to 1000, got 0"),
    ({"iterations": 1001}, "iterations must be a whole number 1 to 1000, got 1001"),
    ({"trim": -1}, "trim must be a whole number, 0 or more, got -1"),
    (
        {"estimate": False, "receive": False},
        "receive must be true when estimate is false, got False",
    ),
]


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS, ids=[words for _, words in BAD_SETTINGS])
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError) as refusal:
        make(**settings)
    assert str(refusal.value) == f"SecureAFL: {words}"


def test_a_bad_model_is_refused():
    for model, words in [
        (torch.zeros(2, 3), "model must be a flat float32 or float64 tensor, got (2, 3) float32"),
        (torch.zeros(3).half(), "model must be a flat float32 or float64 tensor, got (3,) float16"),
        (torch.tensor([1.0, torch.nan]), "model must be finite, got NaN or inf in it"),
        (torch.zeros(3, device="meta"), "model must have values, got a meta tensor"),
        (fake(torch.zeros(3)), "model must have values, got a fake tensor"),
    ]:
        with pytest.raises(ValueError) as refusal:
            SecureAFL(model, 3)
        assert str(refusal.value) == f"SecureAFL: {words}"


def test_only_a_client_that_there_is_can_be_forgotten(device):
    for client in (-1, CLIENTS):
        with pytest.raises(ValueError, match=rf"SecureAFL.forget: client must lie in 0..{CLIENTS - 1}, got {client}"):
            make(device).forget(client)
