"""CheckpointedServer: the state of a server, as a dict and as files."""

import logging
import os
import secrets
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import files
from ..checkpoint import state as states
from ..config import Config
from ..engines import ShardedEngine
from ..engines.ranks import BEHIND, SLICED, Ranks, checksum
from ..validation import name_of
from .core import ServerCore

logger = logging.getLogger(__name__)


class CheckpointedServer(ServerCore):
    """Base of SecureAFL: saves and restores what ServerCore holds."""

    def _start(self, model: Tensor, clients: int, config: Config, ranks: Ranks | None) -> None:
        super()._start(model, clients, config, ranks)
        # Taken before _lock and never while it is held: rounds go on while a file is written. Reentrant: a signal's
        # handler may save while a file is written, when no round can be half done.
        self._save_lock = threading.RLock()

    def state_dict(self) -> dict[str, Tensor | int]:
        """Copies of everything that a round depends on, by name. Fits servers with the same settings on any device.

        With history_device="cpu" the copies are on the CPU: the GPU may have no room for them."""
        self._need_whole("state_dict")
        with self._ordered():
            self._agree("state_dict", {BEHIND: self.version})
            on_host = self.config.history_device == "cpu"
            return {**self._tensors(torch.device("cpu") if on_host else None), **self._numbers()}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from the state of a server with the same settings. If the state does not fit, nothing changes."""
        self._need_whole("load_state_dict")
        with self._ordered():
            with self._notify_peers:
                caller, size = "SecureAFL.load_state_dict", self._models.shape[1]
                tensors, numbers = states.check(caller, state, self.config, self.clients, size)
                models = tensors["models"]
                if models.dtype != self.dtype and not models.to(self.dtype).isfinite().all():
                    raise ValueError(f"{caller}: models must be finite in {name_of(self.dtype)}, got other values")
                shared = {"what ranks share": checksum(tensors, numbers)} if self._sharded else {}
            self._agree("load_state_dict", {"version": numbers["version"], **shared})
            self._models.copy_(tensors["models"])
            self.version, self._stale, self._too_soon = (numbers[name] for name in states.NUMBERS)
            self._turns = tensors["turns"].tolist()
            if self._trials:
                self._trials.load(tensors["trials"])
            self._engine.load(tensors, self._models[self.version % len(self._models)])
            self._is_half_done = False

    def save(self, path: str | os.PathLike) -> None:
        """Write a checkpoint (safetensors and JSON). An older file stays until the new one is complete."""
        self._need_whole("save")
        with self._save_lock:  # otherwise a slow save could replace the newer file of the next one
            if self._sharded:
                with self._lock:
                    version = self.version
                    with self._notify_peers:
                        file = checked_path("SecureAFL.save", path)
                    save_sharded(self._sharded, file, version, self._described)
            else:
                file = checked_path("SecureAFL.save", path)
                tensors, about = self._described()
                version = about["state"]["version"]
                files.write(file, tensors, about)
        logger.info("checkpoint %s written at version %d", path, version)

    def __getstate__(self) -> None:
        """Called by copy and pickle. A lock, views and streams cannot be copied."""
        raise TypeError("SecureAFL: a server cannot be copied or pickled; use state_dict and load_state_dict, or save")

    def _tensors(self, device: torch.device | None) -> dict[str, Tensor]:
        tensors = {"models": self._models.to(device, copy=True), **self._engine.state(device)}
        device = device or self._models.device
        tensors["turns"] = torch.tensor(self._turns, device=device)
        return {**tensors, "trials": self._trials.tensor(device)} if self._trials else tensors

    def _numbers(self) -> dict[str, int]:
        """The numbers of the state, in the order of states.NUMBERS."""
        return {"version": self.version, "stale": self._stale, "too_soon": self._too_soon}

    def _described(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, about): the contents of a checkpoint. On the CPU: a GPU may have no room for a second history."""
        with self._ordered():
            config, dtype = asdict(self.config), name_of(self.dtype)
            about = {"config": config, "clients": self.clients, "dtype": dtype, "state": self._numbers()}
            return self._tensors(torch.device("cpu")), about


def save_sharded(
    engine: ShardedEngine, path: Path, version: int, describe: Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]
) -> None:
    """Every rank writes its slices beside `path`. When all have, rank 0 writes `path`, which names them.

    No rank needs memory for more than its own slices. The older checkpoint is complete until the last file is renamed,
    and the new one from then on. describe() -> (tensors, about), called when the last round is finished.
    """
    facts = {"file": zlib.crc32(os.fsencode(path.name)), BEHIND: version}
    ranks = engine.ranks
    drawn = ranks.zeros(1)
    drawn[0] = secrets.randbits(52) if ranks.rank == 0 else 0  # the sum is rank 0's number: one file name for all
    token = int(engine.synchronize("save", {**facts, "step": 1}, drawn)[0])
    names = [files.shard_name(path, token, rank, ranks.count) for rank in range(ranks.count)]
    own = path.with_name(names[ranks.rank])
    try:
        with engine.notify_peers:
            tensors, about = describe()
            if ranks.rank == 0:
                files.clear(path)
            files.write_file(own, {name: tensors.pop(name) for name in SLICED if name in tensors}, {})
        engine.synchronize("save", {**facts, "step": 2})
    except BaseException:
        own.unlink(missing_ok=True)  # no checkpoint names it yet
        raise
    if ranks.rank == 0:
        with engine.notify_peers:
            try:
                files.write(path, tensors, about, names)
            except BaseException:  # otherwise every try would leave its shards, on a full disk too
                if not files.names_any(path, names):
                    for name in names:
                        path.with_name(name).unlink(missing_ok=True)
                raise
    engine.synchronize("save", {**facts, "step": 3})


def checked_path(caller: str, path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{caller}: path must be a str or os.PathLike, got {type(path).__name__}")
    return Path(path)


def read_checkpoint(path: str | os.PathLike, ranks: Ranks | None) -> states.Checkpoint:
    """The checked contents of a file of `save`; with ranks, only this rank's slices."""
    path = checked_path("SecureAFL.load", path)
    tensors, about = files.read(path, SLICED, **({"bounds": ranks.bounds} if ranks else {}))
    return states.described("SecureAFL.load", tensors, about)
