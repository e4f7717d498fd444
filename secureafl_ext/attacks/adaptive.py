"""Adaptive: knows the defense and sends the strongest harmful update that the defense still accepts.

The wish is g_b - gamma p. g_b is the honest mean. p is the sign of its long-run average, so that all attackers push the
same way for the whole run. The attack sends the wish or the nearest update that the defense accepts. The rules kinship
and support accept every update and judge clients by their mean updates: against these each attacker sends its own
honest gradient and the longest common push along -p that the rule does not notice (unnoticed.py).
"""

import math

import torch
from torch import Tensor

from .. import ops
from ..defenses import RuleServer
from ..defenses.base import need, norm
from ..rules.row_rules import median_of
from ..server.server import SecureAFL
from .base import Scene, View
from .crafted import units
from .evasion import INSIDE, ball, past_rule
from .local_steps import shorten
from .unnoticed import CAMP_PUSH, in_camps, past_kinship, past_support

# Multiples of the standard deviation of the honest estimates; the last stands for infinity. Up to 32, because columns
# differ in scale.
SPREADS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1e4)


class Adaptive:
    """gamma: strength of the wish; for SecureAFL with a median it is chosen instead    momentum: of p's average
    saturation: gamma is large enough when it shifts the median by this share of the largest shift
    honest: number of honest clients whose mean is g_b, at most all of them
    camps: of rule="kinship" only: number of groups that the attackers split into, see unnoticed.py
    """

    own, trigger = 1, None

    def __init__(
        self,
        scene: Scene,
        *,
        gamma: float = 10.0,
        momentum: float = 0.99,
        saturation: float = 0.99,
        honest: int = 10,
        camps: int = 1,
    ):
        need(math.isfinite(gamma), "adaptive", "gamma", "a finite number", gamma)
        need(0 <= momentum < 1, "adaptive", "momentum", "0 or more, below 1", momentum)
        need(0 < saturation <= 1, "adaptive", "saturation", "above 0, at most 1", saturation)
        self.honest = min(honest, scene.honest)
        need(self.honest >= 1, "adaptive", "honest", f"1 to {scene.honest}, the honest clients", honest)
        need(camps >= 1, "adaptive", "camps", "1 or more", camps)
        self.scene, self.gamma, self.momentum, self.saturation = scene, gamma, momentum, saturation
        self.average = scene.zeros(scene.net.size)
        self.malicious = scene.zeros(scene.clients, dtype=torch.bool).index_fill_(0, scene.malicious, True)
        self.camps = units(camps, scene.net.size, scene.random()) if camps > 1 else None  # (camps, d)
        self.others = (~self.malicious).nonzero()[:, 0]  # (h) int64: the honest clients

    def before(self) -> None: ...

    def after(self, view: View, model: Tensor) -> None: ...

    def update(self, view: View) -> Tensor:
        net, data = self.scene.net, self.scene.data
        mean = net.gradients(view.model, *data.train(view.honest)).mean(0)  # g_b
        # A mean that is not finite would stay in the average for ever, and its sign is 0: no push.
        self.average.lerp_(torch.where(mean.isfinite().all(), mean, self.average), 1 - self.momentum)
        away = -self.average.sign()  # -p
        if isinstance(view.server, SecureAFL):
            return self._past_secureafl(view, view.server, mean, away)
        if not isinstance(view.server, RuleServer):
            got = type(view.server).__name__
            raise ValueError(f"adaptive: the server must be a SecureAFL or a RuleServer, got {got}")
        return past_rule(view.server, view, mean, self.gamma * away)

    def _past_secureafl(self, view: View, server: SecureAFL, mean: Tensor, away: Tensor) -> Tensor:
        """The update nearest to the wish in the ball that the filter accepts, around the client's last update. At first
        contact only the norm is bounded."""
        if server.similarity is not None:
            wish = self._unnoticed(view, server, away)
        else:
            wish = mean + self._min_gamma(server, mean, away) * away
        if not server.config.filter:
            return torch.where(server.seen[view.client], wish, shorten(wish, server.config.max_norm))
        last, model = server.last(view.client)
        moved = norm(view.model - model)
        # A client that receives its last model again must repeat its update, whatever the threshold.
        radius = torch.where(moved > 0, INSIDE * server.threshold(view.client) * moved, 0)
        known = server.seen[view.client]  # (1)
        return torch.where(known, ball(wish, last, radius), shorten(wish, server.config.max_norm))

    def _unnoticed(self, view: View, server: SecureAFL, away: Tensor) -> Tensor:
        """(d): the client's honest gradient and the longest push that the rule does not notice in its tables."""
        honest = server.present & ~self.malicious
        own = self.scene.net.gradient(view.model, *self.scene.data.train(view.own[0]))
        kinship, centered = server.kinship, server.kinship_apart  # (n, n)
        away = away / norm(away).clamp(min=1e-30)
        if kinship is not None and self.camps is not None:
            camp = self.camps[self.scene.rank(view.client) % len(self.camps)][0]
            away, reach = in_camps(away, camp), torch.full_like(kinship[0, 0], CAMP_PUSH)
        elif kinship is not None and centered is not None:
            reach = past_kinship(kinship, centered, honest)
        else:
            assert server.similarity is not None  # rule="support"
            reach = past_support(server.similarity, self.others, len(self.scene.malicious))
        median_norm = median_of(server.norms(), honest)
        return own + torch.where(honest.any(), reach * median_norm, norm(own)) * away

    def _min_gamma(self, server: SecureAFL, mean: Tensor, away: Tensor) -> Tensor | float:
        """(): the smallest gamma that shifts the median of all estimates almost as far as an infinite gamma.

        It assumes that all attackers send the same update, because their estimates stay in the history. The median also
        stands for the trimmed mean. A plain mean, or a server without estimates, has no limit: then the fixed gamma.
        """
        if server.config.rule == "mean" or not server.config.estimate:
            return self.gamma
        rows, honest = server.estimates(), server.present & ~self.malicious  # (n, d), (n)
        before = ops.median(rows, honest)
        spread = spread_of(rows, honest)
        unit = torch.where(spread > 0, spread, mean.square().mean().sqrt())  # (); no spread yet: the scale of the mean
        everyone = honest | self.malicious
        shifts = []
        for times in SPREADS:
            copies = (mean + times * unit * away).expand(len(self.scene.malicious), -1)
            shifts.append(norm(ops.median(rows.index_copy(0, self.scene.malicious, copies), everyone) - before))
        # From "infinity" down: the smallest gamma that reaches enough of the largest shift.
        least = unit * SPREADS[-1]
        for times, shift in zip(reversed(SPREADS), reversed(shifts), strict=True):
            least = torch.where(shift >= self.saturation * shifts[-1], times * unit, least)
        return least


def spread_of(rows: Tensor, keep: Tensor) -> Tensor:
    """(): root mean square over the columns of the standard deviation of the kept rows. rows: (n, d)    keep: (n)"""
    weights = keep.to(rows.dtype) / keep.sum().clamp(min=1)
    mean = weights @ rows
    return (weights @ (rows - mean).square()).mean().sqrt()
