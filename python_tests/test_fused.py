"""The fused round of the GPU against the composed one: same arrivals, same verdicts, same models but for rounding."""

import pytest
import torch
from oracles import relative_error

from secureafl_ext import SecureAFL, fused

STEP = torch.ops.secureafl.step_.default
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Arrivals:
    """Quadratic clients in float32, every fifth of which sends noise; computed once, on the CPU server's models."""

    def __init__(self, n, d, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(n, d, generator=self.random)
        self.curvature = 0.5 + torch.rand(n, d, generator=self.random)
        # However many there are, a dozen do the talking, so that pairs come together; the first and last among them.
        self.active = sorted({0, n - 1, *torch.randperm(n, generator=self.random)[:10].tolist()})
        self.d = d

    def next(self, server):
        client = self.active[int(torch.randint(len(self.active), (), generator=self.random))]
        delay = int(torch.randint(server.config.max_staleness + 1, (), generator=self.random))
        version = max(0, server.version - delay)
        model = server._models[version % len(server._models)].cpu()
        update = self.curvature[client] * (model - self.centres[client])
        noise = torch.randn(self.d, generator=self.random)
        return client, 3 * noise if client % 5 == 4 else update + 0.05 * noise, version


def pair(n, d, **settings):
    settings = {"lr": 0.1, "max_staleness": 4, **settings}
    cpu, gpu = (SecureAFL(torch.zeros(d, device=device), n, **settings) for device in ("cpu", "cuda"))
    assert isinstance(gpu._engine, fused.Fused) and not isinstance(cpu._engine, fused.Fused)
    return cpu, gpu


def drive(servers, arrivals, rounds):
    """Every server takes what the first one's clients send; they must agree on each verdict."""
    for _ in range(rounds):
        client, update, version = arrivals.next(servers[0])
        receipts = [server.submit(client, update.to(server.model.device), version) for server in servers]
        assert len({receipt.reason for receipt in receipts}) == 1
        factors = [float(receipt.factor) for receipt in receipts]
        assert factors == pytest.approx([factors[0]] * len(factors), rel=1e-2, nan_ok=True)


def close(ours, theirs, bound=5e-3):
    """Two states, whichever kind: what both have agrees."""
    for name in ("models", "last_updates", "last_models", "dw", "dg"):
        difference = (ours[name].cpu().double() - theirs[name].cpu().double()).norm()
        assert difference <= bound * theirs[name].norm().cpu(), name
    for name in ("pairs", "seen", "recorded"):
        assert torch.equal(ours[name].cpu(), theirs[name].cpu()), name


# n: around every edge of how rows are spread over threads (kSpreads in csrc/cuda/round.cu)
@pytest.mark.parametrize("n", [1, 2, 7, 50, 56, 57, 112, 113, 224, 225, 300, 448])
def test_any_number_of_clients(n):
    servers = pair(n, 70)
    drive(servers, Arrivals(n, 70), 30)
    close(servers[1].state_dict(), servers[0].state_dict())


@pytest.mark.parametrize("d", [1, 31, 32, 33, 1000, 20_011])
def test_any_number_of_parameters(d):
    servers = pair(9, d)
    drive(servers, Arrivals(9, d), 40)
    close(servers[1].state_dict(), servers[0].state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {"memory": 1},
        {"memory": 2},
        {"memory": 4},
        {"memory": 5},
        {"rule": "mean"},
        {"rule": "trimmed_mean", "trim": 2},
        {"rule": "trimmed_mean", "trim": 2, "store": "accepted"},
        {"store": "accepted", "quantile": 0.5},
        {"window": 5},
        {"trust": 0.2},
        {"trust": float("inf")},
        {"max_norm": 0.5},
        {"estimate": False},
        {"filter": False},
        {"receive": False},
        {"max_staleness": 0},
    ],
    ids=str,
)
def test_every_setting(settings):
    for n in (12, 300):
        servers = pair(n, 64, **settings)
        drive(servers, Arrivals(n, 64), 40)
        close(servers[1].state_dict(), servers[0].state_dict())
        ours, theirs = servers[1].stats(), servers[0].stats()
        assert {**ours, "capped": 0, "fallbacks": 0} == {**theirs, "capped": 0, "fallbacks": 0}
        assert abs(ours["capped"] - theirs["capped"]) <= 2 and abs(ours["fallbacks"] - theirs["fallbacks"]) <= 2


