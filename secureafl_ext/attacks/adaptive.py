"""Adaptive: knows the defense, and sends what that one still accepts of an update that points away from the minimum.

The wish is g_b - gamma p: the honest mean, and p the sign of its long-run average, so that all attackers push the same
way for the whole run. What is sent is the wish, or the nearest update that the defense lets through.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from ..defenses.base import BASGD, AsyncDefender, AsyncSGD, dot, need, norm
from ..defenses.kardam import Kardam, lower_quantile
from ..defenses.trusted import AFLGuard, Sageflow, Zeno
from ..rules.kinship import KIN, SHORT_CENTERED
from ..rules.row_rules import median_of, row_norms
from ..server.server import SecureAFL
from .backdoors import shorten
from .base import Scene, View

INSIDE = 0.999  # of a radius: rounding must not carry an update out of its ball
ASIDE = 1e-3  # cosine beyond a cone's edge, likewise
STEALTH = 0.9  # of the push that would just be noticed
TRIALS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.0)  # of gamma, where only trying tells
# In deviations of the honest estimates; the last stands for infinity. Columns differ in scale, hence up to 32.
SPREADS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1e4)


class Adaptive:
    """gamma: of the wish, where no median bounds what is worth wishing    momentum: of p's average
    saturation: share of the largest shift of a median that is enough    honest: how many honest clients are looked at
    each round for their mean, at most all of them
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
    ):
        need(0 <= momentum < 1, "adaptive", "momentum", "0 or more, below 1", momentum)
        need(0 < saturation <= 1, "adaptive", "saturation", "above 0, at most 1", saturation)
        self.honest = min(honest, scene.honest)
        need(self.honest >= 1, "adaptive", "honest", f"1 to {scene.honest}, the honest clients", honest)
        self.scene, self.gamma, self.momentum, self.saturation = scene, gamma, momentum, saturation
        self.average = scene.zeros(scene.net.size)
        self.malicious = scene.zeros(scene.clients, dtype=torch.bool).index_fill_(0, scene.malicious, True)

    def before(self) -> None: ...

    def after(self, view: View, model: Tensor) -> None: ...

    def update(self, view: View) -> Tensor:
        net, data = self.scene.net, self.scene.data
        mean = net.gradients(view.model, *data.train(view.honest)).mean(0)  # g_b
        self.average.lerp_(mean, 1 - self.momentum)
        away = -self.average.sign()  # -p
        if isinstance(view.server, SecureAFL):
            return self._past_secureafl(view, view.server, mean, away)
        rule = view.server.rule
        if type(rule) not in WAYS:
            known = ", ".join(way.__name__ for way in WAYS)
            raise ValueError(f"adaptive: the rule must be one of SecureAFL, {known}, got {type(rule).__name__}")
        return WAYS[type(rule)](rule, view, mean, self.gamma * away)

    def _past_secureafl(self, view: View, server: SecureAFL, mean: Tensor, away: Tensor) -> Tensor:
        """The ball of the filter around the client's last update; at first contact only its length is bounded."""
        if server.kinship is not None:
            wish = self._unnoticed(view, server, away)
        else:
            wish = mean + self._worthwhile(server, mean, away) * away
        last, model = server.last(view.client)
        moved = norm(view.model - model)
        # A client that was handed its last model again must repeat itself, whatever the threshold.
        radius = torch.where(moved > 0, INSIDE * server.threshold(view.client) * moved, 0)
        known = server.seen[view.client]  # (1)
        return torch.where(known, ball(wish, last, radius), shorten(wish, server.config.max_norm))

    def _unnoticed(self, view: View, server: SecureAFL, away: Tensor) -> Tensor:
        """(d): the client's honest gradient, pushed as far as leaves the attackers no kin of each other.

        A push p that all share makes the cosine of their mean updates p^2 / (q + p^2), with q the square of an honest
        client's; and the same once the server has taken the centre off, where lengths count for a little at least. The
        server's own tables say what q is.
        """
        own = self.scene.net.gradient(view.model, *self.scene.data.train(view.own[0]))
        honest = server.seen & ~self.malicious
        square = median_of(server.kinship.diagonal(), honest).clamp(min=0) * KIN / (1 - KIN)
        apart = median_of(server.kinship_apart.diagonal(), honest).clamp(min=0) * KIN / (1 - KIN)
        usual = median_of(row_norms(server.estimates()), honest)
        reach = STEALTH * torch.minimum(square, apart.clamp(min=KIN * SHORT_CENTERED)).sqrt() * usual
        return own + torch.where(honest.any(), reach, norm(own)) * away / norm(away).clamp(min=1e-30)

    def _worthwhile(self, server: SecureAFL, mean: Tensor, away: Tensor) -> Tensor | float:
        """(): the least gamma that moves the median of all estimates nearly as far as any would.

        Counted as if every attacker sent the same, for their estimates stay in the set round after round. A median
        stands for a trimmed mean too; a plain mean, or no estimates, leave nothing to saturate.
        """
        if server.config.rule == "mean" or not server.config.estimate:
            return self.gamma
        rows, honest = server.estimates(), server.seen & ~self.malicious  # (n, d), (n)
        before = ops.median(rows, honest)
        spread = spread_of(rows, honest)
        unit = torch.where(spread > 0, spread, mean.square().mean().sqrt())  # () nobody to compare with yet
        everyone = honest | self.malicious
        shifts = []
        for times in SPREADS:
            copies = (mean + times * unit * away).expand(len(self.scene.malicious), -1)
            shifts.append(norm(ops.median(rows.index_copy(0, self.scene.malicious, copies), everyone) - before))
        # From the last, "infinity", down: the least of those that reach enough of it.
        least = unit * SPREADS[-1]
        for times, shift in zip(reversed(SPREADS), reversed(shifts), strict=True):
            least = torch.where(shift >= self.saturation * shifts[-1], times * unit, least)
        return least


