"""Mean updates of made-up fleets, with and without attackers, and the weights that rule="support" gives clients."""

import numpy as np
import torch

from secureafl_ext.rules import support
from secureafl_ext.rules.support import Support

SIZE = 60


def unit(random, *shape):
    drawn = random.normal(size=shape)
    return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)


def fleet(random, n, common=0.3, group=0.4, own=0.2, groups=8):
    """(n, SIZE + 1): mean updates of honest clients in groups. Along the last axis no honest client pulls."""
    groups = unit(random, groups, SIZE)[np.arange(n) % groups]
    rows = common * unit(random, SIZE) + group * groups + own * unit(random, n, SIZE)
    return np.concatenate([rows, np.zeros((n, 1))], 1)


ALIKE = {"group": 0.0, "own": 0.3}
APART = {"common": 0.2, "group": 0.3, "own": 0.1, "groups": 10}


def pushing(random, n, f, strength, hide, **settings):
    """The last f clients push along the last axis; hidden behind honest gradients or not. None is longer than 1."""
    rows = fleet(random, n, **settings)
    rows[n - f :] *= hide
    rows[n - f :, -1] += strength
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)


def squads(random, n, f):
    """Attackers in pairs; each pair pushes its own way, and all of them a little the same."""
    rows = pushing(random, n, f, 0.3, hide=0)
    rows[n - f :, :-1] += 0.5 * np.repeat(unit(random, (f + 1) // 2, SIZE), 2, 0)[:f]
    return rows


def mosaic(random, n, f):
    """Each attacker hides its push behind the mean of some honest clients."""
    rows = pushing(random, n, f, 0.25, hide=0)
    some = random.random((f, n - f)) < 0.3
    rows[n - f :] += some @ rows[: n - f] / np.maximum(some.sum(1, keepdims=True), 1)
    return rows


def lone(random, n):
    return np.diag(random.uniform(0.2, 1, n))


def products_of(rows):
    return np.clip(rows @ rows.T, -1, 1)


def shifts(products):
    return support.shifts(torch.from_numpy(products)).numpy()


def weights(rows):
    """As a round has them."""
    made = Support(len(rows), torch.device("cpu"))
    made.means.copy_(torch.from_numpy(products_of(rows)))
    everyone = torch.ones(len(rows), dtype=torch.bool)
    made.refresh(everyone)
    return made.weights(everyone).numpy()
