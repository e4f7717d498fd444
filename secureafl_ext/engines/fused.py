"""Fused: a round as one op, in a single pass over the history that also updates all inner products (csrc/round)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _C
from ..config import COUNTS, Config
from ..rules.row_rules import row_norms
from .base import Outcome
from .host_memory import history_zeros
from .presence import Presence, settings_of
from .quantile import empty_factors, forget_factors

step = torch.ops.secureafl.step_.default  # the overload itself: looking it up costs some 10 us a call
settle = torch.ops.secureafl.settle_.default
round_fits = torch.ops.secureafl.round_fits.default
pass_blocks = torch.ops.secureafl.pass_blocks.default
CARRIED = ("oldest", "scales", "gram", "along", "weights", "status")  # of each client, from round to round


def unsupported(config: Config, clients: int, device: torch.device) -> str | None:
    """The setting that the fused round does not support, for an error message; None if it supports all."""
    most = _C.most_clients(device.type == "cuda", config.memory)
    why = f" with memory={config.memory} on cuda" * (most < _C.most_clients(False, config.memory))
    conflicts = {
        f"rule={config.rule!r}" + f" with buckets={config.buckets}" * (config.buckets > 1): config.row_wise,
        f"pairs={config.pairs!r}": config.pairs != "received",
        f"history_dtype={config.history_dtype}": config.history_dtype == "float64",
        "memory=0 (there are no pairs)": config.history_dtype == "float16" and not config.memory,
        f"quorum={config.quorum}": config.quorum > 0,
        f"clients={clients} (at most {most}{why})": clients > most,
        f"a model on {device.type}": device.type not in ("cpu", "cuda"),
    }
    found = next((setting for setting, conflict in conflicts.items() if conflict), None)
    if found:
        return found
    half = config.history_dtype == "float16"
    if round_fits(torch.empty(0, device=device), padded(clients, config, device), config.memory, half):
        return None
    return f"clients={clients} with memory={config.memory} on {device.type} (too little shared memory)"


def padded(clients: int, config: Config, device: torch.device) -> int:
    """Number of clients in the layout: padded so that a row of a tile is a multiple of 16 bytes."""
    columns = _C.tile_columns(device.type == "cuda", clients, config.memory)
    return clients if columns >= 4 else -(-clients // 4) * 4


class Fused:
    """An Engine with the results and the state of Composed, in a tiled layout.

    slots: (tiles, 2m, n, columns) pairs as stored    last: (tiles, 2, n, columns) model and update
    n is the padded number of clients. Without pairs, m = 0, the tensors of CARRIED are not used.

    On a GPU the end of a round, which updates gram, along, weights and status, is deferred to the next round. So every
    method that reads or changes one of them calls _settle first.
    """

    kinship = None
    capturable = True

    @property
    def is_whole(self) -> bool:
        return self.counts.is_cuda  # on a CPU the op allocates memory after it has judged

    def __init__(self, config: Config, clients: int, size: int, device: torch.device):
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.config, self.clients, self.size, self.lr, m = config, clients, size, config.lr, config.memory
        columns = _C.tile_columns(device.type == "cuda", clients, m)
        n = padded(clients, config, device)
        tiles = -(-size // columns)
        where = config.history_device
        pairs = tiles, 2 * m, n, columns
        self.slots = history_zeros(where, *pairs, dtype=config.pair_dtype, device=device)  # y's, then s's
        self.last = history_zeros(where, tiles, 2, n, columns, dtype=torch.float32, device=device)  # w, then g
        self.scales = zeros(n, 2 * m) + 1  # the stored values of a slot are multiplied by this
        self.gram = zeros(n, m * (2 * m + 1), dtype=torch.float64)  # inner products of the slots
        self.along = zeros(n, 2 * m + 2, dtype=torch.float64)  # slots . x, x . x, g . g, with x = model - w
        self.weights = zeros(n, 2 * m + 2)  # of the slots and of x in the next estimate; the last column is not used
        self.status = zeros(n, dtype=torch.int32)
        self.pairs, self.oldest = zeros(n, dtype=torch.int64), zeros(n, dtype=torch.int64)
        self.seen = zeros(n, dtype=torch.bool)
        self.factors, self.recorded, self.factor_counts = empty_factors(config, n, device)
        self.counts = zeros(len(COUNTS), dtype=torch.int64)
        self._arrived = zeros(4, dtype=torch.int32)  # used by the op alone
        self._verdict = zeros(_C.VERDICT_BYTES, dtype=torch.uint8)  # of the last round; whether its end is deferred
        blocks = pass_blocks(self.last, n, m, config.history_dtype == "float16", tiles)
        self._changes = zeros(_C.pass_sums(n, m), blocks, dtype=torch.float64)  # partial sums for the end
        self._clients = torch.arange(clients, device=device).split(1)  # numbers on the device, for the op
        c = config
        carried = self.scales, self.gram, self.along, self.weights, self.status
        self._per_client = *carried, self.pairs, self.oldest, self.seen
        self.presence = Presence(config, n, device)
        self._past = self.slots, self.last, *self._per_client, *self.presence.tensors().values()
        flags = c.filter, c.estimate, c.receive, c.store == "all", c.on_reject == "hold"
        self._settings = c.quantile, c.max_norm, c.trust, c.rule, c.trim, *flags, *settings_of(c)

    def round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int
    ) -> Outcome:
        number = client if isinstance(client, Tensor) else self._clients[client]
        judged = self.factors, self.recorded, self.factor_counts, self.counts, self._arrived
        state = *self._past, *judged
        carried = self._verdict, self._changes
        return Outcome(*step(*carried, update, number, trained_on, now, new, models, *state, self.lr, *self._settings))

    def _settle(self) -> None:
        """Do the end of the last round, if it is deferred."""
        if self.config.memory:
            settle(self._verdict, self._changes, *self._per_client, self.config.trust)

    def similarity(self, version: int) -> None:
        return None

    def estimates(self, model: Tensor) -> Tensor:
        self._settle()
        count, planes, _, columns = self.slots.shape
        padded = torch.nn.functional.pad(model, (0, count * columns - self.size)).view(count, 1, columns)
        w, g = self.last.unbind(1)  # (tiles, n, columns)
        weights = self.weights[..., None]  # (n, 2m + 2, 1)
        result = g + weights[:, planes] * (padded - w)
        for j in range(planes):
            result += weights[:, j] * self.slots[:, j]
        return self._untiled(result * self.seen[:, None])

    def norms(self, model: Tensor) -> Tensor:
        return row_norms(self.estimates(model))

    def row_weights(self, model: Tensor) -> None:
        """None: all its rules are coordinate-wise."""
        return None

    def forget(self, client: int) -> None:
        self._settle()
        self._verdict.zero_()
        self._changes.zero_()
        for tiles in (self.slots, self.last):
            tiles[:, :, client] = 0
        for rows in self._per_client:
            rows[client] = 0
        self.scales[client] = 1
        self.presence.forget(client)
        forget_factors(self.factors, self.recorded, client)

    def number_of(self, client: int) -> Tensor:
        return self._clients[client]

    def last_of(self, client: Tensor) -> tuple[Tensor, Tensor]:
        model, update = self.last.index_select(2, client).movedim(1, 0).flatten(1)[:, : self.size]
        return update, model

    def state(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """The state of Composed, and the tensors that a bit-identical continuation needs besides."""
        self._settle()
        n, m = self.clients, self.config.memory
        names = ("pairs", "seen", *(CARRIED if m else ()))
        return {
            "factors": self.factors[:n].to(device, copy=True),
            "recorded": self.recorded[:n].to(device, copy=True),
            **({"factor_counts": self.factor_counts.to(device, copy=True)} if self.config.keeps_all else {}),
            "counts": self.counts.to(device, copy=True),
            "last_updates": self._rows(self.last, 1).to(device),
            "last_models": self._rows(self.last, 0).to(device),
            "dw": self._by_age(m, device),
            "dg": self._by_age(0, device),
            **{name: getattr(self, name)[:n].to(device, copy=True) for name in names},
            **{name: tensor.to(device, copy=True) for name, tensor in self.presence.tensors(n).items()},
        }

    def load(self, state: Mapping[str, Tensor], model: Tensor) -> None:
        """From a state of Fused or of Composed."""
        self._settle()
        n = self.clients
        self.counts.copy_(state["counts"])
        if self.config.keeps_all:
            self.factor_counts.copy_(state["factor_counts"])
        self.factors[:n] = state["factors"].to(self.factors.device)
        self.recorded[:n] = state["recorded"].to(self.recorded.device)
        for name, tensor in self.presence.tensors(n).items():
            tensor.copy_(state[name])
        for name in ("pairs", "seen"):
            getattr(self, name)[:n].copy_(state[name])
        self._set_rows(self.last, 0, state["last_models"])
        self._set_rows(self.last, 1, state["last_updates"])
        if self.config.memory:
            self._load_pairs(state, model)

    def _load_pairs(self, state: Mapping[str, Tensor], model: Tensor) -> None:
        """Load the slots and the tensors of CARRIED. The last updates and models must be loaded before."""
        n, m = self.clients, self.config.memory
        carried = set(CARRIED) <= set(state)
        if carried:
            for name in CARRIED:
                getattr(self, name)[:n].copy_(state[name])
        else:  # reorder the slots: the oldest pair comes first
            self.oldest[:n] = state.get("oldest", torch.zeros(n, dtype=torch.int64)).to(self.oldest.device)
            self.scales[:n] = state.get("scales", torch.ones(n, 2 * m, dtype=torch.float32)).to(self.scales.device)
            ages = self._slots()  # (n, m)
            self.scales.copy_(self.scales.gather(1, torch.cat([ages, m + ages], 1)))
            self.oldest.zero_()
        clients = torch.arange(n, device=state["dw"].device)
        for j in range(m):
            age = ((j - self.oldest[:n]) % m).to(clients.device)  # (n): age of the pair that goes into slot j
            self._set_rows(self.slots, j, state["dg"][clients, age])
            self._set_rows(self.slots, m + j, state["dw"][clients, age])
        if carried:
            return
        self._take_products(model)
        torch.ops.secureafl.refresh_(*self._per_client, self.config.trust)

    def _take_products(self, model: Tensor) -> None:
        """Compute gram and along from the history, some tiles of all clients at a time."""
        count, planes, n, columns = self.slots.shape
        lower = torch.tril_indices(planes, planes, device=self.gram.device)
        padded = torch.nn.functional.pad(model.double(), (0, count * columns - self.size))
        self.gram.zero_()
        self.along.zero_()
        at_once = max(1, 2**25 // (planes * n * columns))  # tiles
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            u = self.slots[first:last].permute(2, 1, 0, 3).flatten(2).double() * self.scales[..., None]  # (n, 2m, ..)
            w, g = self.last[first:last].permute(1, 2, 0, 3).flatten(2).double()  # (n, ..)
            x = padded[first * columns : last * columns] - w
            self.gram += (u @ u.mT)[:, lower[0], lower[1]]
            self.along[:, :planes] += (u @ x[..., None])[..., 0]
            self.along[:, planes] += x.square().sum(1)
            self.along[:, planes + 1] += g.square().sum(1)

    def _slots(self) -> Tensor:
        """(n, m): the slot of each client's j-th oldest pair."""
        return (self.oldest[:, None] + torch.arange(self.config.memory, device=self.oldest.device)) % self.config.memory

    def _by_age(self, first: int, device: torch.device | None) -> Tensor:
        """(n, m, d): the pairs, oldest first. first: the first of their planes, 0 for dg and m for dw"""
        m = self.config.memory
        if not m:
            return self.slots.new_zeros(self.clients, 0, self.size, device=device)
        ages = self._slots()  # (n, m)
        return torch.stack([self._rows(self.slots, first + ages[:, j]).to(device) for j in range(m)], 1)

    def _rows(self, tiles: Tensor, plane: int | Tensor) -> Tensor:
        """(n, d): one plane of every client; plane (n): a different one of each."""
        if isinstance(plane, Tensor):
            chosen = tiles.take_along_dim(plane[None, None, :, None], 1)[:, 0]  # (tiles, n, columns)
        else:
            chosen = tiles[:, plane]
        return self._untiled(chosen).clone(memory_format=torch.contiguous_format)  # with a single tile it is a view

    def _untiled(self, plane: Tensor) -> Tensor:
        """(tiles, n, columns) -> (clients, d)"""
        return plane[:, : self.clients].movedim(0, 1).flatten(1)[:, : self.size]

    def _set_rows(self, tiles: Tensor, plane: int, rows: Tensor) -> None:
        """Write rows (n, d) into one plane of every client."""
        count, _, _, columns = tiles.shape
        padded = torch.nn.functional.pad(rows, (0, count * columns - self.size))
        tiles[:, plane, : self.clients] = padded.unflatten(1, (count, columns)).movedim(1, 0).to(tiles.device)
