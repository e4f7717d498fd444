"""A server whose fused rounds run on an emulated GPU, and whether it agrees with one on a CPU."""

import torch
from emulated import call, call_round, emulate, library
from fused_rounds import Arrivals, close, make

from secureafl_ext import _C
from secureafl_ext.engines import fused

F16, F32 = torch.float16, torch.float32
RULES = ("median", "trimmed_mean", "mean")
TENSORS = 18  # of the state, in a call of `step_`
SEEDS = range(4)  # 0, 1: bulk copies, at once or late; 2, 3: cp.async


def kernels():
    return library("round")


class Emulated:
    """`step_` of a GPU, blocks and warps in the order of a seed. phases: as the ops of a server with a single rank"""

    def __init__(self, seed, phases=False):
        self.seed, self.phases = seed, phases

    def __call__(self, verdict, changes, update, client, trained_on, now, new, models, *rest):
        state, (lr, quantile, max_norm, trust, rule, trim, *flags) = rest[:TENSORS], rest[TENSORS:]
        slots, factors, estimate = state[0], state[13], flags[1]
        tensors = verdict, changes, update, client, trained_on, models[now], models[new], models[now - 1], *state
        shape = *slots.shape, models.shape[1], *factors.shape
        whole = [*shape, slots.dtype == F16, now % 2, self.phases, RULES.index(rule), trim * estimate, *flags]
        return call_round(kernels().step, tensors, whole, [lr, quantile, max_norm, trust], self.seed)

    def settle(self, verdict, changes, *rest):
        *clients, trust = rest
        n, planes = clients[0].shape
        call(kernels().settle, (verdict, changes, *clients), [n, planes // 2, changes.shape[1]], [trust], self.seed)


def on_gpu(monkeypatch, n, d, step, **settings):
    """A server on an emulated GPU: its state is laid out for one."""
    tile_columns = _C.tile_columns
    with monkeypatch.context() as patch:
        patch.setattr(_C, "tile_columns", lambda cuda, *sizes: tile_columns(True, *sizes))
        patch.setattr(fused, "pass_blocks", lambda like, *sizes: kernels().pass_blocks(*sizes))
        server = make("cpu", n, d, **settings)
    engine, carried = server._engine, server._engine._per_client
    if server.config.memory:
        engine._settle = lambda: step.settle(engine._verdict, engine._changes, *carried, server.config.trust)
    return emulate(monkeypatch, server, step, fused)


class Strange(Arrivals):
    """Of all clients; some upload often. Every sixth update is not finite. From round `silent` on a third uploads."""

    def __init__(self, n, d, seed=0, silent=None):
        super().__init__(n, d, seed)
        self.active, self.silent = [*range(n), *4 * [*range(0, n, 7)]], silent

    def next(self, server):
        if server.version == self.silent:
            self.active = [client for client in self.active if client % 3 == 0]
        client, update, version = super().next(server)
        if server.version % 6 == 5:
            update[client % self.d] = (torch.nan, torch.inf, -torch.inf)[client % 3]
        return client, update, version


def agree(ours, plain):
    """But for rounding, whose differences grow with the rounds."""
    ours, plain = (server.state_dict() for server in (ours, plain))
    assert ours.keys() == plain.keys()
    close(ours, plain, 1e-4)
    for name in {"oldest", "clock", "last_epoch", "uploads", "counts", "status"} & plain.keys():
        assert torch.equal(ours[name], plain[name]), name
