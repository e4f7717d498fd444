"""ALIE, "A Little Is Enough" (Baruch et al., NeurIPS 2019, arXiv 1902.06156): the honest mean, shifted by z standard
deviations in every coordinate. It hides in the spread of the honest gradients."""

import math
from statistics import NormalDist

from torch import Tensor

from ..defenses.base import need
from .base import Scene, Simple, View


def alie(scene: Scene, *, z: float | None = None, honest: int | None = None) -> Simple:
    """z: default by the original's formula    honest: number of honest clients that it sees. Default: all of them"""
    number = scene.honest if honest is None else honest
    need(1 <= number <= scene.honest, "alie", "honest", f"1 to {scene.honest}, the honest clients", number)
    times = z_max(scene.clients, len(scene.malicious)) if z is None else z
    need(math.isfinite(times), "alie", "z", "a finite number", z)

    def update(view: View) -> Tensor:
        gradients = scene.net.gradients(view.model, *scene.data.train(view.honest))  # (k, d)
        return gradients.mean(0) - times * gradients.std(0, correction=min(1, number - 1))

    return Simple(update, honest=number)


def z_max(clients: int, malicious: int) -> float:
    """The largest z at which enough honest clients are expected farther from the mean than the attackers.

    s = floor(n / 2 + 1) - f honest supporters make a majority; z_max is the normal quantile of (n - f - s) / (n - f).
    Without a majority to win (s of 0 or less) every z would do: then the quantile of the last but one client.
    """
    honest = clients - malicious
    supporters = min(max(clients // 2 + 1 - malicious, 1), honest)
    share = (honest - supporters) / honest
    return NormalDist().inv_cdf(share) if share > 0 else 0.0
