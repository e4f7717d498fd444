"""rule="support": the mean of the clients' updates, without directions that only few of them support.

Honest progress is supported by many clients, a push of colluders by few. A single update is mostly noise, so the rule
looks at mean updates: at their n x n inner products M (similarity.py; recommended: mean_steps.py). From time to time
(a refresh) it looks for directions that stand out among them. Along each it replaces the mean of the clients by a
robust mean, Tukey's biweight about their median. The step is a weighted sum of the clients' updates; the result of a
refresh is one number per client, the shift of its weight from 1 / count.

First, a group of similar clients that is too large is left with less weight than a usual group: attackers who all
send the same. A client with more opponents than kin loses its weight: attackers who push straight back. Then two kinds
of directions stand out:

crowd: an eigenvector of M whose eigenvalue is far above the usual. Clients with similar data form groups, and each
    group has an eigenvector; its eigenvalue grows with the group. Attackers with a common push form a larger one.
odd: an eigenvector of the residuals, each client's mean update minus that of its kin, the clients that are like it.
    Attackers who hide a small push behind honest gradients differ from their kin, all in the same way. A client that
    differs far more than usual along these directions loses its weight.

In all other directions the mean stays: without attackers, and with groups that are alike, the rule is the mean.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .row_rules import median_of
from .similarity import Similarity

CUT = 3.0  # of the biweight: a client this many spreads from the median has no weight
# "Usual" is the median over the clients.
CROWD = 2.0  # a direction is a crowd's if its eigenvalue is this many times the usual
CROWD_LEAST = 0.3  # and at least this, in (median norm)^2
ODD = 2.5  # the same for the directions of the residuals
ODD_LEAST = 0.3
GROUP = 0.25  # a client's group may be larger than the usual one by this share; if it is larger still, it loses weight
GROUP_SPREADS = 2.0  # or by this many times (median size - lower quartile), if that is more
GROUP_LEAST = 0.08  # or this share of the clients, if that is more: after an attack the usual group may be tiny
GROUP_END = 1.2  # from this many times that bound on, its group keeps only GROUP_LEFT of the weight of a usual group
GROUP_LEFT = 0.7  # not 0: the data of honest clients without weight are not learned, and so their group would grow
OPPOSED = 0.2  # a client with more opponents than kin, by more than this share of a usual group, loses weight
OPPOSED_END = 0.5  # at this share it loses all weight
APART = 2.0  # a client this many spreads further along the odd directions than usual loses weight
APART_END = 4.0  # at this many it loses all weight
FILL = 1.5  # the others gain the weight that left-out clients lose, up to this factor: training must not slow down
KIN = 0.3  # two clients are kin if the cosine of their mean updates is above this
SHORT_SQUARE = 0.05  # floor for the squares of mean updates in that cosine: the cosine of shorter ones is noise
FEW_KIN = 0.5  # floor for the sum of a client's kin weights: with almost no kin the residual is the mean update
SHORT_LEVEL = 0.2  # floor for the squares of mean updates in the usual eigenvalue
FADE = 0.25  # a weight below twice this share of the mean weight is reduced, to 0 at this share
AGAIN = 0.7  # the crowd is looked for a second time, with this part of the bound: now without the odd directions
MOST = 2.0  # a client has at most this many mean weights: this bounds its influence
NORMAL, LEAST_SPREAD = 1.4826, 1e-3  # a normal distribution's spread in median deviations; floor for a spread
STAGES = 3


class Support(Similarity):
    """shift: (n) float64, of the clients' weights from 1 / count
    basis: (STAGES, n, n) float64, eigenvectors of the last refresh: the fused op starts from them
    """

    def __init__(self, clients: int, device: torch.device):
        super().__init__(clients, device)
        self.shift = torch.zeros(clients, dtype=torch.float64, device=device)
        self.basis = first_basis(clients, device)

    def tensors(self) -> dict[str, Tensor]:
        return {"similarity": self.means, "met": self.met, "basis": self.basis, "shift": self.shift}

    def forget(self, client: int) -> None:
        super().forget(client)
        self.shift[client] = 0
        self.basis.copy_(first_basis(len(self.shift), self.basis.device))  # eigenvectors tell of every client

    def weights(self, mask: Tensor) -> Tensor:
        return weights(self.shift, mask)

    def refresh(self, mask: Tensor) -> None:
        """Compute the shifts anew. mask: (n) bool, clients that count"""
        reset_shifts(self.shift, mask)
        chosen = mask.nonzero()[:, 0]
        if len(chosen):
            self.shift[chosen] = shifts(self.means[chosen][:, chosen].clamp(-1, 1))  # beyond 1 only in a loaded state


def first_basis(clients: int, device: torch.device) -> Tensor:
    """(STAGES, n, n) float64: where the search for eigenvectors starts; later it starts from the last ones."""
    return torch.eye(clients, dtype=torch.float64, device=device).repeat(STAGES, 1, 1)


def reset_shifts(shift: Tensor, mask: Tensor) -> None:
    """Set the shifts to 0 before a refresh. A client that does not count keeps a negative shift: otherwise it would win
    its weight back by silence.

    shift: (n)    mask: (n) bool, clients that count
    """
    shift.clamp_(max=0).masked_fill_(mask, 0)


def weights(shift: Tensor, mask: Tensor) -> Tensor:
    """(n) float64: the weights of the clients' updates; zero where mask (n) is false. shift: (n)"""
    shifted = 1 / mask.sum(dtype=torch.float64).clamp(min=1) + shift
    return torch.where(mask, shifted.clamp(min=0), 0)  # below 0 if more clients count than at the refresh


