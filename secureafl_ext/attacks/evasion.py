"""How an update gets past a rule: from the honest mean as far towards a wish as the rule still accepts.

Each compared rule has an evasion of its own, in WAYS. All other rules, such as those of plug-ins, get `generic`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .. import ops
from ..defenses.aflguard import AFLGuard
from ..defenses.async_defender import AsyncDefender
from ..defenses.async_sgd import AsyncSGD
from ..defenses.base import AcceptanceTest, Arrival, NearestAccepted, Rule, Verdict, dot, norm
from ..defenses.basgd import BASGD
from ..defenses.centered_clip import CenteredClip
from ..defenses.demoa import DeMoA
from ..defenses.dnc import DnC
from ..defenses.fedbuff import STALENESS, FedBuffTrimmedMean
from ..defenses.flame import FLAME
from ..defenses.fltrust import FLTrust
from ..defenses.foolsgold import FoolsGold
from ..defenses.kardam import Kardam, lower_quantile
from ..defenses.krum import Krum
from ..defenses.nnm import NNMGeometricMedian, NNMTrimmedMean
from ..defenses.rule_server import RuleServer
from ..defenses.sageflow import Sageflow
from ..defenses.weighted import Weighted
from ..defenses.zeno import Zeno
from .base import View
from .local_steps import shorten

INSIDE = 0.999  # of a radius: rounding must not move an update out of its ball
ASIDE = 1e-3  # cosine beyond a cone's edge, for the same reason
TRIALS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.0)  # shares of the push that are tried on Sageflow
# Shares of the push that are tried on a rule over last updates, smallest first. The push is far longer than a gradient.
SHARES = tuple(10 ** (-k / 3) for k in range(15, -1, -1))
BISECTIONS = 20  # of the generic way: the share is found to within 2 ** -20


def past_rule(server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The update (d) to send. mean: (d) of the honest gradients    push: (d) from there to the wish"""
    way = WAYS.get(type(server.rule))
    return way(server.rule, server, view, mean, push) if way else generic(server, view, mean, push)


