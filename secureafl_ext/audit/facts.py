"""Facts about a server for the log: the digest of its state, its settings. Reading them waits for the device."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from torch import Size, Tensor, uint8

from ..config import Config, reads_last
from ..validation import describe, is_dense, name_of
from .line import NO_NUMBERS, one_line, plain

THREADS = 8  # tensors hashed at a time


def bytes_of(tensor: Tensor) -> memoryview:
    """The values, on the host."""
    return tensor.detach().cpu().resolve_neg().contiguous().view(-1).view(uint8).numpy().data


def check_update(update: object, shape: Size, dtype: torch.dtype) -> None:
    """Refuse an update of another shape or dtype, or without bytes to hash: a sparse tensor, or one of oneDNN."""
    if isinstance(update, Tensor) and is_dense(update) and (update.shape, update.dtype) == (shape, dtype):
        return
    expected = f"a dense tensor {tuple(shape)} {name_of(dtype)}"
    raise ValueError(f"Audited.submit: update must be {expected}, got {describe(update)}")


def sha256(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(state: Mapping[str, Tensor | int]) -> str:
    """SHA-256 over all names, numbers, dtypes, shapes and values. Two servers with the same one go on alike."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    with ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(lambda tensor: sha256(bytes_of(tensor)), tensors.values())
        about = {name: [name_of(t.dtype), list(t.shape), s] for (name, t), s in zip(tensors.items(), sums, strict=True)}
    return sha256(json.dumps({**state, **about}, sort_keys=True).encode())


def settings_of(server: Any) -> dict[str, Any]:
    """The settings that, with its state, make an equal server. Empty unless the server is a SecureAFL."""
    config = getattr(server, "config", None)
    if not isinstance(config, Config):
        return {}
    return {**plain(asdict(config)), "clients": server.clients, "dtype": name_of(server.dtype)}


def completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a line of the log has. The log of an earlier version lacks newer settings: they count as their
    defaults. One exception: keep_last counts as true, because last updates were always kept then."""
    return {**plain(asdict(Config())), "keep_last": True, **settings} if settings else {}


def config_from(settings: Mapping[str, Any]) -> Config:
    """The Config of settings that the log has."""
    known = {name: value for name, value in completed(settings).items() if name not in ("clients", "dtype")}
    known |= {
        name: NO_NUMBERS[value] for name, value in known.items() if isinstance(value, str) and value in NO_NUMBERS
    }
    try:
        return Config(**known)
    except TypeError as problem:
        raise ValueError(
            f"settings must be those of a server of this version, got others: {one_line(str(problem))}"
        ) from None


def _in_effect(settings: dict[str, Any]) -> dict[str, Any]:
    """The same with keep_last true or false where it is None."""
    if settings.get("keep_last", True) is None:
        settings["keep_last"] = reads_last(settings["averages"], settings["filter"])
    return settings


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that differ, in words; empty if none does."""
    before, now = (_in_effect(completed(settings)) for settings in (before, now))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{one_line(name)}={before.get(name)!r:.40} became {now.get(name)!r:.40}" for name in names[:5])


def weight_of(server: Any, client: int) -> float:
    weights = server.weights()
    return float("nan") if weights is None else float(weights[client])
