"""Decide a stretch of the log again: from a state that the log names, with the kept updates, bit for bit."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import files, tensor_file
from ..checkpoint import state as states
from ..server.server import SecureAFL
from ..validation import describe
from .facts import changed_settings, config_from, digest, settings_of, weight_of
from .line import CALLS, DTYPES, UPLOADS, Line
from .log import HalfLineError, files_of, read, read_file
from .updates import Updates


class DifferenceError(ValueError):
    """The server decides otherwise than the log says."""


class Place(NamedTuple):
    """A line that names a state of the server."""

    file: int
    line: Line


class Repeated(NamedTuple):
    calls: int
    uploads: int


def find(folder: Path, state: str) -> Place | None:
    """The newest line that names this state. Files are read from the newest on, up to the one that has the line."""
    for number, path in reversed(list(enumerate(files_of(folder)))):
        found = None
        try:
            for line, _ in read_file(path):
                found = line if line.state == state else found
        except HalfLineError:  # the last file alone can have one: the others were read to their end
            pass
        if found:
            return Place(number, found)
    return None


def after(folder: Path, place: Place) -> "filter[Line]":
    return filter(lambda line: line.seq > place.line.seq, read(folder, place.file))


def replay(
    server: Any,
    folder: str | os.PathLike,
    place: Place,
    *,
    until: int | None = None,
    tell: Callable[[Line], None] = lambda line: None,
) -> Repeated:
    """Repeat every call after `place` on a server that has its state. The first other decision is a DifferenceError.

    until: stop before a call that leads beyond this version    tell: called with every line that was read
    """
    updates, calls, uploads = Updates(Path(folder)), 0, 0
    for line in after(Path(folder), place):
        if until is not None and line.kind in CALLS and line.version > until:
            break
        where = f"line {line.seq}, {line.kind} of client {line.client}"
        if line.kind in UPLOADS:
            _repeat_upload(server, line, updates, where)
            uploads += 1
        elif line.kind in CALLS and hasattr(server, line.kind):
            _call(where, getattr(server, line.kind), line.client)
        elif line.kind in ("state", "resumed"):
            _compare_state(server, line)
        calls += line.kind in CALLS
        if line.kind in CALLS:
            _compare(where, "version", line.version, server.version)
        tell(line)
    return Repeated(calls, uploads)


def _repeat_upload(server: Any, line: Line, updates: Updates, where: str) -> None:
    _compare(where, "shape of the update", line.shape, tuple(server.model.shape))
    update = updates.get(line).to(server.model.device)
    receipt = _call(where, server.submit, line.client, update, line.trained_on)
    _compare(where, "verdict", line.kind, receipt.kind)
    _compare(where, "factor", line.factor, float(receipt.factor))
    if line.weight is not None:
        _compare(where, "weight", line.weight, weight_of(server, line.client))


def _call(where: str, method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except (ValueError, TypeError, IndexError) as problem:
        raise DifferenceError(f"{where}: the server refuses the call: {problem}") from problem


def _compare(where: str, name: str, logged: object, got: object) -> None:
    if repr(logged) != repr(got):  # as text NaN equals NaN, and -0.0 is not 0.0
        raise DifferenceError(f"{where}: {name} is {logged!r} in the log, decided again it is {got!r}")


def _compare_state(server: Any, line: Line) -> None:
    changed = changed_settings(settings_of(server), line.settings)
    if changed:
        raise ValueError(f"line {line.seq}: other settings from here on: {changed}; replay from a later checkpoint")
    got = digest(server.state_dict())
    if got != line.state and line.kind == "resumed":
        raise ValueError(f"line {line.seq}: the server was set back to another state; replay from a later checkpoint")
    _compare(f"line {line.seq}", "the digest of the state", line.state, got)


def load(checkpoint: str | os.PathLike, folder: str | os.PathLike, device: str = "cpu") -> tuple[SecureAFL, Place]:
    """(the server of a checkpoint of `save` or of the Flower loop, the line of its state). The log has its settings."""
    with tensor_file.opened(checkpoint) as file:
        is_loop = "flower" in file.parse(file.metadata.get("secureafl", "{}"))
    if not is_loop:
        server = SecureAFL.load(checkpoint, device)
        return server, _need_place(checkpoint, folder, digest(server.state_dict()))
    tensors, about = files.read(checkpoint)
    prefix = "server."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    state |= about["server"] if isinstance(about.get("server"), dict) else {}
    place = _need_place(checkpoint, folder, digest(state))
    return _server_from(checkpoint, state, place.line, device), place


def _need_place(checkpoint: str | os.PathLike, folder: str | os.PathLike, state: str) -> Place:
    place = find(Path(folder), state)
    if place is None:
        raise ValueError(f"{checkpoint}: expected a checkpoint of a state that the log in {folder} names, got another")
    return place


def _server_from(checkpoint: str | os.PathLike, state: dict[str, Any], line: Line, device: str) -> SecureAFL:
    """A loop's checkpoint has no settings. Everything is checked before memory for a server is allocated."""
    clients, dtype, models = line.settings.get("clients"), line.settings.get("dtype"), state.get("models")
    if type(clients) is not int or dtype not in DTYPES:
        how = "give a server of your own to secureafl_ext.audit.replay"
        raise ValueError(
            f"line {line.seq}: expected the settings of a SecureAFL, got {json.dumps(line.settings)[:80]}; {how}"
        )
    if not isinstance(models, Tensor) or models.dim() != 2:
        raise ValueError(f"{checkpoint}: models must be (rows, d), got {describe(models)}")
    config, size = config_from(line.settings), models.shape[1]
    states.check(str(checkpoint), state, config, clients, size)
    server = SecureAFL.from_config(torch.zeros(size, dtype=DTYPES[dtype], device=device), clients, config)
    server.load_state_dict(state)
    return server
