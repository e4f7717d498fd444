"""A fused server beside a composed one: their clients, the same rounds for both, and whether they agree."""

import pytest
import torch

from secureafl_ext import SecureAFL
from secureafl_ext.engines import fused

HISTORIES = [torch.float32, torch.float16]


class Arrivals:
    """Quadratic clients in float32, every fifth of which sends noise; computed once, on the first server's models."""

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


def make(device, n, d, **settings):
    server = SecureAFL(torch.zeros(d, device=device), n, **{"lr": 0.1, "max_staleness": 4, **settings})
    assert isinstance(server._engine, fused.Fused)
    return server


def composed(create):
    """The server that `create` makes, its rounds of plain ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "unsupported", lambda *_: "this test")
        return create()


def pair(device, n, d, **settings):
    """(composed, on the CPU; fused)"""
    settings = {"lr": 0.1, "max_staleness": 4, **settings}
    return composed(lambda: SecureAFL(torch.zeros(d), n, **settings)), make(device, n, d, **settings)


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
