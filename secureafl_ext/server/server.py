"""SecureAFL: one update in, one round done (docs/algorithm.md). The host does not wait for the device."""

import logging
import os
from dataclasses import asdict

import torch
from torch import Tensor

from ..config import Config
from ..engines import fused, fused_averages, is_out_of_memory
from ..engines.ranks import BEHIND, notify_at_start, ranks_of
from ..validation import MOST, check, check_device, check_room, checked_device, describe, is_dense, number_in, plain
from .checkpoints import CheckpointedServer, read_checkpoint
from .receipt import Receipt, stale_receipt, too_soon_receipt

__all__ = ["Receipt", "SecureAFL"]

logger = logging.getLogger(__name__)


class SecureAFL(CheckpointedServer):
    """Takes one client's update at a time and steps a flat model.

    model: (d) start, float32, or float64 with history_dtype=torch.float64; its device is the server's
    clients: capacity; any client may join late
    The other settings are those of `Config`, which describes them. All calls are thread-safe: one lock, in order of
    arrival.

    process_group: splits the coordinates over its ranks. Each rank has its slice of the model and of every update
    (`shard` gives it). All ranks make the same calls in the same order. Construction, submit, forget, leave, estimates,
    state_dict, load_state_dict, save, load and setting lr are collective: they wait for all ranks, and an error on one
    rank is an error on all.
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
        step: str = "all",
        spacing: int = 0,
        history_dtype: torch.dtype = torch.float32,
        history_device: str = "model",
        filter: bool = True,
        keep_last: bool | None = None,
        estimate: bool = True,
        receive: bool = True,
        buckets: int = 1,
        remove: float = 0.25,
        radius: float | None = None,
        iterations: int = 2,
        expiry: int | None = 8,
        probation: int = 3,
        trial: int = 0,
        quorum: float = 0.0,
        averages: str = "uploads",
        sketch: int = 0,
        sketch_seed: int | None = None,
        process_group: "torch.distributed.ProcessGroup | None" = None,
    ):
        arguments = locals()
        ranks = ranks_of(process_group, getattr(model, "device", None))
        with notify_at_start(ranks):
            self._start(model, clients, Config.from_arguments(arguments), ranks)
        if ranks:
            ranks.agree_on_start((self.config, self.clients, self.dtype), len(model))

    def __repr__(self) -> str:
        size = f"{self.clients} clients, {self._models.shape[1]} parameters"
        return f"SecureAFL(rule={self.config.rule!r}, {size}, version {self.version})"

    @classmethod
    def from_config(
        cls,
        model: Tensor,
        clients: int,
        config: Config,
        process_group: "torch.distributed.ProcessGroup | None" = None,
    ) -> "SecureAFL":
        """A server with all settings in one `Config`."""
        with notify_at_start(ranks_of(process_group, getattr(model, "device", None))):
            if not isinstance(config, Config):
                raise ValueError(f"SecureAFL.from_config: config must be a Config, got {type(config).__name__}")
        return cls(model, clients, **asdict(config), process_group=process_group)

    def submit(self, client: int, update: Tensor, version: int) -> Receipt:
        """One round: judge, estimate, aggregate, store, step. `version` is that of the model trained on.

        Invalid arguments raise an error. An update on a version that is no longer kept, or before the client's turn
        (see `spacing`), returns a receipt with the reason. Neither counts as a round.
        """
        self._need_whole("submit")
        with self._lock:
            self._streams.follow()
            caller, models = "SecureAFL.submit", self._models
            try:  # a `with` block would cost a microsecond of host time per round
                client, version = check(caller, models, self.dtype, self.clients, self.version, client, update, version)
            except Exception:
                self._notify_peers.notify()
                raise
            staleness, trained_on = self.version - version, self._rows[version % len(self._rows)]
            kept, on_turn = staleness <= self.config.max_staleness, self._is_on_turn(client)
            if self._sharded:
                sums = None  # of an update that all ranks refuse
                if kept and on_turn:
                    with self._notify_peers:
                        sums = self._sharded.update_sums(self._engine.number_of(client), plain(update), trained_on)
                facts = {BEHIND: self.version, "client": client, "version": version}
                self._sharded.synchronize("submit", facts, sums)
            if not kept:
                self._stale = min(self._stale + 1, MOST)
                return stale_receipt(version, self.version, self.config.max_staleness, update.device)
            if not on_turn:
                self._too_soon = min(self._too_soon + 1, MOST)
                since = self.version - self._turns[client]
                return too_soon_receipt(client, since, self.config.spacing, staleness, self.version, update.device)

            update = plain(update)
            if update.dtype != self._models.dtype:
                update = update.to(self._models.dtype)
            share = self._trials.share(client) if self._trials else 1.0
            counts, undo_trial = self._engine.counts.clone(), self._trials.undo_of(client) if self._trials else None
            before = self.version, self._turns[client]
            try:
                receipt = self._round(client, update, trained_on, staleness, share)
                self._count_round(client)
            except BaseException as error:
                self.version, self._turns[client] = before
                if undo_trial:
                    undo_trial()
                self._finish_after_error(client, counts, error)
                raise
            return receipt

    def _count_round(self, client: int) -> None:
        if self.config.spacing:
            self._turns[client] = self.version
        if self._trials:
            self._trials.count_round(client)

    def _finish_after_error(self, client: int, counts: Tensor, error: BaseException) -> None:
        """Finish the round if the engine's part is done already: a round happens as a whole or not at all. The error of
        a signal's handler can come between any two lines. Waits for the device.

        counts: the engine's counts before the round. They tell whether it is done: each round is accepted or rejected
        """
        if torch.equal(counts, self._engine.counts):
            return
        if is_out_of_memory(error) and not self._engine.is_whole:
            self._is_half_done = True
            return
        self._keep_finite()
        self.version += 1
        self._count_round(client)

    def _is_on_turn(self, client: int) -> bool:
        """Whether enough rounds of other clients have passed since the client's last one."""
        return not self._turns[client] or self.version - self._turns[client] >= self.config.spacing

    def _round(
        self, client: int | Tensor, update: Tensor, trained_on: Tensor, staleness: int | None, share: float = 1.0
    ) -> Receipt:
        """share: the part of a full step that the client may make (see `trial`)"""
        now, new = (v % len(self._rows) for v in (self.version, self.version + 1))
        self._engine.lr = self.config.lr * share
        outcome = self._engine.round(client, update, trained_on, self._models, now, new)
        self._keep_finite()
        self.version += 1
        weight = outcome.weight if outcome.weight is None or share == 1 else outcome.weight * share
        return Receipt(outcome.accepted, outcome.factor, staleness, self.version, outcome.reason, weight=weight)

    def _keep_finite(self) -> None:
        """Where the new model overflows in the caller's dtype, if that is the narrower one, keep the old value."""
        if self.dtype != self._models.dtype:
            model, stepped = (self._rows[v % len(self._rows)] for v in (self.version, self.version + 1))
            stepped.copy_(torch.where(stepped.to(self.dtype).isfinite(), stepped, model))

    def forget(self, client: int) -> None:
        """Erase everything that is kept of this client alone, so that another client may take its number.

        The model, a pooled Q and a rule's last aggregate stay: the client's part in them cannot be separated. Its turn
        stays too (see `spacing`): otherwise it could have another round sooner.
        """
        self._need_whole("forget")
        with self._ordered():
            with self._notify_peers:
                client = number_in("SecureAFL.forget", "client", client, 0, self.clients - 1)
            self._agree("forget", {"client": client, BEHIND: self.version})
            self._engine.forget(client)
            if self._trials:
                self._trials.forget(client)

    def leave(self, client: int) -> None:
        """The client has left: its remembered update has no weight from now on, but it is kept.

        When it uploads again, it is recognized, and must pass its probation again, and a short trial (see `probation`
        and `trial`).
        """
        self._need_whole("leave")
        with self._ordered():
            with self._notify_peers:
                client = number_in("SecureAFL.leave", "client", client, 0, self.clients - 1)
            self._agree("leave", {"client": client, BEHIND: self.version})
            self._engine.presence.leave(client)
            if self._trials:
                self._trials.leave(client)

    def enqueue(self, client: Tensor, update: Tensor, trained_on: Tensor, staleness: Tensor | None = None) -> Receipt:
        """`submit` for a CUDA graph: client (1) int64 and the model trained on (d) are tensors, whose values and
        shapes are not checked.

        To replay a captured round: replay only at the same `phase()`, then increment `version`.
        staleness is ignored here; other defenses of the simulator use it. `trial` is ignored too: its counts are on the
        host, which does not know the client.
        """
        conflict = self._not_capturable()
        if conflict:
            raise ValueError(f"SecureAFL.enqueue: not supported with {conflict}; use submit")
        self._need_whole("enqueue")
        check_room("SecureAFL.enqueue", self.version)
        tensors = {"client": client, "update": update, "trained_on": trained_on}
        for name, tensor in tensors.items():
            if not is_dense(tensor):
                raise ValueError(f"SecureAFL.enqueue: {name} must be a dense tensor, got {describe(tensor)}")
            check_device("SecureAFL.enqueue", name, tensor, self._models)
        with self._ordered():
            update, trained_on = (plain(tensor).to(self._models.dtype) for tensor in (update, trained_on))
            return self._round(client, update, trained_on, None)

    @property
    def capturable(self) -> bool:
        """Whether `enqueue` supports these settings."""
        return self._not_capturable() is None

    def _not_capturable(self) -> str | None:
        """The setting that `enqueue` does not support."""
        if self._sharded:
            return "process_group"
        if self.config.spacing:
            return f"spacing={self.config.spacing}"  # turns are counted on the host
        if self._engine.capturable:
            return None
        if self.config.averages == "steps":
            return fused_averages.unsupported(self.config, self.clients, self._models.device)
        if self.config.sketch:
            return f"sketch={self.config.sketch}"
        return fused.unsupported(self.config, self.clients, self._models.device)

    def phase(self) -> int:
        """Ring-buffer slot of the current model. A captured graph is valid only for this slot."""
        return self.version % len(self._rows)

    def reserve(self, rounds: int) -> None:
        """Does nothing, and is kept for callers of earlier versions: Q no longer grows with the rounds."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        device: torch.device | str | None = None,
        process_group: "torch.distributed.ProcessGroup | None" = None,
    ) -> "SecureAFL":
        """The server that was saved, ready to continue; on the CPU unless `device` says otherwise.

        It may have been saved on any number of ranks, or on none: each rank of process_group gets the slice that
        `shard` gives it. A file that was changed or damaged raises a ValueError. A forged file with possible values is
        not detected: load only files from sources that you trust with your model.
        """
        with notify_at_start(ranks_of(process_group, None)):
            device = checked_device("SecureAFL.load", "cpu" if device is None else device)
        ranks = ranks_of(process_group, device)
        with notify_at_start(ranks):
            found = read_checkpoint(path, ranks)
            blank = torch.zeros(found.size, dtype=found.dtype, device=device)
        server = cls.from_config(blank, found.clients, found.config, process_group)
        server.load_state_dict(found.state)
        logger.info("checkpoint %s loaded at version %d", path, server.version)
        return server
