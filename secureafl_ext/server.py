"""The server: one update in, one round done (spec: Algorithm 1), and no waiting for the device."""

import math
import os
import threading
from dataclasses import asdict, dataclass
from operator import index

import torch
from torch import Tensor

from . import checkpoint, ops
from .history import History

# A rule is a name in this table. Coordinate-wise ones are fused with the estimates in `aggregate`.
RULES = {"median": "coordinate-wise", "trimmed_mean": "coordinate-wise", "mean": "coordinate-wise"}
STORES = ("all", "accepted")
PAIRS = ("received", "rounds")
DTYPES = {"float32": torch.float32, "float64": torch.float64}

REASONS = (
    "accepted",
    "accepted: first contact",
    "rejected: factor above the quantile of all factors",
    "rejected: same model version as last time, another update",
    "rejected: not finite",
)
_ACCEPTED, _FIRST, _STEEP, _SAME_VERSION, _NOT_FINITE = range(len(REASONS))
_COUNTS = ("accepted", "rejected", "non_finite", "capped", "fallbacks")


@dataclass(frozen=True)
class Config:
    """Settings of a server. The paper's Variants: I rule="mean", II not estimate, III not filter, IV not receive."""

    lr: float = 0.01  # eta: step along the aggregate
    memory: int = 3  # epsilon: pairs kept per client
    quantile: float = 0.8  # alpha: a factor above this quantile of all factors is rejected
    max_norm: float = 50.0  # G: a client's first update is clipped to this norm
    trust: float = 1.0  # a correction is at most this many times as long as the update it corrects; inf: no cap
    rule: str = "median"
    trim: int = 0  # values dropped on either side by trimmed_mean
    store: str = "all"  # remember every finite update, or only "accepted" ones
    pairs: str = "received"  # pairs of consecutive uploads; "rounds": also of each round's own estimates, as printed
    max_staleness: int = 10  # tau_max: how many versions back an update may have been computed
    window: int | None = None  # judge by the last so many factors; None: all
    history_dtype: str = "float32"
    filter: bool = True
    estimate: bool = True
    receive: bool = True

    def __post_init__(self):
        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"SecureAFL: {name} must be {expected}, got {getattr(self, name)!r}")

        need(math.isfinite(self.lr), "lr", "a finite number")
        need(0 <= self.memory <= 16, "memory", "0 to 16")
        need(0 <= self.quantile <= 1, "quantile", "between 0 and 1")
        need(self.max_norm > 0, "max_norm", "positive")
        need(self.trust >= 0, "trust", "0 or more (inf: no cap)")
        need(self.rule in RULES, "rule", f"one of {', '.join(RULES)}")
        need(self.trim >= 0, "trim", "0 or more")
        need(self.store in STORES, "store", f"one of {', '.join(STORES)}")
        need(self.pairs in PAIRS, "pairs", f"one of {', '.join(PAIRS)}")
        need(self.max_staleness >= 0, "max_staleness", "0 or more")
        need(self.window is None or self.window > 0, "window", "None or positive")
        need(self.history_dtype in DTYPES, "history_dtype", f"one of {', '.join(DTYPES)}")
        need(self.estimate or self.receive, "receive", "true when estimate is false")


@dataclass(frozen=True)
class Receipt:
    """What became of one submission. `accepted` and `factor` live on the device until somebody reads them."""

    accepted: Tensor  # () bool
    factor: Tensor  # () float64; NaN where none is defined
    staleness: int  # rounds between the model the update was computed on and this one
    version: int  # of the server, after this submission
    _reason: Tensor | str

    @property
    def reason(self) -> str:
        return self._reason if isinstance(self._reason, str) else REASONS[int(self._reason)]


