"""rule="support" once more, in NumPy, client by client and direction by direction as its docstrings read."""

import numpy as np

from secureafl_ext.rules import support as s


def bounds(products):
    """(least eigenvalue of a crowd's direction, what it comes from)"""
    c = len(products)
    middle = np.eye(c) - np.ones((c, c)) / c
    return max(s.CROWD_LEAST, s.CROWD * usual(middle @ products @ middle))


def usual(products):
    """The usual eigenvalue: the median over the clients of |row|^2 / diagonal."""
    return np.median([row @ row / max(row[k], s.SHORT_LEVEL) for k, row in enumerate(products)])


def robust_mean(values):
    """Tukey's biweight about the median."""
    center = np.median(values)
    reach = s.CUT * (s.NORMAL * np.median(np.abs(values - center)) + s.LEAST_SPREAD)
    weights = [(1 - ((v - center) / reach) ** 2) ** 2 if abs(v - center) < reach else 0 for v in values]
    return np.average(values, weights=weights)


def likeness(products):
    """(c, c): of every two clients, 0 to 1."""
    c, weights = len(products), np.zeros((len(products),) * 2)
    length = np.sqrt(np.maximum(np.diag(products), s.SHORT_SQUARE))
    for i in range(c):
        for k in set(range(c)) - {i}:
            cosine = products[i, k] / (length[i] * length[k])
            weights[i, k] = min(max((cosine - s.KIN) / (1 - s.KIN), 0), 1)
    return weights


def kin_weights(products):
    """(c, c): of the kin of each client, their sum 1, or less if a client has almost no kin."""
    return np.array([row / max(row.sum(), s.FEW_KIN) for row in likeness(products)])


def kept(products):
    """(c): the share of its weight that a client keeps: less with many opponents, who vote by what they keep."""
    by_group, usual = kept_by_group(products)
    votes, against = by_group, likeness(2 * np.diag(np.diag(products)) - products) - likeness(products)
    for _ in range(2):
        votes = by_group * np.interp(against @ votes / usual, [s.OPPOSED, s.OPPOSED_END], [1, 0])
    return votes


def kept_by_group(products):
    """(c): the share of its weight that a client keeps: less in a group that is too large. And the usual size."""
    sizes = sorted(each := [1 + row.sum() for row in likeness(products)])
    usual, low = np.median(sizes), sizes[(len(sizes) - 1) // 4]
    largest = max(usual * (1 + s.GROUP), usual + s.GROUP_SPREADS * (usual - low), s.GROUP_LEAST * len(each))
    # Beyond the bound and a fifth a group has, all together, GROUP_LEFT of the weight of a usual one.
    ends = [min(1, s.GROUP_LEFT * usual / size) for size in each]
    shares = [np.interp(size, [largest, s.GROUP_END * largest], [1, end]) for size, end in zip(each, ends, strict=True)]
    return np.array(shares), usual


def kept_by_distance(along, c):
    """(c): the share of its weight that a client keeps: less if it goes further along the odd directions than usual, on
    the side where clients go far. along: of each direction the loadings (c)"""
    lengths, reach = np.zeros(c), np.zeros(c)
    for loads in along:
        lean = np.sum(loads**3) / np.sum(np.abs(loads) ** 3)
        lengths += loads**2
        reach += loads**2 * np.where(np.sign(loads) == np.sign(lean), 1, max(0, 1 - 2 * abs(lean)))
    lengths, reach = np.sqrt(lengths), np.sqrt(reach)
    spread = s.NORMAL * np.median(np.abs(lengths - np.median(lengths))) + s.LEAST_SPREAD
    return np.interp((reach - np.median(lengths)) / spread, [s.APART, s.APART_END], [1, 0])


class Space:
    """Vectors written by coefficients of the clients' mean updates; products (c, c): their inner products."""

    def __init__(self, products):
        self.products, self.cut = np.array(products, dtype=float), []
        self.left = self.products.copy()  # of the parts of the clients that are orthogonal to all that was cut

    def loadings(self, direction):
        """(c): of every client's remaining part along a direction, given by coefficients of these parts."""
        return self.left @ direction

    def cut_above(self, least, maps):
        """(c): the coefficients of what is added to the mean. maps (c, c): whose directions are looked for. Sets along:
        of each direction that was found the loadings (c) of what the maps make."""
        values, vectors = np.linalg.eigh(maps @ self.left @ maps.T)
        self.along = [np.sqrt(values[j]) * vectors[:, j] for j in range(len(values)) if values[j] > least]
        found = [maps.T @ vectors[:, j] / np.sqrt(values[j]) for j in range(len(values)) if values[j] > least]
        along = [self.loadings(direction) for direction in found]
        added, own = np.zeros(len(self.left)), [self.remaining(direction) for direction in found]
        for coefficients, loads in zip(own, along, strict=True):
            added += coefficients * (robust_mean(loads) - loads.mean())
        for coefficients, loads in zip(own, along, strict=True):
            self.cut.append((coefficients, loads))
            self.left = self.left - np.outer(loads, loads)
        return added

    def remaining(self, coefficients):
        """Coefficients of the clients' whole mean updates, from those of their remaining parts."""
        return coefficients - sum((loads @ coefficients * own for own, loads in self.cut), np.zeros(len(coefficients)))


def shifts(products):
    c = len(products)
    space, crowd, everyone = Space(products), bounds(products), np.eye(c)
    weights = np.full(c, 1 / c) + space.cut_above(crowd, everyone)
    apart = everyone - kin_weights(space.left)
    odd = max(s.ODD_LEAST, s.ODD * usual(apart @ space.left @ apart.T))
    weights += space.cut_above(odd, apart)
    near = kept_by_distance(space.along, c)
    weights += space.cut_above(s.AGAIN * crowd, everyone)
    share = weights * c  # 1 is a client's share of the mean
    faded = np.where(share >= 2 * s.FADE, share, np.where(share <= s.FADE, 0, share * (share - s.FADE) / s.FADE))
    left = np.minimum(faded * kept(products) * near, s.MOST)
    fill = min(1 / left.mean(), s.FILL) if left.any() else 1
    return (np.minimum(left * max(fill, 1), s.MOST) - 1) / c
