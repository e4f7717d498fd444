"""Rounds of one op beside composed ones, for kinship and support: their clients, and whether two servers agree."""

import pytest
import torch
from emulated import JUDGED, call_round, library

from secureafl_ext import SecureAFL
from secureafl_ext.engines import kinship
from secureafl_ext.engines.kinship import FusedKinship

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
AVERAGED = {"kinship", "kin_centre", "similarity", "shift", "mean_updates", "total", "noise"}
SETTINGS = {"rule": "kinship", "memory": 0, "lr": 0.1, "max_staleness": 4}
# What a round depends on, for both rules.
VARIED = [
    {},
    {"quantile": 0.5},
    {"filter": False},
    {"receive": False},
    {"step": "received"},
    {"step": "received", "store": "all", "on_reject": "step"},
    {"window": 7},
    {"max_norm": 0.5},
    {"max_norm": INF},
    {"max_staleness": 0},
    {"quantile": 0.0, "store": "all", "on_reject": "step"},
    {"factors": "pooled", "store": "all", "on_reject": "step"},
    {"on_reject": "step"},
]


def with_dtypes(many):
    """(settings, dtype of the composed round): all in float64, some in float32. Both dtypes take the same way."""
    return [(settings, F64) for settings in many] + [(settings, F32) for settings in many[::5]]


def make(device, n, d, **settings):
    server = SecureAFL(torch.zeros(d, device=device), n, **{**SETTINGS, **settings})
    assert isinstance(server._engine, FusedKinship)
    return server


def composed(create):
    """The server that `create` makes, its rounds of plain ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinship, "fits", lambda *_: False)
        return create()


def oracle(n, d, dtype=F64, **settings):
    settings = {**SETTINGS, "history_dtype": dtype, **settings}
    return composed(lambda: SecureAFL(torch.zeros(d, dtype=dtype), n, **settings))


class Arrivals:
    """(client, update, version): two by two alike, every third a colluder, one against all; now and then a strange one.

    However many clients there are, a dozen do the talking, the first and the last among them. What they send does not
    depend on the model, so that rounding does not grow.
    """

    def __init__(self, n, d, seed=0, strange=True, pull=1.0):
        self.random = torch.Generator().manual_seed(seed)
        self.active = sorted({0, n - 1, *torch.randperm(n, generator=self.random)[:10].tolist()})
        axes = torch.randn(len(self.active) + 2, d, generator=self.random)
        self.means = {}
        for i, client in enumerate(self.active):
            self.means[client] = pull * (axes[-1] if i % 3 == 2 else axes[i // 3] + 0.4 * axes[-2])
        self.means[self.active[-1]] = -sum(self.means.values()) / len(self.active)
        self.d, self.strange, self.count, self.sent = d, strange, 0, {}

    def draw(self, high):
        return int(torch.randint(high, (), generator=self.random))

    def next(self, server):
        client = self.active[self.draw(len(self.active))]
        version = max(0, server.version - self.draw(server.config.max_staleness + 2))  # one too old among them
        update = self.means[client] + 0.3 * torch.randn(self.d, generator=self.random)
        self.count += 1
        last = self.sent.get(client)
        match self.count % 61 if self.strange else 0:
            case 7 | 33:
                update[self.draw(self.d)] = (NAN, INF, -INF)[self.draw(3)]
            case 11 | 44:
                update = torch.zeros(self.d)
            case 17:
                update = 1e20 * update
            case 23 | 50:
                update = 30 * update
            case 29 | 37 if last:
                version = last[1]  # the model of last time, another update
            case 41 | 47 if last:
                update, version = last  # the same once more
            case 53:
                update = 1e-30 * update
        self.sent[client] = update, version
        return client, update, version


def newest_only(arrivals, server, rounds):
    """So many (client, update, version), each on the server's newest model."""
    for _ in range(rounds):
        client, update, _ = arrivals.next(server)
        yield client, update.to(server.model), server.version


def drive(servers, arrivals, rounds, bound=1e-5):
    """Every server takes the same; they agree on each verdict and model. What the verdicts were."""
    reasons = []
    for _ in range(rounds):
        client, update, version = arrivals.next(servers[0])
        receipts = [server.submit(client, update.to(server.model), version) for server in servers]
        assert len({receipt.reason for receipt in receipts}) == 1
        factors = [float(receipt.factor) for receipt in receipts]
        assert factors == pytest.approx([factors[0]] * len(factors), rel=1e-3, nan_ok=True)
        weights = [NAN if receipt.refused else float(receipt.weight) for receipt in receipts]
        assert weights == pytest.approx([weights[0]] * len(weights), rel=1e-4, abs=1e-7, nan_ok=True)
        first = servers[0].model.cpu().double()
        for server in servers[1:]:
            assert (server.model.cpu().double() - first).norm() <= bound * first.norm()
        reasons.append(receipts[0].reason)
    return reasons


