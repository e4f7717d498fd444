"""rule="support" on sketches, for fleets with too many clients for an n x n table.

Similarity averages the inner products of the clients' updates. Here each client has the mean of its own sketched
updates, k numbers, and a refresh takes the inner products of these means, some rows at a time. The eigenvectors of the
n x n products M M^T follow from those of the k x k products M^T M.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from . import support
from .row_rules import MAX_SQUARE
from .similarity import SPAN

BLOCK = 2**24  # inner products that are computed at once
KEPT = 2**27  # a table of at most so many is kept for the next pass over it: 1 GB, 11,585 clients


class SketchedSupport:
    """means: (n, k) mean sketch of each client's updates, clipped to the median norm of all and divided by it
    squares: (n) float64, mean inner product of consecutive updates: without the noise that the square of a mean has
    met: (n) int64, uploads of each client but its first    norms: (n) float64, of the last updates
    shift: (n) float64, of the clients' weights from 1 / count
    """

    def __init__(self, clients: int, width: int, dtype: torch.dtype, device: torch.device):
        self.means = torch.zeros(clients, width, dtype=dtype, device=device)
        self.squares, self.norms, self.shift = torch.zeros(3, clients, dtype=torch.float64, device=device)
        self.met = torch.zeros(clients, dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("means", "squares", "met", "norms", "shift")}

    def forget(self, client: int) -> None:
        for tensor in self.tensors().values():
            tensor[client] = 0

    def add(
        self, client: Tensor, sketch: Tensor, last: Tensor, norm: Tensor, median_norm: Tensor, stored: Tensor
    ) -> None:
        """Average an upload of client (1) if it is stored. sketch, last: (k), of this upload and of the one before
        norm, median_norm: () float64, of this upload and of all clients' last ones"""
        before, mean, square, met = (
            kept.index_select(0, client)[0] for kept in (self.norms, self.means, self.squares, self.met)
        )
        now = sketch.double() / torch.maximum(norm, median_norm)
        consecutive = now @ last.double() / torch.maximum(before, median_norm)
        again = before > 0  # a first upload begins the mean
        counts = stored & may_be_averaged(norm, now) & consecutive.isfinite()
        seen = torch.where(again, met, -1).double()  # uploads compared before
        share = 1 / (seen + 2).clamp(max=SPAN)
        after = torch.where(counts, torch.lerp(mean.double(), now, share).to(mean.dtype), mean)
        self.means.index_copy_(0, client, after[None])
        share = 1 / (seen + 1).clamp(min=1, max=SPAN)
        self.squares.index_copy_(0, client, torch.where(counts & again, square.lerp(consecutive, share), square)[None])
        self.met.index_copy_(0, client, (met + (counts & again))[None])
        self.norms.index_copy_(0, client, torch.where(stored, norm, before)[None])

    def weights(self, mask: Tensor) -> Tensor:
        return support.weights(self.shift, mask)

    def refresh(self, mask: Tensor) -> None:
        """Compute the shifts anew. mask: (n) bool, clients that count. Waits for the device."""
        support.reset_shifts(self.shift, mask)
        chosen = mask.nonzero()[:, 0]
        if len(chosen):
            self.shift[chosen] = self._shifts(chosen)

    def _shifts(self, chosen: Tensor) -> Tensor:
        """(c) float64: the shifts of the clients chosen (c), all that count."""
        rows = shortened(self.means[chosen].double(), self.squares[chosen])
        few = len(rows) <= rows.shape[1]  # then the products of the clients are the smaller matrix
        return support.shifts(rows @ rows.T) if few else shifts(rows)


def may_be_averaged(norm: Tensor, update: Tensor) -> Tensor:
    """() bool: an update whose norm or coordinates overflow is not averaged."""
    return (norm.square() <= MAX_SQUARE) & update.isfinite().all()


def shortened(means: Tensor, squares: Tensor) -> Tensor:
    """Mean sketches (c, k) without the length that is noise: each has the square in squares (c), or its own."""
    own = means.square().sum(1)
    return means * (squares.clamp(min=0) / own.clamp(min=1e-300)).clamp(max=1).sqrt()[:, None]


