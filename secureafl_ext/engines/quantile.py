"""Q: the recorded Lipschitz factors, and the quantile that the filter compares a new factor with.

The fused rounds do the same in C++ (csrc/round/quantile.h).
"""

import torch
from torch import Tensor

from ..config import Config

CLIENT = 2**32 - 1  # weight of one client in total with a list per client: whole numbers, so that sums are exact


def empty_factors(config: Config, clients: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(factors (lists, room) float64, recorded (lists) int64: the number of factors ever put into each list)

    A list is a ring buffer; empty places hold inf. There is one list per client, or one for all.
    """
    lists = 1 if config.factors == "pooled" else clients
    factors = torch.full((lists, config.room), torch.inf, dtype=torch.float64, device=device)
    return factors, torch.zeros(lists, dtype=torch.int64, device=device)


def factor_weights(factors: Tensor, recorded: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of every place of Q when a new factor of client (1) arrives, and the place (1) that it takes.

    weights: (lists, room) int64; 0 for empty places and for the one that is replaced. All factors of a list weigh the
    same, and all lists weigh the same in total: otherwise a client that uploads often would choose the quantile.
    """
    lists, room = factors.shape
    own = client if lists > 1 else torch.zeros_like(client)
    place = own * room + recorded.index_select(0, own) % room  # (1)
    held = recorded.clamp(max=room)  # (lists)
    after = (recorded.index_add(0, own, torch.ones_like(own))).clamp(min=1, max=room)  # (lists), with the new one
    each = CLIENT // after if lists > 1 else torch.ones_like(after)
    filled = torch.arange(room, device=factors.device) < held[:, None]  # (lists, room)
    weights = torch.where(filled, each[:, None], 0)
    return weights.view(-1).index_fill(0, place, 0).view(lists, room), place


def forget_factors(factors: Tensor, recorded: Tensor, client: int) -> None:
    """Empty the client's list. A pooled Q does not know which factors are the client's."""
    if len(factors) > 1:
        factors[client] = torch.inf
        recorded[client] = 0


def most_below(weights: Tensor, quantile: float) -> Tensor:
    """() float64: the largest total weight that the factors below an accepted one may have.

    With a list per client each weight is rounded down by less than 1. The sum allows for that, so that a tie stays one.
    """
    rounding = weights.numel() if len(weights) > 1 else 0
    return (weights.sum().double() * quantile).floor() + rounding


def largest_accepted(factors: Tensor, recorded: Tensor, client: Tensor, quantile: float) -> Tensor:
    """() float64: the largest factor of client (1) that would be accepted now; inf if any would."""
    weights, _ = factor_weights(factors, recorded, client)
    most = most_below(weights, quantile)
    values, order = torch.where(weights > 0, factors, torch.inf).view(-1).sort()
    up_to_here = weights.view(-1)[order].cumsum(0)
    return torch.where(up_to_here > most, values, torch.inf).min()


def grown(factors: Tensor, room: int) -> Tensor:
    """A pooled Q (1, ..) with room for at least `room` factors, and at least twice as many as before."""
    more = max(room - factors.shape[1], factors.shape[1])
    return torch.nn.functional.pad(factors, (0, more), value=torch.inf)
