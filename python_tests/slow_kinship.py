"""rule="kinship" by its definition, in NumPy and float64: client by client, on the slow server."""

import numpy as np
from slow_server import SETTING_NAMES, SlowServer

from secureafl_ext.rules.kinship import CROWD, KIN, KNOWN, NEAR, SHORT, SHORT_CENTERED, SHORT_SUM, SPAN, TURNED


class Twin:
    """The slow server with this rule, its averages kept client by client as the definition reads."""

    def __init__(self, server):
        self.config, n = server.config, server.clients
        settings = {name: getattr(self.config, name) for name in SETTING_NAMES}
        self.slow = SlowServer(np.zeros(len(server.model)), n, **settings)
        self.slow.combine = self.combine
        self.means, self.met, self.centre = np.zeros((n, n)), np.zeros(n, int), np.zeros(n)

    def submit(self, client, update, version):
        self.client, self.update, centre = client, update, self.centre
        accepted = self.slow.submit(client, update, version)
        if self.config.on_reject == "hold" and not accepted:
            self.centre = centre
        return accepted

    def combine(self, rows):
        last, i = self.slow.last, self.client
        senders = list(self.slow.senders)
        if len(rows) == 0:
            return np.zeros_like(self.slow.model)
        usual = np.median(np.linalg.norm(rows, axis=1))
        known = [k for k in senders if self.met[k] >= KNOWN]
        if 2 * len(known) >= len(senders):  # the others are on probation
            rows, senders = rows[[senders.index(k) for k in known]], known
        if i in last and self.slow.stored:
            for k, (g, _) in last.items():
                a, b = (x * min(1, usual / np.linalg.norm(x)) for x in (self.update, g))
                share = 1 / min(self.met[i] + 1, SPAN)
                self.means[i, k] = self.means[k, i] = (1 - share) * self.means[i, k] + share * (a @ b) / usual**2
            self.met[i] += 1
        chosen = self.chosen(senders)
        distance = np.sqrt(np.maximum(np.diag(self.apart()), 0))
        weights = (self.met >= KNOWN) / np.maximum(distance, NEAR)
        self.centre = weights / max(weights.sum(), 1e-300)
        rows = rows[[senders.index(k) for k in chosen]]
        rows = rows * np.minimum(1, usual / np.linalg.norm(rows, axis=1))[:, None]
        if self.config.step == "received":  # the mean weight of the chosen, times their number
            return rows[chosen.index(i)] if self.slow.taken and i in chosen else np.zeros_like(self.slow.model)
        return rows.mean(0)

    def apart(self):
        """Products of differences to the centre, one by one."""
        clients, w = range(len(self.met)), self.centre
        common = sum(w[a] * w[b] * self.means[a, b] for a in clients for b in clients)
        along = [sum(w[a] * self.means[i, a] for a in clients) for i in clients]
        return np.array([[self.means[i, k] - along[i] - along[k] + common for k in clients] for i in clients])

    def chosen(self, senders):
        known = [k for k in senders if self.met[k] >= KNOWN]
        length = np.sqrt(np.maximum(np.diag(self.means), 0))

        def few_kin(products, short):
            long = np.sqrt(np.maximum(np.diag(products), 0))

            def kin(i):
                others = (k for k in known if i in known and k != i)
                return 1 + sum(products[i, k] > KIN * max(long[i] * long[k], short) for k in others)

            most = CROWD * np.median([kin(i) for i in senders])
            return [i for i in senders if kin(i) <= most]

        kept, apart = few_kin(self.means, SHORT), few_kin(self.apart(), SHORT_CENTERED)
        both = [i for i in kept if i in apart]
        kept = both if 2 * len(both) >= len(senders) else kept
        total = np.sqrt(max(self.means[np.ix_(kept, kept)].sum(), 0))
        turned = {i for i in known if self.means[i, kept].sum() < TURNED * max(length[i] * total, SHORT_SUM)}
        return [i for i in kept if i not in turned]