class Rest:
    """The mean updates without the directions that were cut.

    rows: (c, k)    shift: (c)    cuts: (coefficients, loadings), (c, r) each, of all directions that were cut
    """

    def __init__(self, rows: Tensor):
        self.rows, self.shift = rows.clone(), torch.zeros_like(rows[:, 0])
        self.cuts: list[tuple[Tensor, Tensor]] = []

    def cut(self, directions: Tensor, along: Tensor) -> None:
        """directions: (k, r) orthogonal, of length 1    along: (c, r), coefficients that make these of the rows"""
        loadings = self.rows @ directions
        own = along - sum((own @ (past.T @ along) for own, past in self.cuts), torch.zeros_like(along))
        self.shift += own @ (support.biweight(loadings) - loadings.mean(0))
        self.rows -= loadings @ directions.T
        self.cuts.append((own, loadings))


class Kin:
    """support.signed_kin of the inner products of rows (c, k), some rows (b, c) of it at a time, with their slice.

    All of it, (c, c), may not fit into memory: then each pass computes it again.
    """

    def __init__(self, rows: Tensor):
        self.units = rows / rows.square().sum(1).clamp(min=support.SHORT_SQUARE).sqrt()[:, None]
        self.kept = list(self._blocks()) if len(rows) ** 2 <= KEPT else None

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        return self._blocks() if self.kept is None else iter(self.kept)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        numbers = torch.arange(len(self.units), device=self.units.device)
        for some in numbers.split(max(1, BLOCK // len(numbers))):
            signed = support.signed_weights(self.units[some] @ self.units.T)
            signed[some - some[0], some] = 0
            yield slice(int(some[0]), int(some[-1]) + 1), signed


def shifts(rows: Tensor) -> Tensor:
    """(c) float64: as support.shifts of the inner products of these rows (c, k), which would be (c, c)."""
    kept = kept_by_kin(Kin(rows))
    crowd = max(support.CROWD_LEAST, support.CROWD * float(level(rows - rows.mean(0))))
    rest = Rest(rows)
    cut_crowd(rest, crowd)
    kept = kept * support.kept_by_distance(cut_odd(rest))
    cut_crowd(rest, support.AGAIN * crowd)
    return support.final_shift(rest.shift, kept)


def kept_by_kin(kin: Kin) -> Tensor:
    """(c): support.kept_by_vote of the clients. When it returns, the table is freed: the next one is as large."""
    sizes = torch.cat([support.group_sizes(signed) for _, signed in kin])
    return support.kept_by_vote(sizes, lambda votes: torch.cat([signed @ votes for _, signed in kin]))


def cut_crowd(rest: Rest, least: float) -> None:
    """Cut the directions whose eigenvalue in the inner products of the rows is above `least`."""
    values, directions = large_eigenvectors(rest.rows, least)
    rest.cut(directions, rest.rows @ directions / values)


def cut_odd(rest: Rest) -> Tensor:
    """The same for the residuals, each row minus the weighted mean of its kin. Returns (c, r): their
    loadings along the directions that were cut."""
    rows, kin = rest.rows, Kin(rest.rows)
    residuals = rows - torch.cat([support.shares_of_kin(signed) @ rows for _, signed in kin])
    values, directions = large_eigenvectors(residuals, max(support.ODD_LEAST, support.ODD * float(level(residuals))))
    loadings = residuals @ directions
    along = loadings / values
    of_kin = sum((support.shares_of_kin(signed).T @ along[part] for part, signed in kin), torch.zeros_like(along))
    rest.cut(directions, along - of_kin)
    return loadings


def large_eigenvectors(rows: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues (r) of rows^T rows (k, k) above `least`, and their eigenvectors (k, r)."""
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    return values[values > least], vectors[:, values > least]


def level(rows: Tensor) -> Tensor:
    """(): support.level of the inner products of the rows (c, k)."""
    sums = (rows @ (rows.T @ rows) * rows).sum(1)  # of the squared inner products of each row with all
    own = sums / rows.square().sum(1).clamp(min=support.SHORT_LEVEL)
    return support.median_of(own, torch.ones_like(own, dtype=torch.bool))