def spread_of(rows: Tensor, keep: Tensor) -> Tensor:
    """(): root mean square over columns of the standard deviation of the rows (n, d) that keep (n) names."""
    weights = keep.to(rows.dtype) / keep.sum().clamp(min=1)
    mean = weights @ rows
    return (weights @ (rows - mean).square()).mean().sqrt()


def ball(wish: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """The nearest update to wish (d) within radius () of centre (d)."""
    return centre + shorten(wish - centre, radius)


def cone(wish: Tensor, axis: Tensor, cosine: Tensor | float) -> Tensor:
    """wish (d) if its cosine to axis (d) is large enough; else its part across the axis, tilted to just that cosine."""
    axis = torch.nn.functional.normalize(axis, dim=0)
    along = dot(wish, axis)
    across = wish - along.to(wish.dtype) * axis
    tilt = norm(across) * cosine / (1 - cosine**2) ** 0.5
    return torch.where(along >= cosine * norm(wish), wish, across + tilt.to(wish.dtype) * axis)


# One way past each rule: the update to send for the honest mean (d) and how far, (d), it is wished from there.


def straight(rule: AsyncSGD | BASGD, view: View, mean: Tensor, push: Tensor) -> Tensor:
    return mean + push


def past_kardam(rule: Kardam, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The ball around the applied gradient. This upload enters the table first, there counted as a coefficient of 0:
    whatever it is, the quantile will be no smaller.
    """
    kept, i = rule.coefficients.shape[1], view.client
    slot = (rule.pushed[i] % kept)[:, None]  # (1, 1)
    row = rule.coefficients[i]  # (1, kept)
    enters = rule.seen[i] & (view.model != rule.last_models[i]).any(1)  # (1)
    row = row.scatter(1, slot, torch.where(enters, 0, row.gather(1, slot)))
    bound = lower_quantile(rule.coefficients.index_copy(0, i, row).amax(1), rule.quantile)
    moved = norm(view.current - rule.applied_at)
    reach = bound * moved  # infinite while nobody has a coefficient: anything passes
    return ball(mean + push, rule.applied, torch.where(moved > 0, INSIDE * reach, 0))


def past_sageflow(rule: Sageflow, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The strongest of a few that leaves the model sure. The warm-up takes any, and where none would, all are alike."""
    start = view.current if rule.candidate == "current" else view.model
    sent = wish = mean + push
    for share in reversed(TRIALS):
        trial = mean + share * push
        _, entropy = rule.trusted.evaluate(start - view.server.lr * trial)
        sent = torch.where(entropy < rule.bound, trial, sent)
    return torch.where(rule.rounds < rule.warmup, wish, sent)


def past_zeno(rule: Zeno, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The edge of its cone; the length does not matter there."""
    reference = trusted_gradient(rule, view)
    edge = rule.rho / view.server.lr - rule.eps / norm(reference) ** 2 + ASIDE
    return cone(mean + push, reference, edge.clamp(-INSIDE, INSIDE))


def past_aflguard(rule: AFLGuard, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The far side of its ball from the trusted gradient: for a radius above 1 a step back."""
    reference = trusted_gradient(rule, view)
    if rule.test == "cosine":
        return cone(mean + push, reference, ASIDE)
    return (1 - INSIDE * rule.radius) * reference


# Being accepted is not enough: the weight falls with the cosine. These give the longest step across the reference
# (cosine times sine) and the longest one back (half of cosine times 1 + cosine).
BEST = {"positive": 0.5**0.5, "shifted": -0.5}


def past_async_defender(rule: AsyncDefender, view: View, mean: Tensor, push: Tensor) -> Tensor:
    axis = view.current if rule.reference == "model" else rule.direction
    wish = mean + push
    return torch.where(rule.taken < rule.warmup, wish, cone(wish, axis, BEST[rule.weight]))


def trusted_gradient(rule: Zeno | AFLGuard, view: View) -> Tensor:
    """The one that the rule will judge by: it is taken anew as the update comes, every so many rounds."""
    return rule.trusted.gradient(view.current).detach() if view.server.refreshes() else rule.reference


WAYS: dict[type, Callable[..., Tensor]] = {
    AsyncSGD: straight,
    BASGD: straight,
    Kardam: past_kardam,
    Sageflow: past_sageflow,
    Zeno: past_zeno,
    AFLGuard: past_aflguard,
    AsyncDefender: past_async_defender,
}
