"""Checkpoint files: tensors as safetensors, the rest as JSON in the header. No pickle.

A checkpoint is one file. With a process group it is one file that names others beside it (shards), one per rank.
Every file has a digest against damage, not against forgery (tensor_file.py); files of formats 1 and 2 have none.
"""

import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import tensor_file
from .tensor_file import Reader

FORMAT, SHARDED_FORMAT = 5, 6
WITHOUT_DIGEST, SHARDED_WITHOUT_DIGEST = 1, 2
SHARDED_FORMATS = (SHARDED_WITHOUT_DIGEST, 4, SHARDED_FORMAT)  # 3 and 4 have no presence of clients
MOST_SHARDS = 4096
ALWAYS = ("models",)  # sliced tensors that every checkpoint has; state.py checks those that depend on the settings
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and leading shape of each tensor


def write(
    path: str | os.PathLike, tensors: dict[str, Tensor], about: dict[str, Any], shards: Sequence[str] = ()
) -> None:
    """Write the file that names these shards, which must exist, and remove older shards."""
    path = Path(path)
    absent = [name for name in shards if not path.with_name(name).exists()]
    if absent:
        raise ValueError(f"SecureAFL.save: path must lie in a folder that all ranks share, got no {absent[0]} in it")
    clear(path)
    kind = {"format": SHARDED_FORMAT, "shards": [[name, _digest_of(path, name)] for name in shards]}
    write_file(path, tensors, {"secureafl": json.dumps({**(kind if shards else {"format": FORMAT}), **about})})
    older = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]+\.\d+-of-\d+")
    for file in path.parent.iterdir():
        if older.fullmatch(file.name) and file.name not in shards:
            file.unlink(missing_ok=True)


def names_any(path: Path, shards: Sequence[str]) -> bool:
    """Whether there is a checkpoint that names any of these shards."""
    try:
        with tensor_file.opened(path) as file:
            return not set(shards).isdisjoint(_about(file)[1])
    except (ValueError, FileNotFoundError, IsADirectoryError):  # not a file that this call has written
        return False
    except OSError:  # unknown
        return True


def shard_name(path: Path, token: int, rank: int, ranks: int) -> str:
    """A new name for every save: the old checkpoint stays complete while the next is written, even after a kill."""
    return f"{path.name}.{token:013x}.{rank}-of-{ranks}"