def generic(server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The accepted update that is nearest to the wish, if the rule can tell it (NearestAccepted). Otherwise bisection
    between the honest mean and the wish, with a fixed number of trials: a CUDA graph cannot stop earlier."""
    rule = server.rule
    wish = server.arrival(view.client, mean + push, view.model, view.staleness)
    if isinstance(rule, NearestAccepted):
        return rule.nearest_accepted(wish)
    accepts = rule.would_accept if isinstance(rule, AcceptanceTest) else lambda trial: rehearsed(rule, trial).accepted
    passes = accepts(wish)
    low, high = torch.zeros_like(norm(push)), torch.ones_like(norm(push))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        accepted = accepts(replace(wish, update=mean + middle.to(mean.dtype) * push))
        low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
    return mean + torch.where(passes, 1, low).to(mean.dtype) * push


def rehearsed(rule: Rule, arrival: Arrival) -> Verdict:
    """The verdict that the rule would give. The rule judges the arrival; then its memory is restored."""
    before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(rule).items()}
    tensors = {name: value for name, value in vars(rule).items() if isinstance(value, Tensor)}
    verdict = Verdict(*(part.clone() for part in rule.judge(arrival)))  # copies: a part may belong to the memory
    for name, tensor in tensors.items():
        tensor.copy_(before[name])
    vars(rule).clear()
    vars(rule).update(before | tensors)
    return verdict


def ball(wish: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """The update nearest to wish (d) within radius () of centre (d)."""
    return centre + shorten(wish - centre, radius)


def cone(wish: Tensor, axis: Tensor, cosine: Tensor | float) -> Tensor:
    """wish (d) if its cosine to axis (d) is large enough; otherwise its part across the axis, tilted to that cosine."""
    axis = torch.nn.functional.normalize(axis, dim=0)
    along = dot(wish, axis)
    across = wish - along.to(wish.dtype) * axis
    tilt = norm(across) * cosine / (1 - cosine**2) ** 0.5
    return torch.where(along >= cosine * norm(wish), wish, across + tilt.to(wish.dtype) * axis)


# One way past each compared rule: (rule, server, view, mean, push) -> update (d), arguments as in past_rule.


def straight(rule: AsyncSGD | BASGD, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The wish itself: the rule accepts every update."""
    return mean + push


def past_kardam(rule: Kardam, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The ball around the applied gradient. This upload enters the table of coefficients before it is judged. It is
    counted as a coefficient of 0 here: the true one can only raise the quantile."""
    kept, i = rule.coefficients.shape[1], view.client
    slot = (rule.pushed[i] % kept)[:, None]  # (1, 1)
    row = rule.coefficients[i]  # (1, kept)
    enters = rule.seen[i] & (view.model != rule.last_models[i]).any(1)  # (1)
    row = row.scatter(1, slot, torch.where(enters, 0, row.gather(1, slot)))
    bound = lower_quantile(rule.coefficients.index_copy(0, i, row).amax(1), rule.quantile)
    moved = norm(view.current - rule.applied_at)
    reach = bound * moved  # infinite while there is no coefficient: any update passes
    return ball(mean + push, rule.applied, torch.where(moved > 0, INSIDE * reach, 0))


def past_sageflow(rule: Sageflow, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The strongest of a few trials that keeps the entropy low. In the warm-up, or if no trial passes: the wish."""
    start = view.current if rule.candidate == "current" else view.model
    sent = wish = mean + push
    for share in reversed(TRIALS):
        trial = mean + share * push
        _, entropy = rule.trusted.evaluate(start - server.step_size * trial)
        sent = torch.where(entropy < rule.bound, trial, sent)
    return torch.where(rule.rounds < rule.warmup, wish, sent)


def past_zeno(rule: Zeno, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The edge of its cone. The norm does not matter, because the rule rescales it."""
    reference = trusted_gradient(rule, server, view)
    edge = rule.rho / server.step_size - rule.eps / norm(reference) ** 2 + ASIDE
    return cone(mean + push, reference, edge.clamp(-INSIDE, INSIDE))


def past_aflguard(rule: AFLGuard, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The far side of its ball around the trusted gradient: for a radius above 1 a step back."""
    reference = trusted_gradient(rule, server, view)
    if rule.test == "cosine":
        return cone(mean + push, reference, ASIDE)
    return (1 - INSIDE * rule.radius) * reference


# Acceptance is not enough: the weight falls with the cosine. These cosines give the longest step across the reference
# (cosine times sine) and the longest step back (half of cosine times 1 + cosine).
BEST = {"positive": 0.5**0.5, "shifted": -0.5}


def past_async_defender(rule: AsyncDefender, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The cone of the best cosine to the reference. In the warm-up: the wish."""
    axis = view.current if rule.reference == "model" else rule.direction
    wish = mean + push
    return torch.where(rule.taken < rule.warmup, wish, cone(wish, axis, BEST[rule.weight]))


def strongest(rule: Rule, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The mean plus the share of the push with which the rule's step goes farthest along the push. A rule over last
    updates accepts everything, but it may give a long push no weight. Its memory has the other attackers' rows."""
    wish = server.arrival(view.client, mean + push, view.model, view.staleness)

    def reach(trial: Tensor) -> Tensor:
        verdict = rehearsed(rule, replace(wish, update=trial))
        return torch.where(verdict.accepted, dot(verdict.step, push), -torch.inf)

    return farthest(reach, mean, push)


def farthest(reach: Callable[[Tensor], Tensor], mean: Tensor, push: Tensor) -> Tensor:
    """The trial (d) of mean + share * push with the largest reach (); of equal ones the shortest."""
    sent, best = mean, torch.full_like(norm(mean), -torch.inf)
    for share in SHARES:
        trial = mean + share * push
        now = reach(trial)
        sent, best = torch.where(now > best, trial, sent), torch.where(now > best, now, best)
    return sent


def past_fltrust(rule: FLTrust, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The rule rescales the norm and weighs by cosine, so the longest step across the trusted gradient is at 45 degrees
    to it (cosine times sine)."""
    return cone(mean + push, trusted_gradient(rule, server, view), BEST["positive"])


def past_fedbuff(rule: FedBuffTrimmedMean, server: RuleServer, view: View, mean: Tensor, push: Tensor) -> Tensor:
    """The largest effect on the trimmed mean of the buffer. Slots that are still free hold the last buffer's updates,
    which stand for those to come."""
    factor = STALENESS[rule.staleness](view.staleness).to(mean.dtype)
    slot = rule.count.reshape(1)

    def reach(trial: Tensor) -> Tensor:
        return dot(ops.trimmed_mean(rule.buffered.index_copy(0, slot, factor * trial[None]), rule.trim), push)

    return farthest(reach, mean, push)


def trusted_gradient(rule: Zeno | AFLGuard | FLTrust, server: RuleServer, view: View) -> Tensor:
    """The gradient that the rule will compare with. In some rounds the rule renews it before it judges."""
    return rule.trusted.gradient(view.current).detach() if server.refreshes() else rule.reference


WAYS: dict[type, Callable[..., Tensor]] = {
    AsyncSGD: straight,
    BASGD: straight,
    Kardam: past_kardam,
    Sageflow: past_sageflow,
    Zeno: past_zeno,
    AFLGuard: past_aflguard,
    AsyncDefender: past_async_defender,
    FLTrust: past_fltrust,
    FedBuffTrimmedMean: past_fedbuff,
    CenteredClip: strongest,
    DeMoA: strongest,
    DnC: strongest,
    FLAME: strongest,
    FoolsGold: strongest,
    Krum: strongest,
    NNMGeometricMedian: strongest,
    NNMTrimmedMean: strongest,
    Weighted: strongest,
}