def shifts(means: Tensor) -> Tensor:
    """(c) float64: the shifts of c clients with these averaged inner products (c, c)."""
    count = len(means)
    signed = signed_kin(means)
    kept = kept_by_vote(group_sizes(signed), lambda votes: signed @ votes)
    state = means, torch.eye(count, dtype=means.dtype, device=means.device), torch.zeros_like(means[0])
    crowd = max(CROWD_LEAST, CROWD * float(level(centered(means))))
    state = cut_directions(*state, None, *large_eigenvectors(means, crowd))
    maps = without_kin(state[0])
    residuals = maps @ state[0] @ maps.T
    values, vectors = large_eigenvectors(residuals, max(ODD_LEAST, ODD * float(level(residuals))))
    kept = kept * kept_by_distance(vectors * values.sqrt())
    state = cut_directions(*state, maps, values, vectors)
    if AGAIN:
        state = cut_directions(*state, None, *large_eigenvectors(state[0], AGAIN * crowd))
    return final_shift(state[2], kept)


def final_shift(shift: Tensor, kept: Tensor) -> Tensor:
    """(c): the shift after all directions were cut, bounded; and each client keeps the share kept (c) of its weight."""
    count = len(shift)
    weights = 1 / count + shift
    faded = (weights * ((weights * count - FADE) / FADE).clamp(0, 1) * kept).clamp(max=MOST / count)
    filled = faded * (1 / faded.sum().clamp(min=1 / FILL)).clamp(min=1)
    return filled.clamp(max=MOST / count) - 1 / count


