"""ServerCore: the models, the engine and the lock of a server, and all calls that only read them."""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..config import COUNTS, Config
from ..engines import Engine, check_engine, is_out_of_memory, make_engine, make_sharded, too_large
from ..engines.presence import presence_counts
from ..engines.quantile import largest_accepted
from ..engines.ranks import BEHIND, NotifyPeers, Ranks, settings_checksum
from ..engines.trials import Trials
from ..rules.row_rules import left_out
from ..validation import check_kept, check_start, number_in
from .streams import StreamOrder

logger = logging.getLogger(__name__)


def need_no_call(lock: threading.RLock, caller: str) -> None:
    """Raise an error if this thread is within a call already: a signal's handler has interrupted that call, and the
    reentrant lock would let the handler's own call through."""
    if lock._is_owned():  # type: ignore[attr-defined]
        how = "a signal's handler must only note the signal, for the time after that call"
        raise RuntimeError(f"{caller}: another call of this thread must have returned, got one within it; {how}")


class ServerCore:
    """Base of SecureAFL. It has no constructor of its own: SecureAFL calls `_start`."""

    @torch.inference_mode(False)  # otherwise the tensors could not be written to outside of inference mode
    def _start(self, model: Tensor, clients: int, config: Config, ranks: Ranks | None) -> None:
        clients = check_start("SecureAFL", model, clients)
        check_engine(config, clients, model.dtype, model.device, sharded=ranks is not None)
        self.config, self.clients = config, clients
        self.version = 0
        self.dtype = model.dtype
        size, device = len(model), model.device
        try:
            # A ring buffer: version v lies in row v % rows. One row more than are kept holds the next model.
            self._models = torch.zeros(config.max_staleness + 2, size, dtype=config.dtype, device=device)
            self._sharded = make_sharded(config, clients, size, device, ranks) if ranks else None
            self._engine: Engine = self._sharded or make_engine(config, clients, size, device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise too_large(config, clients, size, device) from error
        self._models[0] = model.detach()
        self._rows = self._models.unbind()  # views made once: indexing costs more host time than the lock
        self._notify_peers = self._sharded.notify_peers if self._sharded else NotifyPeers(None)
        self._stale = self._too_soon = 0
        self._turns = [0] * clients  # the version that each client's last round made; 0: none
        self._trials = Trials(clients, config.trial, config.quorum_of(clients)) if config.trial else None
        self._lock = threading.RLock()
        self._is_half_done = False  # the last round ran out of memory half-way: see `is_whole` of Engine
        self._streams = StreamOrder(device)
        engine = type(self._engine).__name__
        logger.debug("server of %d clients, %d parameters, engine %s on %s", clients, size, engine, device)

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """One call at a time, after the device work of earlier calls."""
        with self._lock:
            self._streams.follow()
            yield

    def _need_whole(self, call: str) -> None:
        """Refuse a call after a round that stopped half-way, and a call within another one (see need_no_call)."""
        if self._is_half_done and call != "load_state_dict":
            got = "the last round must be whole, got one that ran out of memory half-way"
            raise RuntimeError(f"SecureAFL.{call}: {got}; load the last checkpoint")
        need_no_call(self._lock, f"SecureAFL.{call}")

    def _agree(self, call: str, facts: Mapping[str, int]) -> None:
        """With a process group: all ranks make this call, and the last round is finished."""
        if self._sharded:
            self._sharded.synchronize(call, facts)

    @property
    def lr(self) -> float:
        """The step size. It can be set between two rounds, for a schedule; a CUDA graph keeps the one it captured."""
        return self.config.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._need_whole("lr")
        with self._ordered():
            with self._notify_peers:
                config = replace(self.config, lr=value)
            self._agree("lr", {"settings": settings_checksum(config), BEHIND: self.version})
            self.config, self._engine.lr = config, config.lr

    @property
    def model(self) -> Tensor:
        """The current model (d), read-only. It keeps its values for the next max_staleness rounds."""
        with self._ordered():
            return self._rows[self.version % len(self._rows)].to(self.dtype)

    @property
    def models(self) -> Tensor:
        """All kept models (rows, d), read-only: version v lies in row v % rows."""
        return self._models

    def model_at(self, version: int) -> Tensor:
        """The model (d) of one of the last max_staleness + 1 versions, read-only."""
        with self._ordered():
            version = check_kept("SecureAFL.model_at", version, self.version, self.config.max_staleness)
            return self._rows[version % len(self._rows)].to(self.dtype)

    def checkout(self) -> tuple[Tensor, int]:
        """A copy of the current model, and its version, for a client to train on."""
        with self._ordered():
            return self.model.clone(), self.version

    def stats(self) -> dict[str, int]:
        """Counts since the start: rounds accepted, rejected, and rejected as non_finite; corrections capped, and
        corrections given up (fallbacks); submissions refused without a round: stale, too_soon.

        Numbers of clients now. Each client with a history is present (it counts), on_probation (it does not count yet)
        or expired (it has been silent too long, or has left). left_out: those present whose remembered update has
        almost no weight; 0 if the rule has no weights. on_trial: newcomers whose steps still grow.
        """
        with self._ordered():
            counts = dict(zip(COUNTS, self._engine.counts.tolist(), strict=True))
            live = self._engine.presence.live(self._engine.seen)
            clients = presence_counts(self._engine.presence.mask(live), live, self._engine.seen)
            without = self.left_out()
            clients["left_out"] = 0 if without is None else int(without.sum())
            clients["on_trial"] = self._trials.on_trial() if self._trials else 0
            return {**counts, "stale": self._stale, "too_soon": self._too_soon, **clients}

    # The calls below are for analysis, metrics and attacks. No round needs them.

    @property
    def seen(self) -> Tensor:
        """(n) bool: clients with a history."""
        return self._engine.seen[: self.clients]

    @property
    def live(self) -> Tensor:
        """(n) bool: clients with a history that have neither been silent too long (see `expiry`) nor left."""
        with self._ordered():
            return self._engine.presence.live(self._engine.seen)[: self.clients]

    @property
    def present(self) -> Tensor:
        """(n) bool: clients that count in the aggregate: seen, not expired, past their probation."""
        with self._ordered():
            return self._engine.presence.mask(self._engine.seen)[: self.clients]

    @property
    def similarity(self) -> Tensor | None:
        """(n, n) float64, read-only: inner products of the clients' mean updates, in units of (median norm)^2. None
        with other rules than "kinship" and "support", with sketches, and with averages="steps" and a process group.
        With averages="steps" it is computed once in 2 n versions, and may be that old."""
        with self._ordered():
            return self._engine.similarity(self.version)

    @property
    def kinship(self) -> Tensor | None:
        """(n, n) float64, read-only: `similarity` with rule="kinship", else None."""
        kinship = self._engine.kinship
        return kinship.means if kinship else None

    @property
    def kinship_apart(self) -> Tensor | None:
        """(n, n) float64: as `kinship`, after centering: minus the geometric median of the mean updates."""
        kinship = self._engine.kinship
        return kinship.centered() if kinship else None

    def estimates(self) -> Tensor:
        """(n, d): the update that every client would send now; zeros for clients that are not seen. One pass over the
        history."""
        with self._ordered():
            self._agree("estimates", {BEHIND: self.version})
            return self._engine.estimates(self._rows[self.version % len(self._rows)]).to(self.dtype)

    def norms(self) -> Tensor:
        """(n) float64: the norms of the rows of `estimates`; with averages="steps" or a sketch those of the clients'
        last updates. With a process group and other settings: of this rank's slice."""
        with self._ordered():
            self._agree("estimates", {BEHIND: self.version})
            return self._engine.norms(self._rows[self.version % len(self._rows)])

    def last(self, client: Tensor | int) -> tuple[Tensor, Tensor]:
        """The last update of a client, and the model it was computed on, (d) each; zeros if there is none.

        client: a number, or (1) int64 on the server's device
        """
        with self._ordered():
            update, model = self._engine.last_of(self._number("last", client))
            return update.to(self.dtype), model.to(self.dtype)

    def weights(self) -> Tensor:
        """(n) float64: the weight that each client's remembered update would have in a step now; 0 for clients that do
        not count, and for all with estimate=False.

        Of rule="support" and "kinship" before clipping to the median norm, and less for a newcomer (see `trial`). A
        median or trimmed mean has no weights, it sorts every coordinate: 1 / count for each client that counts. With
        corrections (memory and trust above 0) a row-wise rule needs all estimates for this, which costs as much as a
        round.
        """
        with self._ordered():
            present, weights = self.present, self._weights()
            if not self.config.estimate:
                return torch.zeros_like(present, dtype=torch.float64)
            if weights is None:
                return present / present.sum(dtype=torch.float64).clamp(min=1)
            return weights * torch.tensor(self._trials.shares(), device=weights.device) if self._trials else weights

    def left_out(self) -> Tensor | None:
        """(n) bool: clients that count, but whose weight is below a tenth of the mean weight. None if the rule has no
        weights. Costs as much as `weights`."""
        with self._ordered():
            weights = self._weights()
            return None if weights is None else left_out(weights, self.present)

    def _weights(self) -> Tensor | None:
        model = self._rows[self.version % len(self._rows)]
        return self._engine.row_weights(model) if self.config.estimate else None

    def _number(self, call: str, client: Tensor | int) -> Tensor:
        """(1) int64: the client's number on the server's device. A tensor is not read: that would be a wait."""
        if isinstance(client, Tensor) and client.shape == (1,) and client.dtype == torch.int64:
            if client.device != self._models.device:
                expected = f"on {self._models.device}, got {client.device}"
                raise ValueError(f"SecureAFL.{call}: client must be {expected}")
            return client
        return self._engine.number_of(number_in(f"SecureAFL.{call}", "client", client, 0, self.clients - 1))

    def threshold(self, client: Tensor | int | None = None) -> Tensor:
        """() float64: the largest factor of a client that would be accepted now; inf if any would.

        client: a number, or (1) int64 on the server's device; default: client 0. Thresholds of different clients differ
        by at most the weight of one factor in Q.
        """
        with self._ordered():
            e, number = self._engine, self._number("threshold", 0 if client is None else client)
            bound = largest_accepted(e.factors, e.recorded, e.factor_counts, number, self.config.quantile)
            return bound if self.config.filter else torch.full_like(bound, torch.inf)
