"""Every compared defense against its slow twin, by hand where the spec has numbers, and the protocol around them."""

import math

import numpy as np
import pytest
import slow_defenses as slow
import torch
from states import without_values
from torch._subclasses.fake_tensor import FakeTensorMode

from secureafl_ext import SecureAFL
from secureafl_ext.sim.defenses import DEFENSES, Trusted, make

SIZE, CLIENTS, LR, STALENESS = 8, 6, 0.1, 4
F64 = torch.float64
SLOW = {
    "async-sgd": slow.AsyncSGD,
    "kardam": slow.Kardam,
    "basgd": slow.BASGD,
    "sageflow": slow.Sageflow,
    "zeno++": slow.Zeno,
    "aflguard": slow.AFLGuard,
    "async-defender": slow.AsyncDefender,
}
CASES = {  # name, settings, how the reasons that must occur begin
    "async-sgd": ("async-sgd", {}, ["accepted"]),
    "kardam": ("kardam", {}, ["accepted", "rejected: coefficient", "accepted: as many"]),
    "kardam quantile": ("kardam", {"quantile": 0.5, "patience": 3}, ["accepted: as many"]),
    "kardam short list": ("kardam", {"kept": 1, "malicious": 2}, ["accepted", "rejected: coefficient"]),
    "kardam strict": ("kardam", {"frequency": "strict"}, ["accepted", "rejected: client"]),
    "kardam lenient": ("kardam", {"frequency": "lenient", "malicious": 2}, ["accepted", "rejected: client"]),
    "kardam inverse": ("kardam", {"dampening": "inverse"}, ["accepted"]),
    "kardam undamped": ("kardam", {"dampening": "off"}, ["accepted"]),
    "basgd": ("basgd", {}, ["accepted: buffered", "accepted: no buffer"]),
    "basgd even": ("basgd", {"buffers": 4}, ["accepted: buffered", "accepted: no buffer"]),
    "basgd spread": ("basgd", {"buffers": 3, "interval": 4}, ["accepted: buffered", "accepted: no buffer"]),
    "basgd trimmed": ("basgd", {"buffers": 4, "trim": 1}, ["accepted: buffered", "accepted: no buffer"]),
    "sageflow": ("sageflow", {"warmup": 10}, ["accepted", "accepted: warm-up", "rejected: entropy"]),
    "sageflow classes": ("sageflow", {"warmup": 10, "classes": 20, "decay": 1.0}, ["accepted", "rejected: entropy"]),
    "sageflow anchored": ("sageflow", {"warmup": 5, "mode": "anchored", "delta": 2.0}, ["accepted"]),
    "sageflow trained": ("sageflow", {"warmup": 5, "candidate": "trained"}, ["accepted", "rejected: entropy"]),
    "zeno++": ("zeno++", {}, ["accepted: rescaled", "rejected: score"]),
    "zeno++ rho": ("zeno++", {"rho": 0.03, "every": 1}, ["accepted: rescaled", "rejected: score"]),
    "zeno++ eps": ("zeno++", {"rho": 0.05, "eps": 0.4, "every": 3}, ["accepted: rescaled", "rejected: score"]),
    "aflguard": ("aflguard", {}, ["accepted", "rejected: too far"]),
    "aflguard lazy": ("aflguard", {"every": 5, "radius": 1.2}, ["accepted", "rejected: too far"]),
    "aflguard cosine": ("aflguard", {"test": "cosine"}, ["accepted", "rejected: too far"]),
    "async-defender": ("async-defender", {"max_norm": 2.0}, ["accepted: warm-up", "accepted: weighted", "rejected"]),
    "async-defender shifted": ("async-defender", {"weight": "shifted", "momentum": 0.5}, ["accepted: weighted"]),
    "async-defender last": ("async-defender", {"reference": "last", "warmup": 3}, ["rejected: cosine"]),
    "async-defender model": ("async-defender", {"reference": "model"}, ["rejected: cosine"]),
    "async-defender credible": ("async-defender", {"credibility": True}, ["rejected: cosine"]),
}


