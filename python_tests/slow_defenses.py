"""The compared defenses once more, in NumPy and in words of the spec: lists, loops, and nothing masked.

Letters as there: g update, w current model, wv the model trained on, tau staleness, t round, eta learning rate.
A rule returns (accepted, factor, direction or None, reason).
"""

import math

import numpy as np

norm = np.linalg.norm


class SlowServer:
    def __init__(self, rule, model, eta):
        self.rule, self.models, self.eta = rule, [np.array(model, dtype=np.float64)], eta

    def submit(self, i, g, version):
        t, w = len(self.models) - 1, self.models[-1]
        g = np.asarray(g, dtype=np.float64)
        if not np.isfinite(g).all():
            self.models.append(w)
            return False, math.nan, "rejected: not finite"
        accepted, factor, direction, reason = self.rule.step(i, g, w, self.models[version], t - version, t, self.eta)
        self.models.append(w if direction is None else w - self.eta * direction)
        return accepted, factor, reason


class AsyncSGD:
    def __init__(self, n):
        pass

    def step(self, i, g, w, wv, tau, t, eta):
        return True, math.nan, g, "accepted"


class Kardam:
    def __init__(
        self, n, malicious=None, quantile=None, kept=25, patience=None, frequency="off", dampening="exp", decay=0.2
    ):
        self.f = round(n / 5) if malicious is None else malicious
        self.q = 1 - self.f / n if quantile is None else quantile
        self.kept, self.patience, self.frequency = kept, patience or n, frequency
        self.damp = {
            "exp": lambda tau: np.exp(-decay * tau),
            "inverse": lambda tau: 1 / (1 + tau),
            "off": lambda tau: 1,
        }[dampening]
        self.uploads, self.lists = {}, {}  # by client
        self.last, self.rejections, self.ids = None, 0, []

    def step(self, i, g, w, wv, tau, t, eta):
        if i not in self.uploads:
            self.uploads[i] = (g, wv)
        elif norm(wv - self.uploads[i][1]) > 0:
            old_g, old_w = self.uploads[i]
            self.lists[i] = [*self.lists.get(i, []), norm(g - old_g) / norm(wv - old_w)][-self.kept :]
            self.uploads[i] = (g, wv)
        k_hat = norm(g) / norm(w) if self.last is None else norm(g - self.last[0]) / norm(w - self.last[1])
        table = [max(values) for values in self.lists.values()]
        smooth = not table or k_hat <= np.quantile(table, self.q, method="lower")
        recent = self.ids[len(self.ids) - 2 * self.f :] if self.f and len(self.ids) > 2 * self.f else self.ids
        recent = recent if self.f else []
        often = (self.frequency == "strict" and i in recent) or (
            self.frequency == "lenient" and recent.count(i) + 1 > self.f
        )
        opened = self.rejections >= self.patience
        if often or not (smooth or opened):
            self.rejections += not smooth
            why = "rejected: client among" if often else "rejected: coefficient"
            return False, k_hat, None, why
        self.rejections, self.last = 0, (g, w)
        self.ids.append(i)
        return True, k_hat, self.damp(tau) * g, "accepted" if smooth else "accepted: as many rejections"


class BASGD:
    def __init__(self, n, buffers=None, interval=None, trim=None):
        self.size = buffers if buffers is not None else {6: 5}[n]
        self.interval, self.trim = interval or 4 * self.size, trim
        self.beta, self.buffers = list(range(n)), [[] for _ in range(self.size)]
        self.heard, self.waited = set(), 0

    def step(self, i, g, w, wv, tau, t, eta):
        self.buffers[self.beta[i] % self.size].append(g)
        self.heard.add(i)
        self.waited += 1
        if all(self.buffers):
            means = np.sort([np.mean(b, axis=0) for b in self.buffers], axis=0)
            direction = np.median(means, axis=0)
            if self.trim is not None:
                direction = means[self.trim : self.size - self.trim].mean(0)
            self.buffers, self.heard, self.waited = [[] for _ in range(self.size)], set(), 0
            return True, math.nan, direction, "accepted: no buffer empty"
        if self.waited >= self.interval:
            self.waited = 0
            for number, s in enumerate(sorted(self.heard)):
                self.beta[s] = number
        return True, math.nan, None, "accepted: buffered"


