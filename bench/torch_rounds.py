"""The server's round in plain torch, as one writes it without this package: straightforward, and with care.

Both judge, cap, step and remember as SecureAFL does, on updates to the current model. Their median is torch's: of an
even number of rows the lower middle one.
"""

import math

import torch
from torch import Tensor

from secureafl_ext.config import Config
from secureafl_ext.engines.history import CURVATURE


def middle(sy: Tensor, ss: Tensor) -> tuple[Tensor, Tensor]:
    """The scale (..) and the matrix M (.., 2m, 2m) of compact L-BFGS from the products of its pairs (.., m, m)."""
    scale = sy[..., -1, -1] / ss[..., -1, -1]
    lower, diagonal = sy.tril(-1), torch.diag_embed(sy.diagonal(dim1=-2, dim2=-1))
    above, below = torch.cat([-diagonal, lower.mT], -1), torch.cat([lower, scale[..., None, None] * ss], -1)
    return scale, torch.cat([above, below], -2)


def batched_estimate(
    model: Tensor, last_updates: Tensor, last_models: Tensor, dw: Tensor, dg: Tensor, trust: float = 1.0
) -> Tensor:
    """What every client would send now, all of them with all their pairs, in batched calls."""
    x = model - last_models
    scale, matrix = middle(torch.einsum("kad,kbd->kab", dw, dg), torch.einsum("kad,kbd->kab", dw, dw))
    right = torch.cat([torch.einsum("kad,kd->ka", dg, x), scale[:, None] * torch.einsum("kad,kd->ka", dw, x)], 1)
    of_dg, of_dw = torch.linalg.solve(matrix, right).chunk(2, 1)
    of_dw = scale[:, None] * of_dw
    correction = scale[:, None] * x - torch.einsum("ka,kad->kd", of_dg, dg) - torch.einsum("ka,kad->kd", of_dw, dw)
    cap = (trust * last_updates.norm(dim=1) / correction.norm(dim=1)).clamp(max=1)
    return last_updates + cap[:, None] * correction


class Memory:
    """What a server remembers, how it judges by that, and how it learns."""

    def __init__(self, config: Config, state: dict):
        """Takes over the state's tensors."""
        self.config, self.m = config, config.memory
        self.model = state["models"][0]
        self.last_updates, self.last_models = state["last_updates"], state["last_models"]  # (n, d)
        self.slots = torch.cat([state["dg"], state["dw"]], 1)  # (n, 2m, d), oldest first
        self.factors, self.recorded = state["factors"].float().flatten(), int(state["recorded"].sum())

    def judge(self, client: int, update: Tensor) -> Tensor:
        factor = (update - self.last_updates[client]).norm() / (self.model - self.last_models[client]).norm()
        self.factors[self.recorded % len(self.factors)] = factor
        self.recorded += 1
        return factor <= self.factors[: self.recorded].quantile(self.config.quantile)

    def step(self, client: int, update: Tensor, accepted: Tensor, rows: Tensor) -> Tensor:
        """Along the median of the estimates, the client's replaced by its update. Gives the step."""
        # A rejected row moves out of the way, to the side that leaves the lower middle of the others.
        rows[client] = torch.where(accepted, update, math.inf if len(rows) % 2 == 0 else -math.inf)
        self._remember(client, update)
        step = self.config.lr * rows.median(0).values
        self.model -= step
        return step

    def _remember(self, client: int, update: Tensor) -> None:
        dg, dw = update - self.last_updates[client], self.model - self.last_models[client]
        old, m = self.slots[client], self.m
        new = torch.cat([old[1:m], dg[None], old[m + 1 :], dw[None]])
        self.slots[client] = torch.where(dg @ dw > CURVATURE * (dw @ dw), new, old)
        self.last_updates[client], self.last_models[client] = update, self.model


class Straightforward:
    """Everything afresh in every round."""

    capturable = False  # linalg.solve looks whether it succeeded

    def __init__(self, config: Config, state: dict):
        self.memory = Memory(config, state)

    def submit(self, client: int, update: Tensor) -> None:
        memory = self.memory
        accepted = memory.judge(client, update)
        dg, dw = memory.slots[:, : memory.m], memory.slots[:, memory.m :]
        past = memory.last_updates, memory.last_models, dw, dg
        memory.step(client, update, accepted, batched_estimate(memory.model, *past, memory.config.trust))


class Tuned:
    """As far as torch goes: inner products are carried from round to round, factors kept until a client uploads."""

    capturable = True

    def __init__(self, config: Config, state: dict):
        self.memory = memory = Memory(config, state)
        x = memory.model - memory.last_models
        self.gram = memory.slots @ memory.slots.mT  # (n, 2m, 2m)
        self.along = torch.einsum("kad,kd->ka", memory.slots, x)  # (n, 2m)
        self.square, self.length = x.square().sum(1), memory.last_updates.norm(dim=1)  # (n)
        self.scale, self.factor = self._factors(self.gram)

    def submit(self, client: int, update: Tensor) -> None:
        accepted = self.memory.judge(client, update)
        step = self.memory.step(client, update, accepted, self._estimates())
        self._carry(client, step)

    def _estimates(self) -> Tensor:
        memory = self.memory
        weights = (self.factor @ self.along[..., None])[..., 0]  # (n, 2m)
        cross = self.scale * (weights * self.along).sum(1)
        own = (weights[:, None] @ self.gram @ weights[..., None])[:, 0, 0]
        norm = (self.scale**2 * self.square - 2 * cross + own).clamp(min=0).sqrt()
        cap = (memory.config.trust * self.length / norm).clamp(max=1)
        base = torch.addcmul(memory.last_updates, (cap * self.scale)[:, None], memory.model - memory.last_models)
        return torch.baddbmm(base[:, None], (cap[:, None] * weights)[:, None], memory.slots, alpha=-1)[:, 0]

    def _carry(self, client: int, step: Tensor) -> None:
        """All products with x = model - last_model follow the step; the client's own are taken afresh."""
        memory = self.memory
        self.along -= (memory.slots.flatten(0, 1) @ step).view_as(self.along)
        self.square -= 2 * ((memory.model + step) @ step - memory.last_models @ step) - step @ step
        slots, x = memory.slots[client], memory.model - memory.last_models[client]
        self.gram[client], self.along[client], self.square[client] = slots @ slots.T, slots @ x, x @ x
        self.length[client] = memory.last_updates[client].norm()
        self.scale[client], self.factor[client] = self._factors(self.gram[client])

    def _factors(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """What turns products into weights: diag(1.., scale..) M^-1 diag(1.., scale..)."""
        m = self.memory.m
        scale, matrix = middle(gram[..., m:, :m], gram[..., m:, m:])
        sides = torch.cat([torch.ones_like(gram[..., 0, :m]), scale[..., None].expand_as(gram[..., 0, :m])], -1)
        return scale, sides[..., :, None] * torch.linalg.inv_ex(matrix).inverse * sides[..., None, :]
