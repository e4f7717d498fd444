"""The server: one update in, one round done (spec: Algorithm 1), and no waiting for the device."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from operator import index
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import files
from ..checkpoint import state as states
from ..config import COUNTS, Config
from ..engines import fused, sharded
from ..engines.choose import check_engine, make_engine, too_large
from ..engines.quantile import grown, largest_accepted
from ..rules.kinship import Kinship
from ..validation import check, check_kept, check_start, name_of
from .receipt import Receipt, stale, too_soon


class SecureAFL:
    """Takes one client's update at a time and steps a flat model.

    model: (d) start, float32 or float64; its device is the server's    clients: a capacity; any may join late
    The other settings are those of Config. Safe to call from several threads: one lock, order of arrival.

    process_group: the coordinates are split over its ranks, in their order; each has its slice of the model and of
    every update (`shard` gives it). All ranks make the same calls in the same order; construction, submit, forget,
    estimates, state_dict, load_state_dict, save and load are collective: they wait for all, and an error on one is one
    on all.
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
        store: str = "accepted",
        pairs: str = "received",
        max_staleness: int = 10,
        factors: str = "per_client",
        window: int | None = None,
        on_reject: str = "hold",
        spacing: int = 0,
        history_dtype: torch.dtype = torch.float32,
        filter: bool = True,
        estimate: bool = True,
        receive: bool = True,
        buckets: int = 1,
        remove: float = 0.25,
        radius: float | None = None,
        iterations: int = 2,
        process_group: "torch.distributed.ProcessGroup | None" = None,
    ):
        ranks = sharded.ranks_of(process_group, getattr(model, "device", None))
        with sharded.Telling(ranks, ranks and ranks.count):
            config = Config(
                lr=lr,
                memory=memory,
                quantile=quantile,
                max_norm=max_norm,
                trust=trust,
                rule=rule,
                trim=trim,
                store=store,
                pairs=pairs,
                max_staleness=max_staleness,
                factors=factors,
                window=window,
                on_reject=on_reject,
                spacing=spacing,
                history_dtype=name_of(history_dtype),
                filter=filter,
                estimate=estimate,
                receive=receive,
                buckets=buckets,
                remove=remove,
                radius=radius,
                iterations=iterations,
            )
            self._start(model, clients, config, ranks)
        if ranks:
            ranks.start((config, self.clients), len(model))

    @torch.inference_mode(False)  # else the state could never be written to outside of it
    def _start(self, model: Tensor, clients: int, config: Config, ranks: "sharded.Ranks | None") -> None:
        clients = check_start("SecureAFL", model, clients)
        check_engine(config, clients, model.dtype, model.device, split=ranks is not None)
        self.config, self.clients = config, clients
        self.version = 0
        self.dtype = model.dtype
        size, device = len(model), model.device
        try:
            # Version v lies in row v % len; one row more than are kept, so that the next model has a row of its own.
            self._models = torch.zeros(config.max_staleness + 2, size, dtype=config.dtype, device=device)
            self._engine = make_engine(config, clients, size, device, ranks)
        except torch.OutOfMemoryError as error:
            raise too_large(config, clients, size, device) from error
        self._models[0] = model.detach()
        self._rows = self._models.unbind()  # views: to take one anew costs the host more than the lock does
        self._ranks, self._telling = ranks, self._engine.telling if ranks else sharded.Telling(None)
        self._stale = self._too_soon = 0
        self._turns = [0] * clients  # the version that each client's last round made; 0: none
        self._lock = threading.RLock()
        self._stream = current_stream(model.device)

    @property
    def model(self) -> Tensor:
        """The current model (d), not to be written to; it keeps its values for the next max_staleness rounds."""
        with self._ordered():
            return self._rows[self.version % len(self._rows)].to(self.dtype)

    @property
    def models(self) -> Tensor:
        """The models kept (rows, d), not to be written to: version v in row v % rows."""
        return self._models

    def model_at(self, version: int) -> Tensor:
        """The model of one of the last max_staleness + 1 versions (d), not to be written to."""
        with self._ordered():
            check_kept("SecureAFL.model_at", version, self.version, self.config.max_staleness)
            return self._rows[version % len(self._rows)].to(self.dtype)

    @property
    def lr(self) -> float:
        return self.config.lr

    def forget(self, client: int) -> None:
        """As if the client had never come, so that another may have its number: all that is kept of it alone is erased.

        The model, a pooled Q and a rule's last aggregate stay: what is the client's there cannot be told from the rest.
        Its turn stays too (see `spacing`), or it would come round sooner.
        """
        with self._ordered():
            with self._telling:
                if not 0 <= index(client) < self.clients:
                    raise ValueError(f"SecureAFL.forget: client must lie in 0..{self.clients - 1}, got {client}")
            self._meet("forget", {"client": index(client), "version": self.version})
            self._engine.forget(index(client))

    def checkout(self) -> tuple[Tensor, int]:
        """A copy of the current model, and its version, for a client to train on."""
        with self._ordered():
            return self.model.clone(), self.version

    def stats(self) -> dict[str, int]:
        """Rounds accepted and rejected (non_finite among these), corrections capped or given up; submissions that were
        refused without a round: stale, too_soon."""
        with self._ordered():
            counts = dict(zip(COUNTS, self._engine.counts.tolist(), strict=True))
            return {**counts, "stale": self._stale, "too_soon": self._too_soon}

    def submit(self, client: int, update: Tensor, version: int) -> Receipt:
        """One round: judge, estimate, aggregate, remember, step. `version` is that of the model trained on.

        A caller's mistake is an error. A version that is no longer kept, or an update before the client's turn (see
        `spacing`), gets a receipt with a reason. Neither is a round.
        """
        with self._lock:
            self._follow_stream()
            who, models = "SecureAFL.submit", self._models
            try:  # `with` would take the host a microsecond of every round
                client, version = check(who, models, self.dtype, self.clients, self.version, client, update, version)
            except Exception:
                self._telling.tell()
                raise
            staleness, trained_on = self.version - version, self._rows[version % len(self._rows)]
            kept, waited = staleness <= self.config.max_staleness, self._waited(client)
            if self._ranks:
                facts = {"client": client, "version": version, "the server's version": self.version}
                self._engine.judge(facts, client, update.detach(), trained_on if kept and waited else None)
            if not kept:
                self._stale += 1
                return stale(version, self.version, self.config.max_staleness, update.device)
            if not waited:
                self._too_soon += 1
                since = self.version - self._turns[client]
                return too_soon(client, since, self.config.spacing, staleness, self.version, update.device)

            if self.config.grows:
                self.reserve(1)
            update = update.detach()  # as a number: no graph may grow from round to round
            if update.dtype != self._models.dtype:
                update = update.to(self._models.dtype)
            receipt = self._round(client, update, trained_on, staleness)
            if self.config.spacing:
                self._turns[client] = self.version
            return receipt

    def _waited(self, client: int) -> bool:
        """Whether enough rounds of other clients have passed since the client's last one."""
        return not self._turns[client] or self.version - self._turns[client] >= self.config.spacing

    def _follow_stream(self) -> None:
        """On a GPU: work on this thread's stream waits for what the server has queued on another one."""
        if self._stream is None:
            return
        device = self._models.device
        stream = current_stream(device)
        if stream != self._stream:
            if not torch.cuda.is_current_stream_capturing():  # a graph's stream must not wait for others
                before = torch.cuda.ExternalStream(self._stream, device)
                torch.cuda.current_stream(device).wait_stream(before)
            self._stream = stream

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """One call at a time, behind what earlier ones have queued."""
        with self._lock:
            self._follow_stream()
            yield

    def _meet(self, call: str, facts: dict[str, int]) -> None:
        if self._ranks:
            self._engine.meet(call, facts)

    def enqueue(self, client: Tensor, update: Tensor, trained_on: Tensor, staleness: Tensor | None = None) -> Receipt:
        """`submit` for a CUDA graph: client (1) int64 and the model trained on (d) are tensors, and nobody checks them.

        Who replays a captured round does so in its `phase` only, counts `version` on, and has reserved room for all.
        staleness means nothing here; the simulator's other defenses go by it.
        """
        if self._ranks:
            raise ValueError("SecureAFL.enqueue: the server must have no process_group, got one; submit to it")
        if not self.capturable:
            expected = f"a fused one ({fused.LIMITS}) or have a row-wise rule"
            raise ValueError(f"SecureAFL.enqueue: the server must be {expected}, got another")
        with self._ordered():
            update, trained_on = (tensor.detach().to(self._models.dtype) for tensor in (update, trained_on))
            return self._round(client, update, trained_on, None)

    @property
    def capturable(self) -> bool:
        """Whether `enqueue` exists for these settings."""
        fits = isinstance(self._engine, fused.Fused) or self.config.row_wise
        return fits and self._ranks is None and self.config.spacing == 0  # turns are counted on the host

    def phase(self) -> int:
        """Enqueued rounds of one phase are the same kernels on the same memory."""
        return self.version % len(self._rows)

    def _round(self, client: int | Tensor, update: Tensor, trained_on: Tensor, staleness: int | None) -> Receipt:
        now, new = (v % len(self._rows) for v in (self.version, self.version + 1))
        accepted, factor, reason = self._engine.round(client, update, trained_on, self._models, now, new)
        if self.dtype != self._models.dtype:  # what is handed out must not leave the narrower floats either
            model, stepped = self._rows[now], self._rows[new]
            stepped.copy_(torch.where(stepped.to(self.dtype).isfinite(), stepped, model))
        self.version += 1
        return Receipt(accepted, factor, staleness, self.version, reason)

    @torch.inference_mode(False)
    def reserve(self, rounds: int) -> None:
        """Room in Q for the factors of so many rounds to come: factors="pooled" without a window keeps all."""
        needed = self.version + rounds
        if self.config.grows and needed > self._engine.factors.shape[1]:
            self._engine.factors = grown(self._engine.factors, needed)

    # What an onlooker may ask, none of it needed for a round: how far estimates are off, how near an attack may come.

    @property
    def seen(self) -> Tensor:
        """(n) bool: clients that something is remembered of."""
        return self._engine.seen[: self.clients]

    @property
    def kinship(self) -> Tensor | None:
        """(n, n) float64, not to be written to: what rule="kinship" knows of who pulls with whom; None for others."""
        return self._kin.means if self._kin else None

    @property
    def kinship_apart(self) -> Tensor | None:
        """(n, n) float64: the same without what most have in common."""
        return self._kin.apart() if self._kin else None

    @property
    def _kin(self) -> Kinship | None:
        return self._engine.rows.kinship if self.config.rule == "kinship" else None

    def estimates(self) -> Tensor:
        """(n, d): what every client would send now; zeros for those not seen. Takes a pass over the history."""
        with self._ordered():
            self._meet("estimates", {"version": self.version})
            return self._engine.estimates(self._rows[self.version % len(self._rows)]).to(self.dtype)

    def last(self, client: Tensor) -> tuple[Tensor, Tensor]:
        """What client (1) int64 sent last, and the model it was computed on, (d) each; zeros if it never did."""
        with self._ordered():
            update, model = self._engine.last_of(client)
            return update.to(self.dtype), model.to(self.dtype)

    def threshold(self, client: Tensor | None = None) -> Tensor:
        """() float64: the largest factor that would be accepted now of client (1) int64; inf if any would.

        Without a client, of client 0: clients differ by no more than what one of their own factors weighs in Q.
        """
        with self._ordered():
            client = self._engine.number_of(0) if client is None else client
            bound = largest_accepted(self._engine.factors, self._engine.recorded, client, self.config.quantile)
            return bound if self.config.filter else torch.full_like(bound, torch.inf)

    def state_dict(self) -> dict[str, Tensor | int]:
        """All that a round depends on, by name: copies. Fits servers of the same settings on any device."""
        with self._ordered():
            self._meet("state_dict", {"version": self.version})
            return self._state()

    def _state(self, device: torch.device | None = None) -> dict[str, Tensor | int]:
        tensors = {"models": self._models.to(device, copy=True), **self._engine.state(device)}
        tensors["turns"] = torch.tensor(self._turns, device=device or self._models.device)
        return {**tensors, "version": self.version, "stale": self._stale, "too_soon": self._too_soon}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from a state of a server with the same settings; nothing changes if it does not fit."""
        with self._ordered():
            with self._telling:
                state = states.check(
                    "SecureAFL.load_state_dict", state, self.config, self.clients, self._models.shape[1]
                )
                numbers = {name: state.pop(name) for name in states.NUMBERS}
                shared = {"what ranks share": sharded.checksum(state, numbers)} if self._ranks else {}
            self._meet("load_state_dict", {"version": numbers["version"], **shared})
            self._models.copy_(state["models"])
            self.version, self._stale, self._too_soon = (numbers[name] for name in states.NUMBERS)
            self._turns = state.pop("turns").tolist()
            self._engine.load(state, self._models[self.version % len(self._models)])

    def save(self, path: str | os.PathLike) -> None:
        """Write a checkpoint (safetensors and JSON); an older file stays until the new one is whole."""
        if self._ranks:
            with self._lock:
                return sharded.save(self._engine, Path(path), self.version, self._described)
        files.write(path, *self._described())

    def _described(self) -> tuple[dict[str, Tensor], dict]:
        """(tensors on the CPU: a GPU may have no room for a second history; the rest)"""
        with self._ordered():
            tensors = self._state(torch.device("cpu"))
            numbers = {name: tensors.pop(name) for name in states.NUMBERS}
            config, dtype = asdict(self.config), name_of(self.dtype)
            return tensors, {"config": config, "clients": self.clients, "dtype": dtype, "state": numbers}

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str | None = None, process_group=None) -> "SecureAFL":
        """The server that was saved, to go on as if it had never stopped; on the CPU unless `device` says otherwise.

        Saved on any number of ranks, or on none: each rank of process_group gets the slice that `shard` gives it.
        A file that was changed or damaged is a ValueError. One that was forged is not found out if its values are
        possible ones: load only what you would let set your model.
        """
        device = torch.device(device or "cpu")
        ranks = sharded.ranks_of(process_group, device)
        with sharded.Telling(ranks, ranks and ranks.count):
            tensors, about = files.read(path, sharded.SLICED, **({"bounds": ranks.bounds} if ranks else {}))
            clients, settings, dtype, state = states.described("SecureAFL.load", tensors, about)
            blank = torch.zeros(tensors["models"].shape[1], dtype=dtype, device=device)
        server = cls(blank, clients, **settings, process_group=process_group)
        server.load_state_dict(state)
        return server


def current_stream(device: torch.device) -> int | None:
    """The handle of this thread's CUDA stream; to ask for the object takes the host microseconds of every round."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None
