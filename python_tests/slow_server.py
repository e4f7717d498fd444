"""The server once more, in NumPy and float64, step by step as the algorithm reads: the oracle of test_server."""

import math
from fractions import Fraction

import numpy as np
import oracles
from presence_oracle import Clock

SETTING_NAMES = (
    "lr", "memory", "quantile", "max_norm", "trust", "rule", "trim", "store", "pairs", "max_staleness", "factors",
    "window", "on_reject", "filter", "estimate", "receive", "expiry", "probation", "quorum", "step",
)  # fmt: skip


class SlowServer:
    def __init__(self, model, clients, **settings):
        self.__dict__.update(settings)
        self.models = [np.array(model, dtype=np.float64)]
        self.least = math.ceil(Fraction(repr(self.quorum)) * clients)
        self.clock = Clock(clients, self.expiry, self.probation, self.step)
        self.last, self.buffer, self.lists = {}, {k: [] for k in range(clients)}, {}

    @property
    def model(self):
        return self.models[-1]

    def submit(self, client, g, version):
        if len(self.models) - 1 - version > self.max_staleness:
            return None
        w, now = self.models[version], self.model
        finite, first = np.isfinite(g).all(), client not in self.last
        accepted = bool(finite)
        if finite and first:
            g = g * min(1.0, self.max_norm / max(np.linalg.norm(g), 1e-300))
        elif finite:
            last_g, last_w = self.last[client]
            if (w == last_w).all():
                accepted = bool((g == last_g).all())
            else:
                accepted = self.judge(client, np.linalg.norm(g - last_g) / np.linalg.norm(w - last_w))
            accepted = accepted or not self.filter

        estimates = {k: self.estimated(k, now) for k in self.last if k != client}
        self.stored = finite and (accepted or self.store == "all")
        pace = self.clock.stored(client) if self.stored else 1.0
        present = self.clock.present()
        self.senders = [k for k in estimates if self.estimate and k in present]
        rows = [estimates[k] for k in self.senders]
        self.taken = accepted and self.receive and client in present
        if self.taken:
            self.senders.append(client)
            rows.append(g)
        direction = self.combine(np.array(rows))
        holds = self.on_reject == "hold" and not accepted
        if self.pairs == "rounds" and not holds:
            for k, row in estimates.items():
                self.push(k, now - self.last[k][1], row - self.last[k][0])
        if self.stored:
            if not first:
                self.push(client, w - self.last[client][1], g - self.last[client][0])
            self.last[client] = g, w
        holds = holds or len(self.last) < self.least
        self.models.append(now if holds else now - self.lr * pace * direction)
        return accepted

    def judge(self, client, factor):
        pooled = self.factors == "pooled"
        kept = self.lists.setdefault("all" if pooled else client, [])
        kept.append(factor)
        kept[:] = kept[-(self.window or (10**9 if pooled else 32)) :]
        if pooled:
            return bool(factor <= np.quantile(kept, self.quantile))
        # All clients weigh the same: the share of the others below it, the new factor itself left out.
        below = sum(Fraction(sum(bool(f < factor) for f in one), len(one)) for one in self.lists.values())
        return below <= Fraction(self.quantile) * (len(self.lists) - Fraction(1, len(kept)))

    def push(self, k, s, y):
        if s @ y > 1e-8 * (s @ s):
            self.buffer[k] = (self.buffer[k] + [(s, y)])[-self.memory :] if self.memory else []

    def estimated(self, k, now):
        g, w = self.last[k]
        if not self.buffer[k]:
            return g
        correction = oracles.dense_bfgs(*(np.array(part) for part in zip(*self.buffer[k], strict=True))) @ (now - w)
        norm = np.linalg.norm(correction)
        return g + correction * (min(1.0, self.trust * np.linalg.norm(g) / norm) if norm else 1.0)

    def combine(self, rows):
        trim = self.trim if self.rule == "trimmed_mean" else 0
        if len(rows) <= 2 * trim:
            return np.zeros_like(self.model)
        return oracles.median(rows) if self.rule == "median" else oracles.trimmed(rows, trim)