def test_carried_products_do_not_drift():
    """After 300 rounds, among them long silences, the sums still are what a fresh computation gives."""
    server = SecureAFL(torch.zeros(500, device="cuda"), 40, lr=0.05)
    arrivals = Arrivals(40, 500)
    for _ in range(300):
        client, update, version = arrivals.next(server)
        server.submit(client, update.cuda(), version)
    carried = server.state_dict()
    fresh = SecureAFL(torch.zeros(500, device="cuda"), 40, lr=0.05)
    fresh.load_state_dict({name: value for name, value in carried.items() if name not in ("gram", "along", "oldest")})
    again = fresh.state_dict()
    rotated = (torch.arange(3).cuda() + carried["oldest"][:, None]) % 3  # the fresh one starts its slots anew
    for part in (slice(0, 3), slice(3, 6)):
        assert relative_error(carried["along"][:, part].gather(1, rotated), again["along"][:, part]) < 1e-5
    assert relative_error(carried["along"][:, 6:], again["along"][:, 6:]) < 1e-5


def test_saved_on_one_device_resumed_on_the_other(tmp_path):
    cpu, gpu = pair(20, 80)
    arrivals = Arrivals(20, 80)
    drive((cpu, gpu), arrivals, 60)
    cpu.save(tmp_path / "cpu")
    gpu.save(tmp_path / "gpu")
    there, back = SecureAFL.load(tmp_path / "cpu", device="cuda"), SecureAFL.load(tmp_path / "gpu")
    assert isinstance(there._engine, fused.Fused) and not isinstance(back._engine, fused.Fused)
    drive((cpu, gpu, there, back), arrivals, 20)
    for server in (gpu, there, back):
        close(server.state_dict(), cpu.state_dict(), 2e-2)


def test_saved_killed_and_resumed_is_bit_identical(tmp_path):
    _, whole = pair(20, 80)
    _, half = pair(20, 80)
    arrivals = Arrivals(20, 80)
    drive((whole, half), arrivals, 70)
    half.save(tmp_path / "half")
    resumed = SecureAFL.load(tmp_path / "half", device="cuda")
    drive((whole, resumed), arrivals, 50)
    ours, theirs = resumed.state_dict(), whole.state_dict()
    assert all(torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)) for name, value in theirs.items())


def test_two_runs_are_bit_equal():
    for n in (30, 300):
        cpu, one = pair(n, 3000)
        _, two = pair(n, 3000)
        drive((cpu, one, two), Arrivals(n, 3000), 30)
        ours, theirs = one.state_dict(), two.state_dict()
        assert all(torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)) for name, value in theirs.items())


def test_schema_tells_what_is_written_to(monkeypatch):
    _, gpu = pair(20, 300)
    drive((gpu,), Arrivals(20, 300), 40)
    calls = []
    monkeypatch.setattr(fused, "step", lambda *arguments: calls.append(arguments) or STEP(*arguments))
    gpu.submit(3, torch.ones(300, device="cuda"), gpu.version)
    checks = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(STEP, calls[0], test_utils=checks).values()) == {"SUCCESS"}


def test_state_that_cannot_be_written_in_place_is_refused():
    _, gpu = pair(4, 30)
    gpu._engine.gram = gpu._engine.gram.T.contiguous().T
    with pytest.raises(RuntimeError, match=r"step_: gram must be contiguous, got strides \(1, 4\)"):
        gpu.submit(0, torch.ones(30, device="cuda"), 0)


def test_captured_in_a_cuda_graph():
    cpu, gpu = pair(20, 3000)
    _, twin = pair(20, 3000)
    arrivals = Arrivals(20, 3000)
    drive((cpu, gpu, twin), arrivals, 40)
    client, update, version = arrivals.next(cpu)
    held = update.cuda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        receipt = gpu.submit(client, held, version)
    graph.replay()
    expected = twin.submit(client, held, version)
    assert torch.equal(receipt.accepted, expected.accepted)
    assert torch.equal(receipt.factor, expected.factor) or receipt.factor.isnan() == expected.factor.isnan()
    assert torch.equal(gpu.model, twin.model)


def test_non_finite_and_huge_updates_leave_everything_finite():
    server = SecureAFL(torch.zeros(40, device="cuda"), 6, lr=10.0, max_norm=1e38, filter=False)
    for step in range(60):
        update = torch.full((40,), 3e38 * (-1) ** (step // 7), device="cuda")
        if step % 4 == 3:
            update[step % 40] = (torch.nan, torch.inf, -torch.inf)[step % 3]
        server.submit(step % 6, update, max(0, server.version - step % 4))
    state = server.state_dict()
    assert all(
        state[name].isfinite().all() for name in ("models", "last_updates", "last_models", "dw", "dg", "weights")
    )
    assert server.stats()["non_finite"] == 15


def test_memory_at_the_papers_size():
    """n = 50, d = 139,960, float32: at most 0.30 GB with all scratch, and no n x d temporary in a round."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    server = SecureAFL(torch.zeros(139_960, device="cuda"), 50)
    held = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    server.submit(3, torch.ones(139_960, device="cuda"), 0)
    assert held <= 0.30e9
    assert torch.cuda.max_memory_allocated() - before - held < 139_960 * 50 * 4 / 4