def agree(ours, theirs, bound=1e-5):
    """Two servers of any kind."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for name in {"seen", "met", "pairs", "recorded", "counts", "rounds"} & mine.keys():
        assert torch.equal(mine[name].cpu(), other[name].cpu()), name
    seen = other["seen"].cpu()
    for name, rows in (("models", ...), ("last_updates", seen), ("last_models", seen)):
        if name not in other:  # with keep_last=False
            continue
        a, b = (state[name].cpu().double()[rows] for state in (mine, other))
        assert ((a - b).norm(dim=1) <= bound * b.norm(dim=1)).all(), name
    if "products" in mine:
        a, b = (state["products"].cpu()[seen][:, seen] for state in (mine, other))
        lengths = b.diagonal().sqrt()
        assert ((a - b).abs() <= bound * lengths[:, None] * lengths).all()
    if "norms" in mine:
        assert torch.allclose(mine["norms"].cpu(), other["norms"].cpu(), rtol=bound)
    for name in AVERAGED & mine.keys():
        assert torch.allclose(mine[name].cpu().double(), other[name].cpu().double(), rtol=bound, atol=bound), name
    assert torch.allclose(mine["factors"].cpu(), other["factors"].cpu(), rtol=1e-3)
    assert ours.stats() == theirs.stats()


def resumed_crosswise(plain, ours, composed, folder, device):
    """Each is saved, and resumed by the engine of the other. composed: makes servers whose rounds are plain ops"""
    n, d = ours.clients, ours.model.numel()
    arrivals = Arrivals(n, d)
    drive((plain, ours), arrivals, 100)
    plain.save(folder / "plain")
    ours.save(folder / "ours")
    there = SecureAFL.load(folder / "plain", device=device)
    back = composed(lambda: SecureAFL.load(folder / "ours"))
    assert type(there._engine) is type(ours._engine) and type(back._engine) is type(plain._engine)
    drive((plain, ours, there, back), arrivals, 100)
    for server in (ours, there, back):
        agree(server, plain)


def take_turns(n, d, *servers):
    """Everybody uploads six times; a quarter of the clients sends nearly the same."""
    random = torch.Generator().manual_seed(0)
    base = torch.randn(n // 5, d, generator=random)
    for t in range(6 * n):
        client = t % n
        update = (base[0] if client < n // 4 else base[client % len(base)]) + 0.2 * torch.randn(d, generator=random)
        for server in servers:
            server.submit(client, update.to(server.model), server.version)


def left_out(server):
    return server.seen & ~server._engine.kinship.kept(server.seen)


class Emulated:
    """`kin_step_` of a GPU or another round with so many tensors of state, warps in the order of a seed."""

    def __init__(self, seed, op="kin_step", tensors=15):
        self.run, self.seed, self.tensors = getattr(library("kin"), op), seed, tensors

    def __call__(self, update, client, trained_on, now, new, models, *rest):
        state, (lr, quantile, max_norm, *others) = rest[: self.tensors], rest[self.tensors :]
        flags, bounds = self.split(others)
        flags = [*flags, *self.more(state)]
        tensors = update.contiguous(), client, trained_on.contiguous(), models[now], models[new], *state
        whole = [len(state[2]), models.shape[1], *state[-4].shape, *flags]
        results = *JUDGED, torch.float64  # the weight
        return call_round(self.run, tensors, whole, [lr, quantile, max_norm, *bounds], self.seed, results)

    def split(self, others):
        """(flags, bounds)"""
        return others[:8], others[8:]

    def more(self, state):
        """More flags, from the tensors."""
        return []


class EmulatedMeans(Emulated):
    """`mean_step_`: its steps are always along the update alone."""

    def __init__(self, seed):
        super().__init__(seed, "mean_step", tensors=17)

    def split(self, others):
        *flags, quorum = others[:7]
        return [*flags, True, quorum], others[7:]

    def more(self, state):
        return [state[3].dtype == torch.bfloat16]


def arguments_of_a_round(server, engine, monkeypatch):
    """The arguments that the op gets in one round. engine: the module of the server's engine, whose `step` is the op"""
    step, calls = engine.step, []
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda *arguments: calls.append(arguments) or step(*arguments))
        server.submit(1, torch.ones_like(server.model), server.version)
    return calls[0]


def refuses(server, engine, monkeypatch, name, value, words):
    """The op refuses a round with this value of one argument in these words, and the server stays as it was."""
    step = engine.step
    names = [argument.name for argument in step._schema.arguments]
    arguments = list(arguments_of_a_round(server, engine, monkeypatch))
    before = server.state_dict()
    arguments[names.index("now_row")], arguments[names.index("next_row")] = 0, 1
    arguments[names.index(name)] = value
    with pytest.raises(RuntimeError) as refusal:
        step(*arguments)
    assert str(refusal.value) == f"{step._schema.name}: {words}"
    after = server.state_dict()
    assert all(torch.equal(torch.as_tensor(after[key]), torch.as_tensor(value)) for key, value in before.items())