def large_eigenvectors(products: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues (k) of products (c, c) above `least`, and their eigenvectors (c, k)."""
    values, vectors = torch.linalg.eigh(products)
    return values[values > least], vectors[:, values > least]


def cut_directions(
    rest: Tensor, remaining: Tensor, shift: Tensor, maps: Tensor | None, values: Tensor, vectors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the directions of some eigenvectors (c, k) of (maps rest maps^T), with their eigenvalues (k).

    rest: (c, c) inner products of the mean updates without the directions cut so far    shift: (c)
    remaining: (c, c) projection, in coefficients of the clients: removes all directions that were cut
    maps: (c, c): mean updates -> residuals; None: identity
    """
    along = vectors / values.sqrt()  # (c, k): coefficients of the directions, which have length 1
    along = along if maps is None else maps.T @ along
    loadings = rest @ along  # (c, k): of each client along each direction
    own = remaining @ along
    shift = shift + own @ (biweight(loadings) - loadings.mean(0))
    return rest - loadings @ loadings.T, remaining - own @ loadings.T, shift


def biweight(values: Tensor) -> Tensor:
    """(k): Tukey's biweight mean of every column of values (c, k), one step from the median."""
    center = torch.stack([median(column) for column in values.T]) if values.numel() else values.sum(0)
    away = (values - center).abs()
    spread = torch.stack([median(column) for column in away.T]) if values.numel() else values.sum(0)
    inside = (1 - (away / (CUT * (NORMAL * spread + LEAST_SPREAD))).square()).clamp(min=0).square()
    return (inside * values).sum(0) / inside.sum(0)


def kept_by_group(sizes: Tensor) -> Tensor:
    """(c): the share of its weight that each client keeps, from the sizes (c) of the clients' groups.

    Groups of honest clients differ in size, in some fleets much. The spread is taken from the lower half: attackers
    that form a large group are not in it.
    """
    usual = median(sizes)
    quartile = sizes.sort().values[(len(sizes) - 1) // 4]
    largest = usual + torch.maximum(GROUP * usual, GROUP_SPREADS * (usual - quartile))
    largest = largest.clamp(min=GROUP_LEAST * len(sizes))
    left = (GROUP_LEFT * usual / sizes).clamp(max=1)
    return left + (1 - left) * ((GROUP_END - sizes / largest) / (GROUP_END - 1)).clamp(0, 1)


def kept_by_vote(sizes: Tensor, support_of: Callable[[Tensor], Tensor]) -> Tensor:
    """(c): the share of its weight that each client keeps, from the sizes (c) of the clients' groups and their votes.

    Clients that push against those with the same data have opponents and hardly any kin. The vote of a client counts
    by the share that it keeps.
    support_of: maps votes (c) to (c), for each client the votes of its kin minus those of its opponents
    """
    usual, by_group = median(sizes), kept_by_group(sizes)
    kept = by_group
    for _ in range(2):  # in the second pass the votes of clients that have lost weight count less
        opposed = -support_of(kept) / usual
        kept = by_group * ((OPPOSED_END - opposed) / (OPPOSED_END - OPPOSED)).clamp(0, 1)
    return kept


def kept_by_distance(loadings: Tensor) -> Tensor:
    """(c): the share of its weight that each client keeps, from the loadings (c, k) of the residuals along the odd
    directions.

    Attackers who share a push lie on one side of a direction. On the other side, less far, lie their honest kin: in
    their residuals the attackers' push is subtracted. So that side counts less, the more one-sided a direction is.
    """
    lengths = loadings.square().sum(1).sqrt()
    usual = median(lengths)
    spread = NORMAL * median((lengths - usual).abs()) + LEAST_SPREAD
    one_sided = loadings.pow(3).sum(0) / loadings.abs().pow(3).sum(0)  # (k): from -1 to 1, 0 if both sides are alike
    other_side = (1 - 2 * one_sided.abs()).clamp(min=0)
    reach = (loadings.square() * torch.where(loadings * one_sided >= 0, 1, other_side)).sum(1).sqrt()
    return ((APART_END - (reach - usual) / spread) / (APART_END - APART)).clamp(0, 1)


def centered(products: Tensor) -> Tensor:
    """(c, c): inner products of the mean updates minus the mean of all, from those of the mean updates."""
    mean = products.mean(0)
    return products - mean - mean[:, None] + mean.mean()


def level(products: Tensor) -> Tensor:
    """(): the usual eigenvalue: the median over the clients of (M M)_ii / M_ii, for the inner products M (c, c)."""
    own = products.square().sum(1) / products.diagonal().clamp(min=SHORT_LEVEL)
    return median(own)


def median(values: Tensor) -> Tensor:
    """(): the median of values (c)."""
    return median_of(values, torch.ones_like(values, dtype=torch.bool))


def signed_kin(products: Tensor) -> Tensor:
    """(c, c): how similar two clients are, 0 to 1, or how opposed, 0 to -1; 0 of a client with itself."""
    norms = products.diagonal().clamp(min=SHORT_SQUARE).sqrt()
    return signed_weights(products / (norms[:, None] * norms)).fill_diagonal_(0)


def signed_weights(cosines: Tensor) -> Tensor:
    """The same from the cosines of mean updates: 0 from -KIN to KIN, then up to 1 and down to -1."""
    return F.softshrink(cosines, KIN).div_(1 - KIN).clamp_(-1, 1)


def group_sizes(signed: Tensor) -> Tensor:
    """(b): the size of a client's group, itself included, from rows (b, c) of signed_kin."""
    return 1 + signed.clamp(min=0).sum(1)


def shares_of_kin(signed: Tensor) -> Tensor:
    """(b, c): the shares of a client's kin in their mean, from rows (b, c) of signed_kin."""
    near = signed.clamp(min=0)
    return near / near.sum(1, keepdim=True).clamp(min=FEW_KIN)


def without_kin(products: Tensor) -> Tensor:
    """(c, c): maps the mean updates to the residuals, each minus the weighted mean of its kin."""
    shares = shares_of_kin(signed_kin(products))
    return torch.eye(len(shares), dtype=shares.dtype, device=shares.device) - shares
