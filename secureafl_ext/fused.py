"""A round as one op: a single pass over the history, with all inner products carried along. CUDA, float32."""

import torch
from torch import Tensor

from .config import Config

MOST_CLIENTS, MOST_PAIRS = 448, 5  # what the kernel holds in registers

step = torch.ops.secureafl.step_.default  # the op itself: finding its overload anew costs some 10 us a call


def fits(config: Config, clients: int, device: torch.device) -> bool:
    plain = config.pairs == "received" and config.dtype == torch.float32
    return device.type == "cuda" and plain and clients <= MOST_CLIENTS and 1 <= config.memory <= MOST_PAIRS


class Fused:
    """The same interface, results and state as Composed; another layout (csrc/cuda/round.cuh)."""

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        self.config, n, m = config, clients, config.memory

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.rows = zeros(size, n, 2 * m + 2)  # per coordinate and client: y and s slots, w, g
        self.gram = zeros(n, m * (2 * m + 1), dtype=torch.float64)  # inner products of the slots
        self.along = zeros(n, 2 * m + 2, dtype=torch.float64)  # slots . x, x . x, g . g, with x = model - w
        self.weights = zeros(n, 2 * m + 2)  # of the slots and x in the next estimate; the last is not used
        self.status = zeros(n, dtype=torch.int32)
        self.pairs, self.oldest = zeros(n, dtype=torch.int64), zeros(n, dtype=torch.int64)
        self.seen = zeros(n, dtype=torch.bool)
        self.factors = torch.full((config.window or 1024,), torch.inf, dtype=torch.float64, device=device)  # Q
        self.recorded, self.counts = zeros((), dtype=torch.int64), zeros(5, dtype=torch.int64)
        self._arrived = zeros((), dtype=torch.int32)  # blocks that have judged; zero between rounds

    def round(self, client: int, update: Tensor, models: Tensor, trained: int, now: int, new: int):
        c = self.config
        which = client, trained, now, new
        past = self.rows, self.gram, self.along, self.weights, self.status, self.pairs, self.oldest, self.seen
        judged = self.factors, self.recorded, self.counts, self._arrived
        numbers = c.lr, c.quantile, c.max_norm, c.trust, c.rule, c.trim
        switches = c.filter, c.estimate, c.receive, c.store == "all"
        return step(update, *which, models, *past, *judged, *numbers, *switches)

    def state(self) -> dict[str, Tensor]:
        """As Composed has it, and what else a bit-identical continuation needs."""
        m = self.config.memory
        planes = self.rows.permute(1, 2, 0)  # (n, 2m + 2, d)
        age = self._slots()[..., None]  # (n, m, 1)
        return {
            **{name: getattr(self, name) for name in ("factors", "recorded", "counts", "pairs", "seen")},
            "last_updates": planes[:, 2 * m + 1],
            "last_models": planes[:, 2 * m],
            "dw": planes[:, m : 2 * m].take_along_dim(age, 1),
            "dg": planes[:, :m].take_along_dim(age, 1),
            **{name: getattr(self, name) for name in ("oldest", "gram", "along", "weights", "status")},
        }

    def load(self, state: dict[str, Tensor], model: Tensor) -> None:
        """From a state of either kind; `model` is the current one."""
        m, device = self.config.memory, self.rows.device
        state = {name: tensor.to(device) for name, tensor in state.items()}
        for name in ("recorded", "counts", "pairs", "seen"):
            getattr(self, name).copy_(state[name])
        self.factors = state["factors"].clone()
        self.oldest.copy_(state.get("oldest", torch.zeros_like(self.oldest)))
        planes = self.rows.permute(1, 2, 0)  # (n, 2m + 2, d)
        slots = self._slots()[..., None].expand_as(state["dw"])  # (n, m, d)
        planes[:, :m].scatter_(1, slots, state["dg"])
        planes[:, m : 2 * m].scatter_(1, slots, state["dw"])
        planes[:, 2 * m].copy_(state["last_models"])
        planes[:, 2 * m + 1].copy_(state["last_updates"])
        if "gram" in state:
            for name in ("gram", "along", "weights", "status"):
                getattr(self, name).copy_(state[name])
            return
        lower = torch.tril_indices(2 * m, 2 * m, device=device)
        for k, rows in enumerate(planes):
            u, x, g = rows[: 2 * m].double(), (model - rows[2 * m]).double(), rows[2 * m + 1].double()
            self.gram[k] = (u @ u.T)[lower[0], lower[1]]
            self.along[k] = torch.cat([u @ x, (x @ x)[None], (g @ g)[None]])
        torch.ops.secureafl.refresh_(
            self.gram, self.along, self.weights, self.status, self.pairs, self.oldest, self.seen, self.config.trust
        )

    def _slots(self) -> Tensor:
        """(n, m): the slot of each client's j-th oldest pair."""
        return (self.oldest[:, None] + torch.arange(self.config.memory, device=self.oldest.device)) % self.config.memory