def write_file(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write under a temporary name, then rename: a reader finds either the old file or the new one, complete."""
    try:
        partial, descriptor = _start_partial(path)
        try:
            with open(descriptor, "wb") as file:
                tensor_file.dump(file, {name: tensor.cpu() for name, tensor in tensors.items()}, header)
                file.flush()
                to_disk(partial)
                os.replace(partial, path)
            to_disk(path.parent)  # the rename too, before another file names this one
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"SecureAFL.save: {path} could not be written: {error.strerror}") from error


def _start_partial(path: Path) -> tuple[Path, int]:
    """A temporary file of this save alone, readable by the owner alone, locked as long as its writer lives."""
    while True:
        partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):  # a file system without locks: leftovers stay there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return partial, descriptor
        os.close(descriptor)  # another save removed it as a leftover before it was locked


def clear(path: Path) -> None:
    """Remove temporary files of this path and its shards that killed saves left. Live writers hold a lock."""
    ours = re.compile(rf"\.{re.escape(path.name)}(?:\.[0-9a-f]+\.\d+-of-\d+)?\.(\d+)(-[0-9a-f]+)?\.partial")
    for file in path.parent.iterdir() if path.parent.is_dir() else ():
        found = ours.fullmatch(file.name)
        if not found:
            continue
        with suppress(OSError):  # locked, removed meanwhile, or not ours to open
            descriptor = os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found[2] or not _alive(int(found[1])):  # older versions named the process and held no lock
                    file.unlink()
            finally:
                os.close(descriptor)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of(path: Path, shard: str) -> str:
    with tensor_file.opened(path.with_name(shard)) as file:
        return file.digest


def read(
    path: str | os.PathLike,
    coordinates: Sequence[str] = (),
    bounds: Callable[[int], tuple[int, int]] = lambda size: (0, size),
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors on the CPU, about). Of the tensors named in coordinates, (.., d), only the slice bounds(d)."""
    path = Path(path)
    with tensor_file.opened(path) as file:
        about, shards = _about(file)
        sliced = [] if shards else _expected(file, coordinates)
        width = _width(file, sliced)
        tensors = file.load(dict.fromkeys(sliced, bounds(width)), file.digest)
        twice = sorted(set(tensors) & set(coordinates)) if shards else []
        if twice:
            file.refuse(f"its shards alone must have {twice[0]}")
    return {**tensors, **(_slices(path, shards, coordinates, bounds) if shards and coordinates else {})}, about


def _about(file: Reader) -> tuple[dict[str, Any], dict[str, str | None]]:
    """(the header, the digest of each shard by name; empty for a checkpoint of one file)"""
    path, header = file.path, file.metadata.get("secureafl")
    if header is None:
        raise ValueError(
            f"SecureAFL.load: {path} must be a file that SecureAFL.save wrote, got a file without its header"
        )
    about = file.parse(header)
    got = about.pop("format", None)
    if type(got) is not int or not WITHOUT_DIGEST <= got <= SHARDED_FORMAT:
        expected = f"{WITHOUT_DIGEST} to {SHARDED_FORMAT}"
        raise ValueError(f"SecureAFL.load: {path} must have format {expected}, got {str(got)[:40]}")
    if (file.digest is None) != (got in (WITHOUT_DIGEST, SHARDED_WITHOUT_DIGEST)):
        file.refuse(f"format {got} must come {'with' if file.digest is None else 'without'} a digest")
    if (got in SHARDED_FORMATS) != ("shards" in about):
        file.refuse(f"format {got} must come {'without' if 'shards' in about else 'with'} shards")
    shards = about.pop("shards", None)
    if shards is None:
        return about, {}
    return about, _checked_shards(file, shards, got != SHARDED_WITHOUT_DIGEST)


def _checked_shards(file: Reader, shards: Any, digests: bool) -> dict[str, str | None]:
    """Names as shard_name makes them, of all ranks, in order. No name may point to another folder."""
    sound = isinstance(shards, list) and 0 < len(shards) <= MOST_SHARDS
    if sound and not digests:
        shards = [[name, None] for name in shards]
    kinds = [str, str if digests else type(None)]
    sound = sound and all(isinstance(shard, list) and list(map(type, shard)) == kinds for shard in shards)
    first = re.fullmatch(r"([^/\\\0]+\.[0-9a-f]{13}\.)0-of-\d+", shards[0][0]) if sound else None
    if not first or [name for name, _ in shards] != [f"{first[1]}{k}-of-{len(shards)}" for k in range(len(shards))]:
        file.refuse(f"its shards must be 1 to {MOST_SHARDS} plain names NAME.TOKEN.RANK-of-RANKS, one of each rank")
    return dict(shards)


def _expected(file: Reader, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in file.places or name in ALWAYS]


def _width(file: Reader, names: Sequence[str]) -> int:
    """d: the last dimension, the same in all these tensors."""
    absent = [name for name in names if name not in file.places]
    if absent:
        file.refuse(f"it must have {', '.join(absent)}, got none")
    widths = {file.places[name].shape[-1:] for name in names} or {(0,)}
    if len(widths) > 1 or widths == {()}:
        file.refuse(f"{', '.join(names)} must have the same last length, got {sorted(widths)}")
    return widths.pop()[0]


def _slices(
    path: Path, shards: dict[str, str | None], names: Sequence[str], bounds: Callable[[int], tuple[int, int]]
) -> dict[str, Tensor]:
    """The slices of tensors whose last dimension continues from shard to shard."""
    found = {shard: _width_and_kinds(path, shard, names) for shard in shards}
    kinds = next(iter(found.values()))[1]
    other = [shard for shard in shards if found[shard][1] != kinds]
    if other:
        raise ValueError(f"SecureAFL.load: {path.with_name(other[0])} must have tensors like those of the first shard")
    begin, end = bounds(sum(width for width, _ in found.values()))
    pieces = {name: [torch.empty(*shape, 0, dtype=dtype)] for name, (dtype, shape) in kinds.items()}
    start = 0
    for shard, (width, _) in found.items():
        here = max(begin - start, 0), min(end - start, width)
        start += width
        if here[0] >= here[1]:
            continue
        with tensor_file.opened(path.with_name(shard)) as file:
            if _kinds(file, names) != found[shard]:
                file.refuse("it was replaced while it was read")
            for name, part in file.load(dict.fromkeys(names, here), shards[shard]).items():
                pieces[name].append(part)
    return {name: torch.cat(parts, -1) if len(parts) > 2 else parts[-1] for name, parts in pieces.items()}


def _width_and_kinds(path: Path, shard: str, names: Sequence[str]) -> tuple[int, Kinds]:
    try:
        with tensor_file.opened(path.with_name(shard)) as file:
            return _kinds(file, names)
    except FileNotFoundError as error:
        raise ValueError(f"SecureAFL.load: {path} must have its shards beside it, got no {shard}") from error


def _kinds(file: Reader, names: Sequence[str]) -> tuple[int, Kinds]:
    """(d of this shard, dtype and leading shape of each tensor)"""
    names = _expected(file, names)
    if set(file.places) != set(names):
        file.refuse(f"a shard must have {', '.join(names)} and nothing else")
    return _width(file, names), {name: (place.dtype, place.shape[:-1]) for name, place in file.places.items()}