class Sageflow:
    def __init__(
        self, n, trusted, threshold=1.0, classes=10, delta=1.0, decay=0.5, warmup=200, mode="literal",
        candidate="current",
    ):  # fmt: skip
        self.trusted, self.e_th = trusted, threshold / 2.302585092994046 * np.log(classes)
        self.delta, self.lam, self.warmup, self.mode, self.candidate = delta, decay, warmup, mode, candidate

    def step(self, i, g, w, wv, tau, t, eta):
        loss, entropy = self.trusted.evaluate((w if self.candidate == "current" else wv) - eta * g)
        if t >= self.warmup and entropy >= self.e_th:
            return False, entropy, None, "rejected: entropy"
        beta = 0.5
        if self.mode == "anchored":
            l_t, _ = self.trusted.evaluate(w)
            beta = loss**-self.delta / (loss**-self.delta + l_t**-self.delta)
        return (
            True,
            entropy,
            2 * beta * (tau + 1) ** -self.lam * g,
            ("accepted: warm-up" if t < self.warmup else "accepted"),
        )


class Zeno:
    def __init__(self, n, trusted, rho=0.0, eps=0.0, every=10):
        self.trusted, self.rho, self.eps, self.every, self.age = trusted, rho, eps, every, None

    def step(self, i, g, w, wv, tau, t, eta):
        if self.age is None or t // self.every > self.age:
            self.age, self.v = t // self.every, self.trusted.gradient(self.trusted.at(t // self.every * self.every))
        scaled = g * norm(self.v) / norm(g)
        score = eta * self.v @ scaled - self.rho * scaled @ scaled
        if score >= -eta * self.eps:
            return True, score, scaled, "accepted: rescaled"
        return False, score, None, "rejected: score"


class AFLGuard:
    def __init__(self, n, trusted, radius=1.5, test="norm", every=1):
        self.trusted, self.radius, self.test, self.every = trusted, radius, test, every

    def step(self, i, g, w, wv, tau, t, eta):
        g_s = self.trusted.gradient(self.trusted.at(t // self.every * self.every))
        if self.test == "cosine":
            factor = g @ g_s / norm(g) / norm(g_s)
            near = g @ g_s > 0
        else:
            factor = norm(g - g_s) / norm(g_s)
            near = factor <= self.radius
        return near, factor, g if near else None, "accepted" if near else "rejected: too far"


class AsyncDefender:
    def __init__(
        self, n, momentum=0.9, weight="positive", reference="ema", max_norm=50.0, warmup=None, credibility=False
    ):
        self.rho, self.weight, self.ref, self.bound = momentum, weight, reference, max_norm
        self.warmup, self.c = warmup or n, [1.0] * n if credibility else None
        self.steps, self.lengths, self.taken = [], [], 0

    def step(self, i, g, w, wv, tau, t, eta):
        ema = 0 * g
        for u in self.steps:
            ema = self.rho * ema + (1 - self.rho) * u
        cap = self.lengths[0] if self.lengths else 0
        for length in self.lengths[1:]:
            cap = self.rho * cap + (1 - self.rho) * length
        m = {"ema": ema, "last": self.steps[-1] if self.steps else ema, "model": w}[self.ref]
        s = g @ m / norm(g) / norm(m) if norm(m) > 0 else math.nan
        self.taken += 1
        warm = self.taken <= self.warmup
        if warm:
            a, cap = 1.0, self.bound
        else:
            a = max(0.0, s) if self.weight == "positive" else (1 + s) / 2
            if self.c is not None:
                self.c[i] = 0.9 * self.c[i] + 0.1 * (s > 0)
                a *= self.c[i]
        if a <= 0:
            return False, s, None, "rejected: cosine"
        u = a * g * min(1, cap / norm(g))
        self.steps.append(u)
        self.lengths.append(min(norm(g), self.bound))
        return True, s, u, "accepted: warm-up (reduced" if warm else "accepted: weighted by cosine (reduced"


class FedBuff:
    def __init__(self, n, buffer=10, trim=None, server_lr=1.0, staleness="sqrt"):
        self.k, self.lr, self.staleness, self.buffer = buffer, server_lr, staleness, []
        self.b = min(round(buffer / 5), (buffer - 1) // 2) if trim is None else trim

    def step(self, i, g, w, wv, tau, t, eta):
        self.buffer.append(g / math.sqrt(1 + tau) if self.staleness == "sqrt" else g)
        if len(self.buffer) < self.k:
            return True, math.nan, None, "accepted: buffered"
        rows, self.buffer = np.sort(self.buffer, axis=0), []
        return True, math.nan, self.lr * rows[self.b : self.k - self.b].mean(0), "accepted: buffer full"
