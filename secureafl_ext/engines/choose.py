"""Selects the engine of a server: one fused op where its settings allow it, otherwise plain ops."""

import torch

from ..config import Config
from ..validation import name_of
from . import fused, fused_averages, kinship, row_rules, sharded_composed, support
from .averaged import Averaged, Sketched
from .base import Engine, ShardedEngine
from .composed import Composed
from .ranks import Ranks
from .sharded import Sharded


def check_engine(config: Config, clients: int, dtype: torch.dtype, device: torch.device, sharded: bool) -> None:
    """Refuse settings that no engine supports together. sharded: with a process group"""
    if config.spacing >= clients:
        raise ValueError(f"SecureAFL: spacing must be less than clients = {clients}, got {config.spacing}")
    if dtype == torch.float64 and config.dtype != torch.float64:
        raise ValueError(f"SecureAFL: history_dtype must be float64 like model, got {config.history_dtype}")
    if config.rule == "trimmed_mean" and 2 * config.trim >= clients:
        raise ValueError(f"SecureAFL: trim must leave a client, 2 * trim < {clients}, got {config.trim}")
    if config.history_device == "cpu" and device.type not in ("cpu", "cuda"):
        raise ValueError(f"SecureAFL: history_device must be 'model' for a model on {device.type}, got 'cpu'")
    if sharded and config.sketch:
        raise ValueError(f"SecureAFL: sketch must be 0 with process_group, got {config.sketch}")
    conflict = fused.unsupported(config, clients, device)
    if conflict and config.pair_dtype == torch.float16:
        raise ValueError(f"SecureAFL: history_dtype=float16 does not support {conflict}")
    if conflict and sharded and not sharded_composed.fits(config):
        only = "" if config.rule == "centered_clip" else f" with memory={config.memory}, only with memory=0"
        raise ValueError(f"SecureAFL: process_group does not support {conflict}{only}")


def make_sharded(config: Config, clients: int, size: int, device: torch.device, ranks: Ranks) -> ShardedEngine:
    if fused.unsupported(config, clients, device) is None:
        return Sharded(config, clients, size, device, ranks)
    kind = sharded_composed.ShardedAverages if config.averages == "steps" else sharded_composed.ShardedComposed
    return kind(config, clients, size, device, ranks)


def make_engine(config: Config, clients: int, size: int, device: torch.device) -> Engine:
    if config.sketch:
        return Sketched(config, clients, size, device)
    if config.averages == "steps":
        conflict = fused_averages.unsupported(config, clients, device)
        kind = Averaged if conflict else fused_averages.FusedAverages
        return kind(config, clients, size, device)
    if fused.unsupported(config, clients, device) is None:
        return fused.Fused(config, clients, size, device)
    if kinship.fits(config, clients, device):
        return kinship.FusedKinship(config, clients, size, device)
    if support.fits(config, clients, device):
        return support.FusedSupport(config, clients, size, device)
    if row_rules.fits(config, clients, device):
        return row_rules.FusedRowRules(config, clients, size, device)
    return Composed(config, clients, size, device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means too little memory. On a CPU it is a RuntimeError, also if the size in bytes overflows."""
    words = ("can't allocate memory", "not enough memory", "calculation overflow", "multiplication overflow")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)


def too_large(config: Config, clients: int, size: int, device: torch.device) -> torch.OutOfMemoryError:
    """The error to raise when a new server does not fit into memory."""
    pairs = 2 * config.memory * clients * size * config.pair_dtype.itemsize
    kept = ["last update", "model"] * config.keeps_last + ["mean update"] * config.averaging
    each = 2 * config.keeps_last * config.dtype.itemsize + config.averaging * config.mean_dtype.itemsize
    last = each * clients * (config.sketch or size)
    models = (config.max_staleness + 2) * size * config.dtype.itemsize
    parts = (
        f"{last / 1e9:.3g} GB for the {' and '.join(kept)} of {clients} clients",
        f"{pairs / 1e9:.3g} GB for {config.memory} pairs of each in {name_of(config.pair_dtype)}",
        f"{models / 1e9:.3g} GB for {config.max_staleness + 2} models of {size} parameters",
    )
    less = "memory=0, history_dtype=torch.float16, or a sketch need less" if config.memory else "a sketch needs less"
    if device.type == "cuda" and config.history_device == "model" and config.keeps_last:
        less += "; history_device='cpu' keeps last updates, last models and pairs in the host's memory"
    needed = f"{(pairs + last + models) / 1e9:.3g} GB"
    place = f"{device} and the host's memory" if config.history_device == "cpu" else device
    return torch.OutOfMemoryError(f"SecureAFL: {needed} do not fit {place}: {', '.join(parts)}; {less}")
