"""Q: the recorded Lipschitz factors, and the quantile that the filter compares a new factor with.

The fused rounds do the same in C++ (csrc/round/quantile.h).
"""

import torch
from torch import Tensor

from ..config import Config
from .factor_counts import (
    COLUMNS,
    ROWS,
    count_factors,
    counted_below,
    counts_of_row,
    empty_counts,
    keys_of,
    largest_with,
)

CLIENT = 2**32 - 1  # weight of one client in total with a list per client: whole numbers, so that sums are exact


def empty_factors(config: Config, clients: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(factors (lists, room) float64, recorded (lists) int64: the number of factors ever put into each list, counts)

    A list is a ring buffer; empty places hold inf. There is one list per client, or one for all. counts
    (factor_counts.py): a Q that keeps all factors counts those that its full list has no room for. These are
    rounded up by less than 2^-12 of their value, so the filter accepts every update that the exact factors accept.
    """
    lists = 1 if config.factors == "pooled" else clients
    factors = torch.full((lists, config.room), torch.inf, dtype=torch.float64, device=device)
    return factors, torch.zeros(lists, dtype=torch.int64, device=device), empty_counts(config.keeps_all, device)


def factor_weights(factors: Tensor, recorded: Tensor, counts: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of every place of Q when a new factor of client (1) arrives, and the place (1) that it takes.

    weights: (lists, room) int64; 0 for empty places and for the one that is replaced. All factors of a list weigh the
    same, and all lists weigh the same in total: otherwise a client that uploads often would choose the quantile. With
    counts nothing is replaced: see record_factor.
    """
    lists, room = factors.shape
    own = client if lists > 1 else torch.zeros_like(client)
    place = own * room + recorded.index_select(0, own) % room  # (1)
    held = recorded.clamp(max=room)  # (lists)
    after = (recorded.index_add(0, own, torch.ones_like(own))).clamp(min=1, max=room)  # (lists), with the new one
    each = CLIENT // after if lists > 1 else torch.ones_like(after)
    filled = torch.arange(room, device=factors.device) < held[:, None]  # (lists, room)
    weights = torch.where(filled, each[:, None], 0)
    return weights if len(counts) else weights.view(-1).index_fill(0, place, 0).view(lists, room), place


def forget_factors(factors: Tensor, recorded: Tensor, client: int) -> None:
    """Empty the client's list. A pooled Q does not know which factors are the client's."""
    if len(factors) > 1:
        factors[client] = torch.inf
        recorded[client] = 0


def factors_below(factors: Tensor, counts: Tensor, weights: Tensor, factor: Tensor) -> Tensor:
    """() int64: the total weight of the factors below this one ()."""
    below = torch.where(factors < factor, weights, 0).sum()
    return below + counted_below(counts, keys_of(factor)) if len(counts) else below


def most_below(counts: Tensor, weights: Tensor, quantile: float) -> Tensor:
    """() float64: the largest total weight that the factors below an accepted one may have.

    With a list per client each weight is rounded down by less than 1. The sum allows for that, so that a tie stays one.
    """
    rounding = weights.numel() if len(weights) > 1 else 0
    total = weights.sum() + counts[:1].sum()
    return (total.double() * quantile).floor() + rounding


def record_factor(
    factors: Tensor, recorded: Tensor, counts: Tensor, place: Tensor, factor: Tensor, when: Tensor
) -> None:
    """Put a factor () into its place (1) of Q, or count it, if `when` () says so."""
    list_, stored = place // factors.shape[1], when
    if len(counts):
        full = recorded >= factors.shape[1]  # (1)
        count_factors(counts, factor.reshape(1), when & full)
        stored = when & ~full
    before = factors.view(-1).index_select(0, place)
    factors.view(-1).index_copy_(0, place, torch.where(stored, factor, before))
    recorded.index_add_(0, list_, when.long().reshape(1))


def largest_accepted(factors: Tensor, recorded: Tensor, counts: Tensor, client: Tensor, quantile: float) -> Tensor:
    """() float64: the largest factor of client (1) that would be accepted now; inf if any would."""
    weights, _ = factor_weights(factors, recorded, counts, client)
    most = most_below(counts, weights, quantile)
    values, weights = torch.where(weights > 0, factors, torch.inf).view(-1), weights.view(-1)
    lower = torch.zeros_like(most)
    if len(counts):  # one row of them is enough, and all lower rows as one number
        row = _row_of_threshold(values, counts, most)
        first = row * COLUMNS
        ends = largest_with(first + torch.arange(COLUMNS, device=counts.device))
        values, weights = torch.cat([values, ends]), torch.cat([weights, counts_of_row(counts, row)])
        lower = counted_below(counts, first)
    values, order = values.sort()
    up_to_here = lower + weights[order].cumsum(0)
    return torch.where(up_to_here > most, values, torch.inf).min()


def _row_of_threshold(values: Tensor, counts: Tensor, most: Tensor) -> Tensor:
    """() int64: the first row of counts up to whose end lie more than `most` factors; the last row if none is.

    values: (k) the factors that are not counted
    """
    ends = largest_with(COLUMNS * torch.arange(1, 1 + ROWS, device=counts.device) - 1)
    up_to_end = counts[0, :ROWS].cumsum(0) + torch.searchsorted(values.sort().values, ends, right=True)
    return (up_to_end <= most).sum().clamp(max=ROWS - 1)


def split_factors(listed: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """(factors (1, room), counts) of a Q that keeps all factors, from a list (1, any) of all of them, then inf."""
    first, later = listed[:, :room], listed[0, room:]
    counts = empty_counts(True, listed.device)
    count_factors(counts, later, later.isfinite())
    return torch.nn.functional.pad(first, (0, room - first.shape[1]), value=torch.inf), counts