class SecureAFL:
    """Takes one client's update at a time and steps a flat model.

    model: (d) start, float32 or float64; its device is the server's    clients: a capacity; any may join late
    The other settings are those of Config. Safe to call from several threads: one lock, order of arrival.
    """

    def __init__(
        self,
        model: Tensor,
        clients: int,
        *,
        lr: float = 0.01,
        memory: int = 3,
        quantile: float = 0.8,
        max_norm: float = 50.0,
        trust: float = 1.0,
        rule: str = "median",
        trim: int = 0,
        store: str = "all",
        pairs: str = "received",
        max_staleness: int = 10,
        window: int | None = None,
        history_dtype: torch.dtype = torch.float32,
        filter: bool = True,
        estimate: bool = True,
        receive: bool = True,
    ):
        self.config = Config(
            lr,
            memory,
            quantile,
            max_norm,
            trust,
            rule,
            trim,
            store,
            pairs,
            max_staleness,
            window,
            _name(history_dtype),
            filter,
            estimate,
            receive,
        )
        if not isinstance(model, Tensor) or model.dim() != 1 or model.dtype not in DTYPES.values():
            raise ValueError(f"SecureAFL: model must be a flat float32 or float64 tensor, got {_describe(model)}")
        if not model.isfinite().all():
            raise ValueError("SecureAFL: model must be finite, got NaN or inf in it")
        if model.dtype == torch.float64 and history_dtype != torch.float64:
            raise ValueError(f"SecureAFL: history_dtype must be float64 like model, got {self.config.history_dtype}")
        if clients < 1:
            raise ValueError(f"SecureAFL: clients must be 1 or more, got {clients}")
        if rule == "trimmed_mean" and 2 * trim >= clients:
            raise ValueError(f"SecureAFL: trim must leave a client, 2 * trim < {clients}, got {trim}")

        device = model.device
        self.clients = clients
        self.version = 0
        self.dtype = model.dtype
        self.history = History(clients, memory, len(model), history_dtype, device)
        # Version v lies in row v % len until as many newer ones have come.
        self._models = torch.zeros(max_staleness + 1, len(model), dtype=history_dtype, device=device)
        self._models[0] = model.detach()
        self._factors = torch.full((window or 1024,), torch.inf, dtype=torch.float64, device=device)  # Q; unused: inf
        self._recorded = torch.zeros((), dtype=torch.int64, device=device)  # factors ever recorded
        self._counts = torch.zeros(len(_COUNTS), dtype=torch.int64, device=device)
        self._stale = 0
        self._lock = threading.RLock()

    @property
    def model(self) -> Tensor:
        """The current model (d), not to be written to; it keeps its values for the next max_staleness rounds."""
        return self._models[self.version % len(self._models)].to(self.dtype)

    def checkout(self) -> tuple[Tensor, int]:
        """A copy of the current model, and its version, for a client to train on."""
        with self._lock:
            return self.model.clone(), self.version

    def stats(self) -> dict[str, int]:
        """Rounds accepted and rejected (non_finite among these), stale submissions, corrections capped or given up."""
        with self._lock:
            return {**dict(zip(_COUNTS, self._counts.tolist(), strict=True)), "stale": self._stale}

    @torch.no_grad()
    def submit(self, client: int, update: Tensor, version: int) -> Receipt:
        """One round: judge -> estimate -> aggregate -> remember -> step. `version` is that of the model trained on.

        A caller's mistake is an error, a version no longer kept a receipt with a reason; neither is a round.
        """
        with self._lock:
            client, version = self._check(client, update, version)
            staleness = self.version - version
            if staleness >= len(self._models):
                self._stale += 1
                kept = f"the server keeps {self.version - len(self._models) + 1} to {self.version}"
                nothing = torch.tensor(False, device=update.device), torch.tensor(torch.nan, dtype=torch.float64)
                return Receipt(*nothing, staleness, self.version, f"stale: version {version}, {kept}")

            update = update.detach().to(self._models.dtype)
            trained_on = self._models[version % len(self._models)]
            update, factor, reason = self._judge(client, update, trained_on)
            accepted = reason <= _FIRST
            direction, status = self._aggregate(client, update, accepted)
            finite = reason != _NOT_FINITE
            if self.config.pairs == "rounds":
                self._push_estimates(client)
            self.history.remember(client, update, trained_on, finite if self.config.store == "all" else accepted)
            self._step(direction)  # last: the new model may take the row of the one that was trained on
            capped, fallbacks = ((status == ops.STATUS.index(name)).sum() for name in ("capped", "fallback"))
            self._counts += torch.stack([accepted, ~accepted, ~finite, capped, fallbacks])
            return Receipt(accepted, factor, staleness, self.version, reason)

    def _check(self, client: int, update: Tensor, version: int) -> tuple[int, int]:
        d, device = self._models.shape[1], self._models.device
        if not isinstance(update, Tensor) or update.shape != (d,) or update.dtype != self.dtype:
            got = _describe(update)
            raise ValueError(f"SecureAFL.submit: update must be a tensor ({d},) {_name(self.dtype)}, got {got}")
        if update.device != device:
            raise ValueError(f"SecureAFL.submit: update must be on {device}, got {update.device}")
        client, version = index(client), index(version)
        if not 0 <= client < self.clients:
            raise ValueError(f"SecureAFL.submit: client must lie in 0..{self.clients - 1}, got {client}")
        if not 0 <= version <= self.version:
            raise ValueError(f"SecureAFL.submit: version must lie in 0..{self.version}, got {version}")
        return client, version

    def _judge(self, client: int, update: Tensor, trained_on: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(update, clipped at first contact; its factor or NaN; the index of the reason in REASONS)"""
        last_update, last_model = self.history.last_updates[client], self.history.last_models[client]
        finite, known = update.isfinite().all(), self.history.seen[client]
        length = torch.linalg.vector_norm(update, dtype=torch.float64)
        clip = (self.config.max_norm / length).clamp(max=1).to(update.dtype)
        update = torch.where(known, update, update * clip)

        factor = ops.lipschitz(update, last_update, trained_on, last_model)
        moved = (trained_on != last_model).any()
        defined = known & finite & moved & factor.isfinite()
        steep = self._record(factor, defined) | ~factor.isfinite()
        reason = torch.where(moved, _STEEP * steep, _SAME_VERSION * (factor != 0))
        reason = torch.where(known, reason if self.config.filter else torch.zeros_like(reason), _FIRST)
        reason = torch.where(finite, reason, _NOT_FINITE)
        return update, torch.where(defined, factor, torch.nan), reason

    def _record(self, factor: Tensor, when: Tensor) -> Tensor:
        """Put the factor into Q; true if it is above Q's quantile.

        With linear interpolation, factor <= quantile(Q) says the same as: at most floor((|Q| - 1) quantile) of Q lie
        strictly below it. Counting needs no sort.
        """
        if self.config.window is None and self.version >= len(self._factors):  # at most one factor per round
            self._factors = torch.cat([self._factors, torch.full_like(self._factors, torch.inf)])
        here = (self._recorded % len(self._factors)).reshape(1)
        self._factors.scatter_(0, here, torch.where(when, factor, self._factors[here]).reshape(1))
        self._recorded += when
        size = self._recorded.clamp(max=len(self._factors))
        return (self._factors < factor).sum() > ((size - 1) * self.config.quantile).floor()

    def _aggregate(self, client: int, update: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """(the direction to step along, the status of each client's correction)"""
        c = self.config
        if not c.estimate:
            return torch.where(accepted, update, 0), torch.zeros_like(self.history.pairs)
        taken = accepted if c.receive else torch.zeros_like(accepted)
        model = self._models[self.version % len(self._models)]
        past = self.history.tensors().values()
        return torch.ops.secureafl.aggregate_status(model, update, client, taken, *past, c.trust, c.rule, c.trim)

    def _push_estimates(self, client: int) -> None:
        """The paper's pairs read literally: each estimated client also learns from its own estimate."""
        model = self._models[self.version % len(self._models)]
        *past, seen = self.history.tensors().values()
        for k in (k for k in range(self.clients) if k != client):
            estimate = ops.estimate(model, *(tensor[k : k + 1] for tensor in past), self.config.trust)[0]
            self.history.push(k, model - self.history.last_models[k], estimate - self.history.last_updates[k], seen[k])

    def _step(self, direction: Tensor) -> None:
        """The next model. A coordinate that would leave the floats stays: no inf or NaN ever gets into a model."""
        model = self._models[self.version % len(self._models)]
        stepped = model - self.config.lr * direction
        self.version += 1
        self._models[self.version % len(self._models)] = torch.where(stepped.isfinite(), stepped, model)

    def state_dict(self) -> dict[str, Tensor | int]:
        """All that a round depends on, by name: copies."""
        with self._lock:
            tensors = {name: tensor.clone() for name, tensor in self._state().items()}
            return {**tensors, "version": self.version, "stale": self._stale}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from a state of a server with the same settings; nothing changes if it does not fit."""
        with self._lock:
            mine = self._state()
            wanted = {*mine, "version", "stale"}
            if set(state) != wanted:
                raise ValueError(f"SecureAFL.load_state_dict: state must have {sorted(wanted)}, got {sorted(state)}")
            for name, tensor in mine.items():
                fits = state[name].dtype == tensor.dtype and (
                    state[name].shape == tensor.shape or (name == "factors" and self.config.window is None)
                )
                if not fits:
                    expected, got = _describe(tensor), _describe(state[name])
                    raise ValueError(f"SecureAFL.load_state_dict: {name} must be {expected}, got {got}")
            self._factors = torch.empty_like(state["factors"], device=self._factors.device)
            for name, tensor in self._state().items():
                tensor.copy_(state[name])
            self.version, self._stale = int(state["version"]), int(state["stale"])

    def _state(self) -> dict[str, Tensor]:
        own = {"models": self._models, "factors": self._factors, "recorded": self._recorded, "counts": self._counts}
        return {**own, **self.history.tensors()}

    def save(self, path: str | os.PathLike) -> None:
        """Write a checkpoint (safetensors and JSON); an older file stays until the new one is whole."""
        state = self.state_dict()
        numbers = {name: state.pop(name) for name in ("version", "stale")}
        about = {"config": asdict(self.config), "clients": self.clients, "dtype": _name(self.dtype), "state": numbers}
        checkpoint.write(path, state, about)

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str | None = None, process_group=None) -> "SecureAFL":
        """The server that was saved, to go on as if it had never stopped; on the CPU unless `device` says otherwise."""
        if process_group is not None:
            raise ValueError("SecureAFL.load: process_group must be None, a sharded server is not built yet")
        tensors, about = checkpoint.read(path)
        settings = {**about["config"], "history_dtype": DTYPES[about["config"]["history_dtype"]]}
        blank = torch.zeros(tensors["models"].shape[1], dtype=DTYPES[about["dtype"]], device=device or "cpu")
        server = cls(blank, about["clients"], **settings)
        server.load_state_dict({**tensors, **about["state"]})
        return server


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {_name(value.dtype)}"
