"""Q: the Lipschitz factors that an update is judged by. csrc/round/quantile.h has the same for the fused rounds."""

import torch
from torch import Tensor

from ..config import Config

CLIENT = 2**32 - 1  # what one client weighs in all, where each has a list: whole numbers, so that sums are exact


def empty_factors(config: Config, clients: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(factors (lists, room) float64, recorded (lists) int64: how many were ever put into each list)

    A list is a ring buffer; its empty places hold inf. One list of all clients, or one for each.
    """
    lists = 1 if config.factors == "pooled" else clients
    factors = torch.full((lists, config.room), torch.inf, dtype=torch.float64, device=device)
    return factors, torch.zeros(lists, dtype=torch.int64, device=device)


def factor_weights(factors: Tensor, recorded: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
    """What every place of Q weighs when a new factor of client (1) comes, and the place (1) that this one takes.

    weights: (lists, room) int64; 0 for empty places and for the one that is replaced. Factors of one list weigh the
    same, and all lists together the same: else a client that uploads often would choose the quantile.
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
    """Empty the client's list. In a pooled Q nobody knows whose a factor is."""
    if len(factors) > 1:
        factors[client] = torch.inf
        recorded[client] = 0


def most_below(weights: Tensor, quantile: float) -> Tensor:
    """() float64: what the factors below an accepted one may weigh together.

    Each weight of a list per client is rounded down by less than 1: with so much allowed for, a tie stays a tie.
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
    """A pooled Q (1, ..) with more places, at least twice as many."""
    more = max(room - factors.shape[1], factors.shape[1])
    return torch.nn.functional.pad(factors, (0, more), value=torch.inf)
