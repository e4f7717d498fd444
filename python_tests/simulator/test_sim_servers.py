"""What every defense has in common: refusals, broken and huge updates, versions, state."""

import math

import numpy as np
import pytest
import slow_defenses as slow
import slow_memory as memory
import torch
from compared import CASES, CLIENTS, F64, LR, SIZE, SLOW, STALENESS, World, arrivals, drive, pair, reference
from states import without_values
from torch._subclasses.fake_tensor import FakeTensorMode

from secureafl_ext import SecureAFL
from secureafl_ext.defenses import DEFENSES, Trusted, make

FORGETFUL = [name for name in SLOW if issubclass(SLOW[name], memory.Memory) and not DEFENSES[name].needs_trusted]


def everything(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def snapshot(server):
    if isinstance(server, SecureAFL):
        return {k: v for k, v in server.state_dict().items() if k != "stale"}
    return {k: everything(v) for k, v in {**vars(server), **vars(server.rule)}.items()}


def same(one, other):
    def equal(x, y):
        return torch.allclose(x, y, 0, 0, equal_nan=True) if isinstance(x, torch.Tensor) else x == y

    return all(equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("name", DEFENSES)
def test_refusals_leave_no_trace(name):
    server = arrivals(name, 0, 20)
    before = snapshot(server)
    good = torch.ones(SIZE, dtype=F64)
    for client, update, version, words in [
        (0, torch.ones(SIZE + 1, dtype=F64), 20, rf"update must be a tensor \({SIZE},\) float64, got \(9,\) float64"),
        (0, good.float(), 20, "got .* float32"),
        (0, [1.0] * SIZE, 20, "got list"),
        (CLIENTS, good, 20, f"client must lie in 0..{CLIENTS - 1}, got {CLIENTS}"),
        (-1, good, 20, "client must lie in"),
        (0, good, 21, "version must lie in 0..20, got 21"),
        (0, good, -1, "version must lie in"),
    ]:
        with pytest.raises(ValueError, match=words):
            server.submit(client, update, version)
    receipt = server.submit(0, good, 20 - STALENESS - 1)
    assert not receipt.accepted
    assert receipt.reason == "stale: version 15, the server keeps 16 to 20"
    assert (receipt.staleness, receipt.version) == (STALENESS + 1, 20)
    assert math.isnan(receipt.factor)
    assert same(before, snapshot(server))
    assert server.submit(0, good, 20 - STALENESS).version == 21


@pytest.mark.parametrize("name", DEFENSES)
def test_nothing_that_is_not_finite_gets_in(name):
    for rounds in (0, 25):
        server = arrivals(name, 0, rounds)
        before = snapshot(server)
        for value in (torch.nan, torch.inf, -torch.inf):
            model = server.model.clone()
            update = torch.ones(SIZE, dtype=F64)
            update[2] = value
            receipt = server.submit(1, update, server.version)
            assert receipt.reason == "rejected: not finite"
            assert not receipt.accepted
            assert math.isnan(receipt.factor)
            if not isinstance(server, SecureAFL):  # which steps along its estimates
                assert torch.equal(server.model, model)
        if not isinstance(server, SecureAFL):  # nor is it remembered
            after = snapshot(server)
            after.update({key: before[key] for key in ("version", "models", "rounds") if key in before})
            if name in ("zeno++", "aflguard", "fltrust"):
                after["reference"] = before["reference"]
            assert same(before, after)


def test_trusted_samples_are_never_asked_about_a_nan():
    def evaluate(model):
        assert model.isfinite().all()
        return model.sum(), model.sum()

    _, send = pair("sageflow", [1.0, 1.0], trusted=Trusted(None, evaluate), mode="anchored")
    assert send(0, [math.nan, 1.0], 0).reason == "rejected: not finite"


@pytest.mark.parametrize("name", DEFENSES)
def test_huge_updates_never_crash(name):
    world = World(0)
    server = make(name, torch.zeros(SIZE), CLIENTS, LR, STALENESS, world.trusted())
    with np.errstate(all="ignore"):
        for t in range(30):
            server.submit(t % CLIENTS, torch.full((SIZE,), 3e38 * (-1) ** (t // 7)), max(0, t - 2))
    assert server.model.isfinite().all()


@pytest.mark.parametrize("name", DEFENSES)
def test_models_are_kept_as_long_as_promised(name):
    world = World(0)
    server = make(name, torch.tensor(world.start), CLIENTS, LR, STALENESS, world.trusted())
    seen = [server.model.clone()]
    for _ in range(12):
        client, update, _ = world.next()
        server.submit(client, torch.tensor(update), server.version)
        seen.append(server.model.clone())
        for version in range(max(0, server.version - STALENESS), server.version + 1):
            assert torch.equal(server.model_at(version), seen[version])
    for version in (12 - STALENESS - 1, 13):
        with pytest.raises(ValueError, match=f"model_at: version must lie in 8..12, got {version}"):
            server.model_at(version)


@pytest.mark.parametrize("name", [name for name in DEFENSES if not name.startswith("secureafl")])
def test_a_round_never_waits_for_the_device(name):
    """Fake tensors have no values: whoever reads one on the host gets an error."""
    asked = Trusted(lambda model: model + 1, lambda model: (model.sum(), model.mean()))
    server = make(name, torch.ones(SIZE), CLIENTS, LR, STALENESS, asked)
    with FakeTensorMode() as mode:
        without_values(mode, server, server.rule)
        for t in range(3):
            receipt = server.submit(t, torch.empty(SIZE), t)
        with pytest.raises(Exception, match=r"item|local_scalar"):
            bool(receipt.accepted)


@pytest.mark.parametrize("name", DEFENSES)
def test_updates_leave_no_graph_and_keep_their_values(name):
    world = World(0)
    server = make(name, torch.tensor(world.start), CLIENTS, LR, STALENESS, world.trusted())
    update = torch.ones(SIZE, dtype=F64, requires_grad=True)
    for version in range(3):
        server.submit(1, update * 1, version)
    assert not server.model.requires_grad
    assert torch.equal(update.detach(), torch.ones(SIZE, dtype=F64))


def test_variants_are_secureafl_with_one_part_changed():
    parts = {"": {}, "-i": {"rule": "mean"}, "-ii": {"estimate": False}, "-iii": {"filter": False},
             "-iv": {"receive": False}}  # fmt: skip
    for suffix, part in parts.items():
        server = make(f"secureafl{suffix}", torch.zeros(3), 5, 0.02, 7, memory=2)
        assert isinstance(server, SecureAFL)
        assert server.config == SecureAFL(torch.zeros(3), 5, lr=0.02, max_staleness=7, memory=2, **part).config


def test_names_settings_and_missing_samples_are_refused_with_the_choices():
    start = torch.zeros(3)
    with pytest.raises(ValueError, match=r"unknown defense 'kadram'; choose from async-sgd, kardam, .*, secureafl-iv$"):
        make("kadram", start, 5, 0.1, 3)
    with pytest.raises(ValueError, match=r"unknown setting 'alpha' of zeno\+\+; choose from rho, eps, every$"):
        make("zeno++", start, 5, 0.1, 3, reference(1.0), alpha=1)
    with pytest.raises(ValueError, match="unknown setting 'rho' of async-sgd; choose from nothing"):
        make("async-sgd", start, 5, 0.1, 3, rho=1)
    with pytest.raises(ValueError, match="unknown setting 'rule' of secureafl-i; choose from memory"):
        make("secureafl-i", start, 5, 0.1, 3, rule="median")
    for name in ("sageflow", "zeno++", "aflguard", "fltrust"):
        with pytest.raises(ValueError, match=rf"{name.replace('+', '.')}: trusted must be given"):
            make(name, start, 5, 0.1, 3)
    needs = {name for name, defense in DEFENSES.items() if defense.needs_trusted}
    assert needs == {"sageflow", "zeno++", "aflguard", "fltrust"}


@pytest.mark.parametrize(("name", "settings", "words"), [
    ("kardam", {"malicious": 6}, "Kardam: malicious must be 0 to 5, got 6"),
    ("kardam", {"quantile": 1.2}, "Kardam: quantile must be between 0 and 1, got 1.2"),
    ("kardam", {"kept": 0}, "Kardam: kept must be 1 or more, got 0"),
    ("kardam", {"patience": 0}, "Kardam: patience must be 1 or more, got 0"),
    ("kardam", {"frequency": "on"}, "frequency must be one of off, lenient, strict, got 'on'"),
    ("kardam", {"dampening": "log"}, "dampening must be one of off, exp, inverse, got 'log'"),
    ("basgd", {"buffers": 6}, "BASGD: buffers must be 1 to 5, got 6"),
    ("basgd", {"interval": 0}, "BASGD: interval must be 1 or more, got 0"),
    ("basgd", {"buffers": 4, "trim": 2}, "BASGD: trim must be None or 0 to 1, got 2"),
    ("sageflow", {"classes": 1}, "Sageflow: classes must be 2 or more, got 1"),
    ("sageflow", {"mode": "windowed"}, "mode must be one of literal, anchored, got 'windowed'"),
    ("sageflow", {"candidate": "x"}, "candidate must be one of current, trained, got 'x'"),
    ("zeno++", {"every": 0}, r"Zeno\+\+: every must be 1 or more, got 0"),
    ("aflguard", {"radius": -1}, "AFLGuard: radius must be 0 or more, got -1"),
    ("aflguard", {"test": "x"}, "AFLGuard: test must be one of norm, cosine, got 'x'"),
    ("aflguard", {"every": 0}, "AFLGuard: every must be 1 or more, got 0"),
    ("async-defender", {"momentum": 1.0}, "momentum must be 0 or more, below 1, got 1.0"),
    ("async-defender", {"weight": "x"}, "weight must be one of positive, shifted, got 'x'"),
    ("async-defender", {"reference": "x"}, "reference must be one of ema, last, model, got 'x'"),
    ("async-defender", {"max_norm": 0}, "max_norm must be positive, got 0"),
    ("async-defender", {"warmup": 0}, "warmup must be 1 or more"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(name, settings, words):
    with pytest.raises(ValueError, match=words):
        make(name, torch.zeros(3), 5, 0.1, 3, reference(1.0), **settings)


@pytest.mark.parametrize(("model", "clients", "lr", "max_staleness", "words"), [
    (torch.zeros(2, 2), 5, 0.1, 3, r"kardam: model must be a flat float32 or float64 tensor, got \(2, 2\)"),
    (torch.zeros(2).half(), 5, 0.1, 3, "model must be a flat"),
    (torch.tensor([torch.nan]), 5, 0.1, 3, "model must be finite"),
    (torch.zeros(2), 0, 0.1, 3, "clients must be 1 or more, got 0"),
    (torch.zeros(2), 5, torch.inf, 3, "lr must be a finite number"),
    (torch.zeros(2), 5, 0.1, -1, "max_staleness must be 0 or more, got -1"),
])  # fmt: skip
def test_starts_that_make_no_sense_are_refused(model, clients, lr, max_staleness, words):
    with pytest.raises(ValueError, match=words):
        make("kardam", model, clients, lr, max_staleness)


@pytest.mark.parametrize("case", ["kardam", "kardam strict", "async-defender credible", *FORGETFUL])
def test_a_forgotten_client_is_a_new_one(case):
    name, settings, _ = CASES[case]
    world = World()
    server = make(name, torch.tensor(world.start), CLIENTS, LR, STALENESS, **settings)
    twin = slow.SlowServer(SLOW[name](CLIENTS, **settings), world.start, LR)
    world.models = twin.models
    for i in range(90):
        if i == 45:
            server.forget(0)
            twin_forgets(twin.rule)
        client, update, version = world.next()
        receipt = server.submit(client, torch.tensor(update), version)
        accepted, factor, _ = twin.submit(client, update, version)
        assert bool(receipt.accepted) == accepted
        np.testing.assert_allclose(float(receipt.factor), factor, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(server.model.numpy(), twin.models[-1], rtol=1e-9, atol=1e-9)


def twin_forgets(rule, client=0):
    if isinstance(rule, slow.Kardam):
        for table in (rule.uploads, rule.lists):
            table.pop(client, None)
        rule.ids = [-1 if i == client else i for i in rule.ids]
    elif isinstance(rule, memory.Memory):
        rule.forget(client)
    else:
        rule.c[client] = 1.0


@pytest.mark.parametrize("name", SLOW)
def test_resumed_from_its_state_it_goes_on_bit_for_bit(name, device):
    server, _, _ = drive(name, {}, rounds=45, device=device)
    world = World(1)
    start = torch.zeros(SIZE, dtype=F64, device=device)
    again = make(name, start, CLIENTS, LR, STALENESS, world.trusted())
    state = server.state_dict()
    again.load_state_dict(state)
    server.rule.trusted = getattr(again.rule, "trusted", None)
    for _ in range(20):
        client, update, _ = world.next()
        for one in (server, again):
            one.submit(client, torch.tensor(update, device=device), one.version)
        assert again.version == server.version and torch.equal(again.model, server.model)
    assert state["version"] == 45 and not torch.equal(state["models"], server.models)  # copies


def test_a_state_that_does_not_fit_changes_nothing():
    server, _, _ = drive("kardam", {}, rounds=20)
    before, other = server.state_dict(), drive("async-sgd", {}, rounds=20)[0].state_dict()
    with pytest.raises(ValueError, match=r"kardam: rule.applied must be \(8,\) float64, got NoneType"):
        server.load_state_dict(other)
    for name, value in server.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[name]))
