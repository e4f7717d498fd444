"""look_at: all clients of a server at one time, and how their updates lie to each other."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rules.support import KIN
from .verdict import Look

ROWS = 512  # of the similarities at a time: a fleet of thousands must not need its table twice
NOISE = 0.2  # of the median norm: a mean update below has no direction


def look_at(server: Any) -> Look:
    """All clients of a SecureAFL now. Waits for the device. No round must come meanwhile, or the fields would be of
    different versions; Watched sees to that."""
    without, present = server.left_out(), server.present
    with_others, with_itself, group = agreement(getattr(server, "similarity", None), present)
    return Look(
        at=time.time(),
        version=server.version,
        stats=server.stats(),
        seen=copied(server.seen),
        live=copied(server.live),
        present=copied(present),
        weights=copied(server.weights()),
        left_out=None if without is None else copied(without),
        threshold=float(server.threshold()),
        with_others=with_others,
        with_itself=with_itself,
        group=group,
    )


def copied(values: Tensor) -> np.ndarray:
    """On a CPU numpy() shares the server's memory, which the next round changes."""
    return values.cpu().numpy().copy()


def agreement(means: Tensor | None, present: Tensor) -> tuple[np.ndarray | None, ...]:
    """(with_others, with_itself, group) of Look. None if the rule keeps no similarities.

    means: (n, n) mean inner products of the clients' updates    present: (n) bool
    """
    if means is None:
        return None, None, None
    squares = means.diagonal()
    known = present & (squares != 0)  # an upload that can be compared with one before it
    norms = squares.clamp(min=0).sqrt()
    if not known.any():
        nothing = np.full(len(means), np.nan)
        return nothing, nothing, nothing
    with_itself = torch.where(known, norms / norms[known].median(), torch.nan)
    steady = known & (with_itself > NOISE)
    scale = torch.where(steady, 1 / norms, 0)  # (n): of unit length from here on
    with_all = scale * torch.cat([rows @ scale for rows in means.split(ROWS)])  # (n): a client with the sum of all
    rest = (with_all.sum() - 2 * with_all + 1).clamp(min=1)  # (n): squared length of the sum of all others
    with_others = torch.where(steady, (with_all - 1) / rest.sqrt(), torch.nan).clamp(-1, 1)
    group = torch.where(steady, group_sizes(means, scale), torch.nan)
    return with_others.cpu().numpy(), with_itself.cpu().numpy(), group.cpu().numpy()


def group_sizes(means: Tensor, scale: Tensor) -> Tensor:
    """(n) float64: how many clients are similar to each, or how many are to these on average, if that is fewer. So a
    client between two groups does not seem to be in a large one.

    means: (n, n)    scale: (n) that makes them cosines; 0 for clients that are similar to nobody
    """

    def alike() -> Iterator[Tensor]:  # (ROWS, n) at a time, each 0 or 1
        for rows, scales in zip(means.split(ROWS), scale.split(ROWS), strict=True):
            yield (rows * scale > KIN / scales[:, None]).double()

    sizes = torch.cat([part.sum(1) for part in alike()])
    of_them = torch.cat([part @ sizes for part in alike()]) / sizes.clamp(min=1)
    return torch.minimum(sizes, of_them)


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