class World:
    """Quadratic clients; 0 sends noise, 1 the opposite, and some uploads are broken. Also the trusted samples' side."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.centres = 1 + 0.5 * self.random.normal(size=(CLIENTS, SIZE))
        self.curvature = 0.5 + self.random.random((CLIENTS, SIZE))
        self.start = self.random.normal(size=SIZE)
        self.models = [self.start]

    def next(self):
        client = int(self.random.integers(CLIENTS))
        version = max(0, len(self.models) - 1 - int(self.random.integers(STALENESS + 1)))
        update = self.curvature[client] * (self.models[version] - self.centres[client])
        update = update + 0.1 * self.random.normal(size=SIZE)
        if client == 0:
            update = 5 * self.random.normal(size=SIZE)
        if client == 1:
            update = -2 * update
        if self.random.random() < 0.06:
            update[self.random.integers(SIZE)] = self.random.choice([np.nan, np.inf, -np.inf])
        return client, update, version

    def at(self, version):
        return self.models[version]

    def gradient(self, model):
        return self.curvature[2:].mean(0) * (model - self.centres[2:].mean(0))

    def evaluate(self, model):
        far = np.sum((model - 1) ** 2)
        return 0.1 + 0.5 * far, math.log(10) * (1 - math.exp(-far / 12))

    def trusted(self):
        def tensor(values, like):
            return torch.as_tensor(values, dtype=like.dtype, device=like.device)

        return Trusted(
            lambda model: tensor(self.gradient(model.double().cpu().numpy()), model),
            lambda model: tuple(tensor(x, model) for x in self.evaluate(model.double().cpu().numpy())),
        )


def drive(name, settings, rounds=90, device="cpu", dtype=F64, seed=0):
    """The server, its slow twin, and both sides' verdicts round by round."""
    world = World(seed)
    start = torch.tensor(world.start, dtype=dtype, device=device)
    server = make(name, start, CLIENTS, LR, STALENESS, world.trusted(), **settings)
    needs = [world] if DEFENSES[name].needs_trusted else []
    twin = slow.SlowServer(SLOW[name](CLIENTS, *needs, **settings), start.double().cpu().numpy(), LR)
    world.models = twin.models
    verdicts = []
    for _ in range(rounds):
        client, update, version = world.next()
        update = torch.tensor(update, dtype=dtype, device=device)
        receipt = server.submit(client, update, version)
        verdicts.append((receipt, twin.submit(client, update.double().cpu().numpy(), version)))
        assert receipt.version == server.version == len(twin.models) - 1
    return server, twin, verdicts


@pytest.mark.parametrize("case", CASES)
def test_follows_its_slow_twin(case, device):
    name, settings, words = CASES[case]
    server, twin, verdicts = drive(name, settings, device=device)
    for receipt, (accepted, factor, reason) in verdicts:
        assert bool(receipt.accepted) == accepted
        assert receipt.reason.startswith(reason)
        np.testing.assert_allclose(float(receipt.factor), factor, rtol=1e-9, atol=1e-12)
    for version in range(server.version - STALENESS, server.version + 1):
        got = server.model_at(version).cpu().numpy()
        np.testing.assert_allclose(got, twin.models[version], rtol=1e-9, atol=1e-9)
    reasons = [receipt.reason for receipt, _ in verdicts]
    for word in [*words, "rejected: not finite"]:
        assert any(reason.startswith(word) for reason in reasons), f"{word} never occurred"


