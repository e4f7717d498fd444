"""What the ops must compute, written again in NumPy from the definitions, and the inputs they are tried on."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor


def trimmed(rows: np.ndarray, trim: int) -> np.ndarray:
    """Mean of sorted rows [trim, len - trim) in float64: np.sort puts NaN last."""
    with np.errstate(over="ignore", invalid="ignore"):
        middle = np.sort(rows, axis=0)[trim : len(rows) - trim].astype(np.float64)
        return middle.sum(axis=0) / len(middle)


def median(rows: np.ndarray) -> np.ndarray:
    """Halves of the two middle rows, added: exact where their sum would overflow."""
    if len(rows) == 0:
        return np.zeros(rows.shape[1])
    ordered = np.sort(rows, axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (ordered[i].astype(np.float64) for i in ((len(rows) - 1) // 2, len(rows) // 2))
        total = low + high
        return np.where(np.isfinite(total), total / 2, low / 2 + high / 2)


def dense_bfgs(dw: np.ndarray, dg: np.ndarray) -> np.ndarray:
    """B after the textbook updates with each pair (s, y), oldest first, from mu I of the newest pair."""
    s, y = dw[-1], dg[-1]
    B = (y @ s) / (s @ s) * np.eye(len(s))  # noqa: N806 - the paper's letter
    for s, y in zip(dw, dg, strict=True):
        Bs = B @ s  # noqa: N806
        B = B - np.outer(Bs, Bs) / (s @ Bs) + np.outer(y, y) / (y @ s)  # noqa: N806
    return B


@dataclass
class History:
    """The arguments of `estimate`, in order."""

    model: Tensor  # (d)
    last_updates: Tensor  # (n, d)
    last_models: Tensor  # (n, d)
    dw: Tensor  # (n, m, d)
    dg: Tensor  # (n, m, d)
    pairs: Tensor  # (n)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def rest(self) -> tuple[Tensor, ...]:
        return self.tensors()[1:]

    def to(self, *where) -> "History":
        """Another device or float dtype; pairs stay integers."""
        moved = [tensor.to(*where) for tensor in self.tensors()[:-1]]
        return History(*moved, self.pairs.to(moved[0].device))

    def but(self, **tensors: Tensor) -> "History":
        return replace(self, **tensors)


def make_history(
    random: torch.Generator, n: int, m: int, d: int, *, pairs: list[int] | None = None, dtype=torch.float64
) -> History:
    """Clients with a quadratic of their own: y = H s + noise, H diagonal between 1/2 and 2. Unused slots hold NaN."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    curvature = 0.5 + 1.5 * torch.rand(n, 1, d, generator=random, dtype=torch.float64)
    dw = normal(n, m, d)
    dg = curvature * dw + 0.1 * normal(n, m, d)
    count = torch.full((n,), m) if pairs is None else torch.tensor(pairs, dtype=torch.int64)
    unused = torch.arange(m) >= count[:, None]
    dw[unused], dg[unused] = torch.nan, torch.nan
    length = torch.linspace(0.5, 3, n)[:, None]  # short updates, whose corrections trust=1 caps, and long ones
    return History(normal(d), length * normal(n, d), normal(n, d), dw, dg, count).to(dtype)


def estimates(history: History, trust: float) -> np.ndarray:
    """(n, d) in float64 through the dense matrix, from whatever dtype the history has."""
    model, updates, models, dw, dg = (tensor.double().cpu().numpy() for tensor in history.tensors()[:-1])
    rows = updates.copy()
    for k, count in enumerate(history.pairs.tolist()):
        if count == 0:
            continue
        correction = dense_bfgs(dw[k, :count], dg[k, :count]) @ (model - models[k])
        norm, most = np.linalg.norm(correction), trust * np.linalg.norm(updates[k])
        rows[k] += correction * min(1.0, most / norm)
    return rows


def relative_error(result: Tensor, expected: np.ndarray | Tensor) -> float:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    return float((result.double().cpu() - expected.cpu()).norm() / expected.norm())


def same(result: Tensor, expected: np.ndarray | Tensor) -> bool:
    """Equal value for value once `expected` is rounded to the result's dtype; NaN equals NaN."""
    expected = torch.as_tensor(expected).to(result.dtype)
    close = torch.isclose(result.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)
    return result.shape == expected.shape and bool(close.all())
