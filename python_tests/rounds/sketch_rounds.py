"""Rounds of sketch_step_ beside plain torch ops on sketches: their servers, and whether two of them agree."""

import pytest
import torch
from emulated import JUDGED, call_round, library

from secureafl_ext import RECOMMENDED, SecureAFL
from secureafl_ext.engines import averaged

EQUAL = ("seen", "met", "recorded", "counts", "rounds", "clock", "last_epoch", "uploads")
CLOSE = ("models", "update_sketches", "model_sketches", "means", "squares", "total", "noise", "norms", "shift")


def make(device, n, d, fused=True, **settings):
    """A server whose rounds are the op, or with fused=False plain ops."""
    settings = {"filter": True, "lr": 0.1, "max_staleness": 4, **settings}
    settings = {**RECOMMENDED, "sketch": 64, "sketch_seed": 7, **settings}
    dtype = settings.get("history_dtype", torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(averaged, "fits", lambda *_: False)
        server = SecureAFL(torch.zeros(d, dtype=dtype, device=device), n, **settings)
    assert server._engine._fused == fused
    return server


def agree(ours, theirs, bound=1e-4):
    """Two servers of any kind. The bound is relative to the largest number of a client."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for name in (name for name in EQUAL if name in mine):
        assert torch.equal(torch.as_tensor(mine[name]).cpu(), torch.as_tensor(other[name]).cpu()), name
    for name in (name for name in CLOSE if name in mine):
        a, b = (state[name].cpu().double().reshape(len(state[name]), -1) for state in (mine, other))
        assert ((a - b).abs() <= bound * (b.abs().amax(1, keepdim=True) + 1e-30)).all(), name
    torch.testing.assert_close(mine["factors"].cpu(), other["factors"].cpu(), rtol=1e-3, atol=0)
    assert ours.stats() == theirs.stats()


class Emulated:
    """`sketch_step_` of a GPU, warps in the order of a seed."""

    def __init__(self, seed):
        self.run, self.seed = library("sketch").sketch_step, seed

    def __call__(self, update, client, trained_on, now, new, models, *rest):
        state, (lr, quantile, max_norm, *whole, least_share) = rest[:18], rest[18:]
        steps = len(state[7]) > 0  # there is a total
        tensors = update.contiguous(), client, trained_on.contiguous(), models[now], models[new], *state
        sizes = *state[4].shape, models.shape[1], *state[-4].shape
        results = *JUDGED, torch.float64  # the weight
        return call_round(
            self.run, tensors, [*sizes, *whole, steps], [lr, quantile, max_norm, least_share], self.seed, results
        )
