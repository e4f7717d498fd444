"""look_at: all clients of a server at one time, and how their updates lie to each other."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .verdict import Look

ROWS = 512  # of the similarities at a time: a fleet of thousands must not need its table twice
NOISE = 0.2  # of the median norm: a mean update below has no direction


def look_at(server: Any) -> Look:
    """All clients of a SecureAFL now. Waits for the device."""
    without, present = server.left_out(), server.present
    with_others, with_itself = agreement(getattr(server, "similarity", None), present)
    return Look(
        at=time.time(),
        version=server.version,
        stats=server.stats(),
        seen=server.seen.cpu().numpy(),
        live=server.live.cpu().numpy(),
        present=present.cpu().numpy(),
        weights=server.weights().cpu().numpy(),
        left_out=None if without is None else without.cpu().numpy(),
        threshold=float(server.threshold()),
        with_others=with_others,
        with_itself=with_itself,
    )


def agreement(means: Tensor | None, present: Tensor) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(with_others, with_itself) of Look. None if the rule keeps no similarities.

    means: (n, n) mean inner products of the clients' updates    present: (n) bool
    """
    if means is None:
        return None, None
    squares = means.diagonal()
    known = present & (squares != 0)  # an upload that can be compared with one before it
    norms = squares.clamp(min=0).sqrt()
    if not known.any():
        nothing = np.full(len(means), np.nan)
        return nothing, nothing
    with_itself = torch.where(known, norms / norms[known].median(), torch.nan)
    steady = known & (with_itself > NOISE)
    scale = torch.where(steady, 1 / norms, 0)  # (n): of unit length from here on
    with_all = scale * torch.cat([rows @ scale for rows in means.split(ROWS)])  # (n): a client with the sum of all
    rest = (with_all.sum() - 2 * with_all + 1).clamp(min=1)  # (n): squared length of the sum of all others
    with_others = torch.where(steady, (with_all - 1) / rest.sqrt(), torch.nan).clamp(-1, 1)
    return with_others.cpu().numpy(), with_itself.cpu().numpy()


def similarity(server: Any, clients: Sequence[int]) -> np.ndarray | None:
    """(k, k) cosines of the mean updates of these clients; NaN where they have not met. None if the rule keeps no
    similarities."""
    means = getattr(server, "similarity", None)
    if means is None:
        return None
    index = torch.as_tensor(list(clients), dtype=torch.int64, device=means.device)
    products = means.index_select(0, index).index_select(1, index)
    norms = products.diagonal().clamp(min=0).sqrt()
    cosines = products / (norms[:, None] * norms)
    return torch.where(cosines.isfinite(), cosines.clamp(-1, 1), torch.nan).cpu().numpy()
