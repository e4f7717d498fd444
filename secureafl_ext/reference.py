"""The five ops in plain torch, for any float dtype, one client at a time: the reference for the kernels.

The paper's letters: S -> dw, Y -> dg, mu -> scale, w -> model, g -> update, phi's model -> last_model.
"""

import torch
from torch import Tensor


def median(updates: Tensor, mask: Tensor | None = None) -> Tensor:
    rows = _kept(updates, mask).sort(dim=0).values  # NaN last
    count = len(rows)
    if count == 0:
        return updates.new_zeros(updates.shape[1])
    middle = rows[(count - 1) // 2 : count // 2 + 1]
    return middle.double().mean(dim=0).to(updates.dtype)


def trimmed_mean(updates: Tensor, trim: int, mask: Tensor | None = None) -> Tensor:
    rows = _kept(updates, mask).sort(dim=0).values
    if trim < 0 or 2 * trim >= len(rows):
        raise ValueError(f"trim must leave a row, 0 <= 2 * trim < {len(rows)}, got trim = {trim}")
    return rows[trim : len(rows) - trim].double().mean(dim=0).to(updates.dtype)


def lipschitz(update: Tensor, last_update: Tensor, model: Tensor, last_model: Tensor) -> Tensor:
    moved_update = torch.linalg.vector_norm(update.double() - last_update.double())
    moved_model = torch.linalg.vector_norm(model.double() - last_model.double())
    if moved_update == 0 and moved_model == 0:
        return moved_update
    return moved_update / moved_model


def hessian_vector_product(dw: Tensor, dg: Tensor, x: Tensor) -> Tensor | None:
    """B x (Algorithm 2) for one client's pairs, dw and dg (m, d), oldest first; None if M is singular."""
    S, Y = dw.T, dg.T  # (d, m)  # noqa: N806 - the paper's letters
    A = S.T @ Y  # noqa: N806
    D, L = A.diag().diag(), A.tril(-1)  # strictly lower: otherwise B s_m = y_m would not hold  # noqa: N806
    scale = A[-1, -1] / (S[:, -1] @ S[:, -1])
    M = torch.cat([torch.cat([-D, L.T], 1), torch.cat([L, scale * (S.T @ S)], 1)])  # noqa: N806
    right = torch.cat([Y.T @ x, scale * (S.T @ x)])
    solution, info = torch.linalg.solve_ex(M, right)
    if info != 0 or not solution.isfinite().all():
        return None
    return scale * x - torch.cat([Y, scale * S], 1) @ solution


def estimate(
    model: Tensor, last_updates: Tensor, last_models: Tensor, dw: Tensor, dg: Tensor, pairs: Tensor, trust: float = 1.0
) -> Tensor:
    estimates = last_updates.clone()
    for k, count in enumerate(pairs.tolist()):
        if count == 0:
            continue
        correction = hessian_vector_product(dw[k, :count], dg[k, :count], model - last_models[k])
        if correction is None or not correction.isfinite().all():
            continue
        most = trust * last_updates[k].norm() if trust != float("inf") else torch.inf
        norm = correction.norm()
        if norm > most:
            correction = correction * (most / norm)
        estimates[k] += correction
    return estimates


def aggregate(
    model: Tensor,
    update: Tensor,
    client: int,
    accepted: Tensor,
    last_updates: Tensor,
    last_models: Tensor,
    dw: Tensor,
    dg: Tensor,
    pairs: Tensor,
    seen: Tensor,
    trust: float = 1.0,
    rule: str = "median",
    trim: int = 0,
) -> Tensor:
    rows = estimate(model, last_updates, last_models, dw, dg, pairs, trust)
    rows[client] = update
    takes_part = seen.clone()
    takes_part[client] = accepted
    count = int(takes_part.sum())
    if rule == "median":
        return median(rows, takes_part)
    trim = trim if rule == "trimmed_mean" else 0
    if 2 * trim >= count:
        return torch.zeros_like(model)
    return trimmed_mean(rows, trim, takes_part)


def _kept(updates: Tensor, mask: Tensor | None) -> Tensor:
    return updates if mask is None else updates[mask]
