"""The defenses on the memory of last updates once more, in NumPy from the papers' formulas: lists, loops, no Gram
matrices. As in slow_defenses.py, a rule returns (accepted, factor, direction or None, reason)."""

import math

import numpy as np

norm = np.linalg.norm


def hash32(x):
    x = int(x)
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2**32
    return x ^ (x >> 16)


def draw(counter, number, stream=0):
    return hash32(hash32(number) ^ hash32(2 * counter + stream))


def fifth(n, malicious):
    return min(round(n / 5), (n - 1) // 2) if malicious is None else malicious


class Memory:
    """step() stores the update and asks weights() for a number per known client, or direction() for a vector."""

    def __init__(self, n, momentum=0.0):
        self.n, self.beta, self.rows = n, momentum, {}

    def forget(self, client):
        self.rows.pop(client, None)

    def step(self, i, g, w, wv, tau, t, eta):
        self.rows[i] = self.beta * self.rows[i] + (1 - self.beta) * g if i in self.rows else g
        self.heard(i, g)
        if 2 * len(self.rows) <= self.n:
            return True, 0.0 if self.weighs() else math.nan, 0 * g, "accepted: too few"
        weights = self.weights(t)
        if weights is None:
            way = self.direction(t)
            if way is None:
                return True, math.nan, 0 * g, "accepted: too few"
            return True, math.nan, way, "accepted"
        way = sum(weights[k] * self.rows[k] for k in self.rows) + self.more(t)
        return True, weights[i], way, "accepted: its weight" if weights[i] == 0 else "accepted"

    def heard(self, i, g): ...

    def more(self, t):
        return 0.0

    def weights(self, t):
        return None

    def weighs(self):
        """Whether the rule gives each row a weight."""
        return type(self).weights is not Memory.weights


def krum_order(rows, f):
    """Clients by Krum's score."""
    keep = max(1, len(rows) - f - 2)
    score = {k: sum(sorted(norm(g - h) ** 2 for j, h in rows.items() if j != k)[:keep]) for k, g in rows.items()}
    return sorted(sorted(rows), key=score.get)


class Krum(Memory):
    def __init__(self, n, malicious=None, selected=1, momentum=0.0):
        super().__init__(n, momentum)
        self.f, self.m = fifth(n, malicious), selected

    def weights(self, t):
        best = krum_order(self.rows, self.f)[: self.m]
        return {k: (k in best) / len(best) for k in self.rows}


def mixed(rows, f):
    keep = max(1, len(rows) - f)
    near = {k: sorted(rows, key=lambda j: -1 if j == k else norm(rows[j] - g))[:keep] for k, g in rows.items()}
    return {k: np.mean([rows[j] for j in js], axis=0) for k, js in near.items()}, near


def trimmed(rows, f):
    if len(rows) <= 2 * f:
        return None
    return np.sort(list(rows.values()), axis=0)[f : len(rows) - f].mean(0)


def weiszfeld(rows, start, steps, smoothing, alpha=None):
    """Weights of a geometric median. start: a point"""
    floor = max(smoothing * np.median([norm(g) for g in rows.values()]), 1e-100)
    z = start
    for _ in range(steps):
        pull = {k: (1 if alpha is None else alpha[k]) / max(norm(g - z), floor) for k, g in rows.items()}
        pull = {k: p / sum(pull.values()) for k, p in pull.items()}
        z = sum(p * rows[k] for k, p in pull.items())
    return pull, z


def geometric(rows):
    bound = np.median([norm(g) for g in rows.values()])
    start = np.mean([g * min(1, bound / norm(g)) for g in rows.values()], axis=0)
    return weiszfeld(rows, start, 8, 1e-6)[0]


class NNMTrimmedMean(Memory):
    def __init__(self, n, malicious=None, momentum=0.0):
        super().__init__(n, momentum)
        self.f = fifth(n, malicious)

    def direction(self, t):
        return trimmed(mixed(self.rows, self.f)[0], self.f)


class NNMGeometricMedian(NNMTrimmedMean):
    def weights(self, t):
        rows, near = mixed(self.rows, self.f)
        of_mixed = geometric(rows)
        return {k: sum(of_mixed[j] / len(near[j]) for j in rows if k in near[j]) for k in rows}


class CenteredClip(Memory):
    def __init__(self, n, radius=10.0, iterations=3, momentum=0.0):
        super().__init__(n)
        self.tau, self.iterations, self.beta, self.v = radius, iterations, momentum, 0.0

    def weights(self, t):
        """v as a point; the weight of a row is what each iteration adds of it and later ones leave."""
        start, weights, of_start = self.v, dict.fromkeys(self.rows, 0.0), 1.0
        for _ in range(self.iterations):
            away = {k: norm(g - self.v) for k, g in self.rows.items()}
            tau = self.tau or np.median(list(away.values()))
            pull = {k: min(1, tau / far if far else 1) / len(away) for k, far in away.items()}
            self.v = self.v + sum(p * (self.rows[k] - self.v) for k, p in pull.items())
            left = 1 - sum(pull.values())
            weights = {k: weights[k] * left + pull[k] for k in pull}
            of_start *= left
        self.rest = of_start * start
        return weights

    def more(self, t):
        return self.rest


class FoolsGold(Memory):
    def __init__(self, n, confidence=1.0, pardon=True, normalize=False, momentum=0.0):
        super().__init__(n, momentum)
        self.kappa, self.pardon, self.normalize, self.sums = confidence, pardon, normalize, {}

    def heard(self, i, g):
        self.sums[i] = self.sums.get(i, 0) + g

    def forget(self, client):
        super().forget(client)
        self.sums.pop(client, None)

    def weights(self, t):
        names = list(self.rows)
        sums = [self.sums[k] for k in names]
        n = len(names)
        cs = np.array([[a @ b / norm(a) / norm(b) for b in sums] for a in sums])
        np.fill_diagonal(cs, 0)
        v = cs.max(1)
        for i in range(n):
            for j in range(n):
                if self.pardon and v[i] < v[j]:
                    cs[i, j] *= v[i] / v[j]
        alpha = np.clip(1 - cs.max(1), 0, 1)
        alpha = alpha / alpha.max()
        alpha[alpha == 1] = 0.99
        with np.errstate(divide="ignore"):
            alpha = np.clip(self.kappa * (np.log(alpha / (1 - alpha)) + 0.5), 0, 1)
        return dict(zip(names, alpha / (alpha.sum() if self.normalize else n), strict=True))


class FLTrust(Memory):
    def __init__(self, n, trusted, every=1, momentum=0.0):
        super().__init__(n, momentum)
        self.trusted, self.every = trusted, every

    def weights(self, t):
        g0 = self.trusted.gradient(self.trusted.at(t // self.every * self.every))
        score = {k: max(0.0, g @ g0 / norm(g) / norm(g0)) for k, g in self.rows.items()}
        total = sum(score.values()) or 1
        return {k: s / total * norm(g0) / norm(self.rows[k]) for k, s in score.items()}


class DnC(Memory):
    def __init__(self, n, malicious=None, remove=1.0, iterations=5, coordinates=10_000, momentum=0.0):
        super().__init__(n, momentum)
        self.removed, self.iterations, self.b = round(remove * fifth(n, malicious)), iterations, coordinates

    def weights(self, t):
        names, good = sorted(self.rows), set(self.rows)
        rows = np.array([self.rows[k] for k in names])
        d, cut = rows.shape[1], self.removed
        for it in range(self.iterations):
            chosen = range(d)
            if self.b < d:
                edges = [i * d // self.b for i in range(self.b + 1)]
                draws = [draw(t * self.iterations + it, i) for i in range(self.b)]
                chosen = [lo + r % (hi - lo) for lo, hi, r in zip(edges, edges[1:], draws, strict=False)]
            part = rows[:, list(chosen)]
            part = part - part.mean(0)
            score = (part @ np.linalg.svd(part)[2][0]) ** 2
            last = set(np.array(names)[np.argsort(-score, kind="stable")[cut:]].tolist())
            good &= last
        good = good or last
        return {k: (k in good) / len(good) for k in names}


class FLAME(Memory):
    def __init__(self, n, noise=0.001, clip=True, momentum=0.0):
        super().__init__(n, momentum)
        self.lam, self.clip = noise, clip

    def weights(self, t):
        good = single_linkage_majority(self.rows)
        self.s = np.median([norm(g) for g in self.rows.values()])
        shrink = {k: min(1, self.s / norm(g)) if self.clip else 1 for k, g in self.rows.items()}
        return {k: (k in good) * shrink[k] / len(good) for k in self.rows}

    def more(self, t):
        size = len(next(iter(self.rows.values())))
        u = np.array([[(draw(t, i, s) + 1 - s) / 2**32 for i in range(size)] for s in (0, 1)])
        return self.lam * self.s * np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])


def single_linkage_majority(rows):
    """Kruskal: join the nearest groups until one has more than half of the rows."""
    group = {k: {k} for k in rows}
    if len(rows) == 1:
        return set(rows)
    pairs = sorted((1 - rows[a] @ rows[b] / norm(rows[a]) / norm(rows[b]), a, b) for a in rows for b in rows if a < b)
    for _, a, b in pairs:
        both = group[a] | group[b]
        for k in both:
            group[k] = both
        if 2 * len(both) > len(rows):
            return both
    raise AssertionError("the last pair joins everybody")


class DeMoA(Memory):
    def __init__(self, n, momentum=0.9, aggregator="geometric_median", malicious=None):
        super().__init__(n)
        self.beta, self.aggregator, self.f = momentum, aggregator, fifth(n, malicious)

    def weighs(self):
        return self.aggregator in ("geometric_median", "krum")

    def weights(self, t):
        if self.aggregator == "geometric_median":
            return geometric(self.rows)
        if self.aggregator == "krum":
            best = krum_order(self.rows, self.f)[0]
            return {k: float(k == best) for k in self.rows}
        return None

    def direction(self, t):
        return (
            np.median(list(self.rows.values()), axis=0) if self.aggregator == "median" else trimmed(self.rows, self.f)
        )


class Weighted(Memory):
    def __init__(self, n, base="geometric_median", trim=0.3, momentum=0.9):
        super().__init__(n)
        self.base, self.lam, self.beta, self.s = base, trim, momentum, {}

    def weighs(self):
        return self.lam > 0 or self.base == "geometric_median"

    def heard(self, i, g):
        self.s[i] = self.s.get(i, 0) + 1

    def forget(self, client):
        super().forget(client)
        self.s.pop(client, None)

    def weights(self, t):
        total = sum(self.s.values())
        if self.base == "geometric_median":
            weights, center = weiszfeld(self.rows, 0 * self.rows[next(iter(self.rows))], 3, 1e-6, self.s)
        else:
            weights, center = None, self.direction(t)
        if not self.lam:
            return weights
        left, weights = (1 - self.lam) * total, {}
        for k in sorted(sorted(self.rows), key=lambda k: norm(self.rows[k] - center)):
            weights[k] = min(left, self.s[k]) / ((1 - self.lam) * total)
            left = max(0.0, left - self.s[k])
        return weights

    def direction(self, t):
        """Each value as often as its client has uploaded; the upper middle one."""
        rows = [self.rows[k] for k in self.rows for _ in range(self.s[k])]
        return np.sort(rows, axis=0)[len(rows) // 2]
