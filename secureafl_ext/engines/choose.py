"""Which engine does the rounds of a server: one fused op where there is one for its settings, else plain ops."""

import torch

from ..config import Config
from ..validation import name_of
from . import fused, kinship, sharded
from .composed import Composed

Engine = Composed | fused.Fused | kinship.KinRound | sharded.Sharded


def check_engine(config: Config, clients: int, dtype: torch.dtype, device: torch.device, split: bool) -> None:
    """Refuse settings that no engine has together. split: over the ranks of a process group"""
    if config.spacing >= clients:
        raise ValueError(f"SecureAFL: spacing must be less than clients = {clients}, got {config.spacing}")
    if dtype == torch.float64 and config.dtype != torch.float64:
        raise ValueError(f"SecureAFL: history_dtype must be float64 like model, got {config.history_dtype}")
    if config.rule == "trimmed_mean" and 2 * config.trim >= clients:
        raise ValueError(f"SecureAFL: trim must leave a client, 2 * trim < {clients}, got {config.trim}")
    if fused.fits(config, clients, device):
        return
    if config.pair_dtype == torch.float16:
        others = f'pairs="received", {fused.LIMITS}'
        allowed = f"with {'a coordinate-wise rule and buckets=1' if config.row_wise else others}"
        raise ValueError(f"SecureAFL: history_dtype must be float32 or float64, or float16 {allowed}, got float16")
    if split:
        plain = 'a coordinate-wise rule, buckets=1, pairs="received" and history_dtype float32 or float16'
        got = f"rule={config.rule!r}, buckets={config.buckets}, pairs={config.pairs!r}, {config.history_dtype}"
        got += f", memory={config.memory}, clients={clients}"
        raise ValueError(f"SecureAFL: process_group must come with {plain}, {fused.LIMITS}, got {got}")


def make_engine(config: Config, clients: int, size: int, device: torch.device, ranks: "sharded.Ranks | None") -> Engine:
    if ranks:
        return sharded.Sharded(config, clients, size, device, ranks)
    if fused.fits(config, clients, device):
        return fused.Fused(config, clients, size, device)
    if kinship.fits(config, clients, device):
        return kinship.KinRound(config, clients, size, device)
    return Composed(config, clients, size, device)


def too_large(config: Config, clients: int, size: int, device: torch.device) -> torch.OutOfMemoryError:
    """What to raise where the memory of a new server does not fit."""
    pairs = 2 * config.memory * clients * size * config.pair_dtype.itemsize
    last = 2 * clients * size * config.dtype.itemsize
    models = (config.max_staleness + 2) * size * config.dtype.itemsize
    parts = (
        f"{last / 1e9:.3g} GB for the last update and model of {clients} clients",
        f"{pairs / 1e9:.3g} GB for {config.memory} pairs of each in {name_of(config.pair_dtype)}",
        f"{models / 1e9:.3g} GB for {config.max_staleness + 2} models of {size} parameters",
    )
    less = 'less memory, history_dtype=torch.float16, or rule="kinship" with memory=0 need less'
    needed = f"{(pairs + last + models) / 1e9:.3g} GB"
    return torch.OutOfMemoryError(f"SecureAFL: {needed} do not fit {device}: {', '.join(parts)}; {less}")
