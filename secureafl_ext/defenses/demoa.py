"""DeMoA: a robust rule over the cached momenta of all clients."""

from torch import Tensor

from .. import ops
from ..config import Config
from ..rules.row_rules import geometric_median
from .base import Arrival, Verdict, need
from .krum import multi_krum
from .memory_rows import LastUpdates, malicious_count, trimmed_mean

AGGREGATORS = ("geometric_median", "krum", "median", "trimmed_mean")


class DeMoA(LastUpdates):
    """Each client has a momentum: m_i <- momentum * m_i + (1 - momentum) * update at its uploads, unchanged otherwise.
    The step is a robust aggregate of the momenta of all clients, new and cached.

    Source: Otsuka, Takezawa and Yamada, arXiv 2509.02970. The clients keep their momentum there; here the server does,
    which gives the same rows. The source leaves the aggregator open; the default is ours. Centered clipping over
    momenta is the defense centered-clip with momentum=0.9.
    aggregator: geometric_median (Pillutla et al. 2022), krum, median or trimmed_mean
    malicious: f of krum and trimmed_mean. Default: a fifth of the clients
    """

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        momentum: float = 0.9,
        aggregator: str = "geometric_median",
        malicious: int | None = None,
    ):
        need(aggregator in AGGREGATORS, "DeMoA", "aggregator", f"one of {', '.join(AGGREGATORS)}", aggregator)
        super().__init__(model, clients, momentum)
        self.aggregator, self.malicious = aggregator, malicious_count("DeMoA", clients, malicious)
        self.weighs = aggregator in ("geometric_median", "krum")
        self.config = Config(rule="geometric_median")

    def judge(self, arrival: Arrival) -> Verdict:
        stored = self.remember(arrival)
        if self.aggregator == "median":
            return self.stepped(stored, ops.median(self.rows, self.seen), self.seen.any())
        if self.aggregator == "trimmed_mean":
            return self.stepped(stored, *trimmed_mean(self.rows, self.malicious, self.seen))
        if self.aggregator == "krum":
            return self.weighted(arrival, stored, multi_krum(self.products, self.seen, self.malicious, 1))
        return self.weighted(arrival, stored, geometric_median(self.products, self.seen, self.config))