@pytest.mark.parametrize("name", SLOW)
def test_float32_follows_too(name, device):
    server, twin, verdicts = drive(name, {}, device=device, dtype=torch.float32)
    assert all(bool(receipt.accepted) == accepted for receipt, (accepted, *_) in verdicts)
    assert server.model.dtype == torch.float32
    np.testing.assert_allclose(server.model.cpu().numpy(), twin.models[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DEFENSES)
def test_same_seed_same_bits(name):
    ends = [arrivals(name, seed).model for seed in (3, 3, 4)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def arrivals(name, seed, rounds=40, **settings):
    world = World(seed)
    server = make(name, torch.tensor(world.start), CLIENTS, LR, STALENESS, world.trusted(), **settings)
    for _ in range(rounds):
        client, update, version = world.next()
        server.submit(client, torch.tensor(update), version)
        world.models.append(server.model.numpy().copy())
    return server


OTHER_SETTINGS = {
    "kardam": {"malicious": 3, "quantile": 0.3, "kept": 1, "patience": 2, "frequency": "strict", "dampening": "off",
               "decay": 0.4},
    "basgd": {"buffers": 3, "interval": 1, "trim": 0},
    "sageflow": {"threshold": 0.5, "classes": 4, "decay": 1.0, "warmup": 30, "mode": "anchored",
                 "candidate": "trained"},
    "zeno++": {"rho": 0.04, "eps": 0.5, "every": 2},
    "aflguard": {"radius": 0.9, "test": "cosine", "every": 20},
    "async-defender": {"momentum": 0.5, "weight": "shifted", "reference": "last", "max_norm": 1.0, "warmup": 2,
                       "credibility": True},
}  # fmt: skip
NEEDS = {"sageflow": {"warmup": 10, "threshold": 1.5}}  # so that the filter shows


@pytest.mark.parametrize(
    ("name", "setting"), [(name, setting) for name, others in OTHER_SETTINGS.items() for setting in others]
)
def test_every_setting_matters(name, setting):
    usual = NEEDS.get(name, {})
    changed = {**usual, setting: OTHER_SETTINGS[name][setting]}
    assert not torch.equal(arrivals(name, 0, 150, **usual).model, arrivals(name, 0, 150, **changed).model)


def test_every_setting_is_covered_above():
    delta = {"sageflow": {"delta"}}  # matters in one mode alone, where a twin has it
    for name, others in OTHER_SETTINGS.items():
        assert set(DEFENSES[name].settings) - set(others) == delta.get(name, set())


# By hand


def pair(name, model, clients=3, lr=1.0, trusted=None, **settings):
    server = make(name, torch.tensor(model, dtype=F64), clients, lr, 4, trusted, **settings)

    def send(client, update, version):
        return server.submit(client, torch.tensor(update, dtype=F64), version)

    return server, send


def reference(*gradient):
    nothing = torch.zeros((), dtype=F64)
    return Trusted(lambda model: torch.tensor(gradient, dtype=F64), lambda model: (nothing, nothing))


def test_kardam_compares_with_what_was_applied_last():
    server, send = pair("kardam", [3.0, 4.0], dampening="off", malicious=0)
    assert float(send(0, [0.6, 0.8], 0).factor) == pytest.approx(0.2)  # nothing applied yet: |g| / |w| = 1 / 5
    receipt = send(0, [0.6, 1.8], 1)  # own and candidate coefficient are both 1 / 1
    assert receipt.accepted
    assert float(receipt.factor) == pytest.approx(1)
    receipt = send(1, [0.6, 3.8], 2)  # 2 over |(0.6, 1.8)|, above client 0's 1; client 1 has none yet
    assert not receipt.accepted
    assert float(receipt.factor) == pytest.approx(2 / math.hypot(0.6, 1.8))
    assert server.model.tolist() == pytest.approx([1.8, 1.4])


def test_kardam_ignores_an_upload_at_the_same_model():
    server, send = pair("kardam", [1.0, 1.0])
    send(0, [0.1, 0.0], 0)
    send(0, [9.0, 9.0], 0)
    assert server.rule.pushed.tolist() == [0, 0, 0]
    assert server.rule.last_updates[0].tolist() == [0.1, 0.0]


@pytest.mark.parametrize(
    ("clients", "malicious", "share"), [(30, 3, 0.2), (30, 8, 0.53), (30, 14, 0.93), (50, 10, 0.4)]
)
def test_kardam_strict_frequency_drops_two_f_of_n(clients, malicious, share):
    """Spec 7.4; constant updates have coefficient 0 and pass every other test."""
    _, send = pair("kardam", [1.0], clients, lr=1e-3, malicious=malicious, frequency="strict")
    chosen = np.random.default_rng(0).integers(clients, size=700)
    dropped = [not send(int(client), [1.0], version).accepted for version, client in enumerate(chosen)]
    assert np.mean(dropped[2 * clients :]) == pytest.approx(share, abs=0.04)
    assert not any(dropped[:1])


@pytest.mark.parametrize(("buffers", "updates"), [(5, 11.4), (10, 29.3)])
def test_basgd_needs_as_many_updates_as_a_coupon_collector(buffers, updates):
    """Spec 7.5"""
    server, send = pair("basgd", [1.0], buffers, buffers=buffers, interval=10**9)
    chosen = np.random.default_rng(1).integers(buffers, size=1200)
    for version, client in enumerate(chosen):
        send(int(client), [0.0], version)
    assert 1200 / int(server.rule.steps) == pytest.approx(updates, rel=0.15)


def test_basgd_steps_along_the_median_of_means():
    server, send = pair("basgd", [0.0, 0.0], buffers=3)
    send(0, [1.0, 0.0], 0)
    send(0, [3.0, 0.0], 1)  # mean 2
    send(1, [100.0, -7.0], 2)
    assert server.model.tolist() == [0, 0]
    assert send(2, [5.0, 1.0], 3).reason == "accepted: no buffer empty, a step"
    assert server.model.tolist() == [-5, 0]
    send(0, [1.0, 1.0], 4)  # an emptied buffer forgets
    send(1, [1.0, 1.0], 5)
    send(2, [1.0, 1.0], 6)
    assert server.model.tolist() == [-6, -1]


def test_basgd_spreads_the_clients_it_hears_from():
    server, send = pair("basgd", [0.0], clients=4, buffers=2, interval=3)
    for version, client in enumerate([0, 2, 0]):  # all in buffer 0
        send(client, [1.0], version)
    assert server.rule.mapping.tolist() == [0, 1, 1, 3]
    assert send(2, [3.0], 3).reason == "accepted: no buffer empty, a step"
    assert server.model.tolist() == [-2]


def test_sageflow_damps_by_staleness_and_scales_its_threshold():
    calm = Trusted(None, lambda model: (torch.tensor(1.0), torch.tensor(1.5)))
    server, send = pair("sageflow", [0.0], trusted=calm, warmup=1)
    assert send(0, [1.0], 0).reason == "accepted: warm-up"
    receipt = send(0, [1.0], 1)
    assert (receipt.reason, float(receipt.factor)) == ("rejected: entropy not below the threshold", 1.5)
    server, send = pair("sageflow", [0.0], trusted=calm, warmup=0, classes=100)  # threshold 2
    for _ in range(4):
        send(0, [1.0], 0)
    assert server.model.tolist() == pytest.approx([-(1 + 2**-0.5 + 3**-0.5 + 0.5)])


def test_sageflow_rejects_an_entropy_of_nan():
    lost = Trusted(None, lambda model: (torch.tensor(torch.nan), torch.tensor(torch.nan)))
    server, send = pair("sageflow", [2.0], trusted=lost, warmup=0)
    assert not send(0, [1.0], 0).accepted
    server, send = pair("sageflow", [2.0], trusted=lost, warmup=1, mode="anchored")
    send(0, [1.0], 0)
    assert server.model.tolist() == [2]


@pytest.mark.parametrize(("cosine", "rho", "eps", "accepted"), [
    (0.11, 0.001, 0.0, True), (0.09, 0.001, 0.0, False),  # rho / lr = 0.1
    (0.19, 0.002, 0.0, False), (0.21, 0.002, 0.0, True),
    (-0.01, 0.0, 0.0, False), (0.01, 0.0, 0.0, True),
    (-0.09, 0.0, 0.4, True), (-0.11, 0.0, 0.4, False),  # eps / |v|^2 = 0.1
])  # fmt: skip
def test_zeno_is_a_cosine_test(cosine, rho, eps, accepted):
    server, send = pair("zeno++", [0.0, 0.0], lr=0.01, trusted=reference(2.0, 0.0), rho=rho, eps=eps)
    receipt = send(0, [70 * cosine, 70 * math.sqrt(1 - cosine**2)], 0)
    assert bool(receipt.accepted) == accepted
    assert float(server.model.norm()) == pytest.approx(0.02 * accepted)  # always the trusted length


def test_zeno_takes_no_zero_update():
    server, send = pair("zeno++", [1.0, 1.0], trusted=reference(2.0, 0.0))
    assert not send(0, [0.0, 0.0], 0).accepted
    assert server.model.tolist() == [1, 1]


@pytest.mark.parametrize(("update", "radius", "accepted"), [
    ([-0.5, 0.0], 1.5, True),  # a short sign flip passes: r <= lambda - 1
    ([-0.51, 0.0], 1.5, False),
    ([2.5, 0.0], 1.5, True), ([2.51, 0.0], 1.5, False),  # at most (1 + lambda) |g_s|
    ([0.0, 0.1], 1.0, False), ([0.01, 0.1], 1.0, True),  # lambda <= 1 asks for a positive cosine
])  # fmt: skip
def test_aflguard_is_a_ball(update, radius, accepted):
    server, send = pair("aflguard", [0.0, 0.0], trusted=reference(1.0, 0.0), radius=radius)
    assert bool(send(0, update, 0).accepted) == accepted
    assert server.model.tolist() == ([-x for x in update] if accepted else [0, 0])


def test_async_defender_weighs_and_caps():
    server, send = pair("async-defender", [0.0, 0.0], warmup=1, max_norm=5.0)
    send(0, [6.0, 8.0], 0)  # clipped to length 5
    assert server.model.tolist() == pytest.approx([-3, -4])
    receipt = send(1, [0.0, 100.0], 1)  # capped to 5, cosine 0.8
    assert float(receipt.factor) == pytest.approx(0.8)
    assert server.model.tolist() == pytest.approx([-3, -8])
    assert send(2, [-1.0, -1.0], 2).reason == "rejected: cosine not positive (reduced AsyncDefender)"
    assert server.model.tolist() == pytest.approx([-3, -8])


# The protocol


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
            if name in ("zeno++", "aflguard"):
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
    for name in ("sageflow", "zeno++", "aflguard"):
        with pytest.raises(ValueError, match=rf"{name.replace('+', '.')}: trusted must be given"):
            make(name, start, 5, 0.1, 3)
    assert [name for name, defense in DEFENSES.items() if defense.needs_trusted] == ["sageflow", "zeno++", "aflguard"]


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


@pytest.mark.parametrize("case", ["kardam", "kardam strict", "async-defender credible"])
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
        np.testing.assert_allclose(float(receipt.factor), factor, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(server.model.numpy(), twin.models[-1], rtol=1e-9, atol=1e-9)


def twin_forgets(rule, client=0):
    if isinstance(rule, slow.Kardam):
        for memory in (rule.uploads, rule.lists):
            memory.pop(client, None)
        rule.ids = [-1 if i == client else i for i in rule.ids]
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
