"""Upgrades of files and states of earlier versions: adds the names that a server of this version needs.

Nothing is checked here: a value of an unexpected type stays as it is, and state.py refuses it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..engines.averaged import LAST_NAMES, has_basis
from ..engines.trials import founders
from ..rules.mean_steps import SPAN
from ..rules.support import first_basis
from .values import dense

PRESENCE = ("clock", "last_epoch", "uploads")  # a state of an earlier version has none of them
FROM_SEEN = {*PRESENCE, "trials"}  # names that are computed from `seen` if the state lacks them


def upgraded_file(
    tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Files of formats 1 to 4 lack the settings of presence, those of 1 and 2 also turns and two more settings: their
    server always had the paper's values."""
    if "keep_last" not in about["config"]:
        about = {**about, "config": {**about["config"], "keep_last": True}}
    if "expiry" not in about["config"]:
        about = {**about, "config": {**about["config"], "expiry": None, "probation": 0}}
    if "factors" in about["config"]:
        return tensors, about
    tensors = {name: t[None] if name in ("factors", "recorded") else t for name, t in tensors.items()}
    if isinstance(tensors.get("pairs"), Tensor):
        tensors["turns"] = torch.zeros(len(tensors["pairs"].view(-1)), dtype=torch.int64)
    config = {"factors": "pooled", "on_reject": "step", **about["config"]}
    return tensors, {**about, "config": config, "state": {"too_soon": 0, **about["state"]}}


def upgraded_state(state: Mapping[str, Any], config: Config, clients: int) -> Mapping[str, Any]:
    if not config.keeps_last:  # a server that keeps them has more than this one needs
        state = {name: value for name, value in state.items() if name not in LAST_NAMES}
    return _with_trials(_with_mean_updates(_with_presence(state, config, clients), config, clients), config, clients)


def _with_presence(state: Mapping[str, Any], config: Config, clients: int) -> Mapping[str, Any]:
    """A state of an earlier version: all its clients have just uploaded, and are past their probation."""
    seen, uploads = state.get("seen"), state.get("uploads")
    if dense(uploads) and uploads.shape in ((clients,), (clients, 2)):  # without the recent ones
        columns = uploads.reshape(clients, -1)
        return {**state, "uploads": torch.nn.functional.pad(columns, (0, 3 - columns.shape[1]))}
    if any(name in state for name in PRESENCE) or not dense(seen) or seen.shape != (clients,):
        return state
    past, zeros = seen.bool().long() * config.probation, torch.zeros_like(seen, dtype=torch.int64)
    clock = torch.zeros(3, dtype=torch.int64, device=seen.device)
    return {**state, "clock": clock, "last_epoch": zeros, "uploads": torch.stack([past, zeros, zeros], 1)}


def _with_mean_updates(state: Mapping[str, Any], config: Config, clients: int) -> Mapping[str, Any]:
    """A state with averages="steps" of an earlier version: it had squares and met, which follow from the rest."""
    if config.averages != "steps" or "squares" not in state:
        return state
    state = {name: value for name, value in state.items() if name not in ("squares", "met")}
    total = state.get("total")
    if dense(total) and total.dtype == torch.float64:
        state["total"] = total.clamp(max=SPAN)  # the window has become shorter
    if not config.sketch and "means" in state:
        state["mean_updates"] = state.pop("means")
    if has_basis(config, clients):
        state["basis"] = first_basis(clients, torch.device("cpu"))
    return state


def _with_trials(state: Mapping[str, Any], config: Config, clients: int) -> Mapping[str, Any]:
    """A state of a server without trials: nobody is on trial."""
    if not config.trial or "trials" in state:
        return state
    seen = state.get("seen")
    if not dense(seen) or seen.dtype != torch.bool or seen.shape != (clients,):
        return state  # before trials of `clients` rows are allocated: a forged file may have any number
    return {**state, "trials": founders(seen)}
