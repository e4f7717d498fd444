"""How far attackers can push past a rule that averages inner products over time, from the server's own tables.

All attackers keep their honest gradients and add the same push. `past_*` return its norm () in median norms of the
clients' updates, the unit of the tables. Source: this project's own check of the two rules, 2026.
"""

import torch
from torch import Tensor

from ..rules import kinship, support
from ..rules.row_rules import median_of

STEALTH = 0.9  # of the push that would just be noticed
# The same for the crowd and the odd directions of the support rule. Less, because the honest parts of the attackers add
# to the eigenvalue of the push. All were chosen on synthetic tables, as in test_sim_adaptive_support.py.
STEALTH_CROWD, STEALTH_ODD = 0.85, 0.8
CAMP_PUSH = 2.0  # norm of the push of a camp, in median norms: most of the update, which the server clips


def past_kinship(products: Tensor, centered: Tensor, honest: Tensor) -> Tensor:
    """The largest push with which the attackers do not become one group of similar clients.

    products, centered: (n, n) the server's `kinship` and `kinship_apart`    honest: (n) bool, honest clients that count

    A push p that all attackers share makes the cosine of their mean updates p^2 / (q + p^2), where q is the squared
    norm of an honest client's mean update. The same holds after centering; there the norms have a floor.
    """
    most = kinship.KIN / (1 - kinship.KIN)
    square = median_of(products.diagonal(), honest).clamp(min=0) * most
    rest = median_of(centered.diagonal(), honest).clamp(min=0) * most
    return STEALTH * torch.minimum(square, rest.clamp(min=kinship.KIN * kinship.SHORT_CENTERED)).sqrt()


def in_camps(away: Tensor, camp: Tensor) -> Tensor:
    """(d): the push of one camp, of norm 1, from the common direction and one of the camp alone, unit vectors (d).

    The pushes of two camps have a cosine just below the kinship bound. So the rule sees a group for each camp, and
    accepts groups of up to 1.5 times the median size; within a camp the push needs no bound.
    """
    common = STEALTH * kinship.KIN
    return common**0.5 * away + (1 - common) ** 0.5 * camp


def past_support(products: Tensor, honest: Tensor, attackers: int) -> Tensor:
    """The largest push that the support rule sees neither as a crowd's direction nor as an odd one.

    products: (n, n) the server's `similarity`    honest: (h) int64, the honest clients    attackers: f, 1 or more

    A push p that f clients share adds p^2 to the inner products of each two of them. That is an eigenvalue f p^2. It
    stays below the rule's two bounds, computed from the table of the honest clients: that of the crowd as it is in the
    second search, and that of the odd directions. The attackers' group stays small: such a push is much shorter than
    the honest parts, so that it hardly makes two attackers alike. A client that was not seen yet lowers the bounds:
    then the push is shorter than it could be.
    """
    table = products.index_select(0, honest).index_select(1, honest)
    maps = support.without_kin(table)
    again = support.AGAIN or 1.0
    crowd = again * (support.CROWD * support.level(support.centered(table))).clamp(min=support.CROWD_LEAST)
    odd = (support.ODD * support.level(maps @ table @ maps.T)).clamp(min=support.ODD_LEAST)
    return (torch.minimum(STEALTH_CROWD**2 * crowd, STEALTH_ODD**2 * odd) / attackers).sqrt()
