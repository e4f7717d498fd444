"""Checkpoint files: tensors as safetensors, the rest as JSON in the header. No pickle.

A checkpoint is one file; or, of a server that is split over ranks, one that names others beside it, one of each rank.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT, SHARDED_FORMAT = 1, 2


def write(path: str | os.PathLike, tensors: dict[str, Tensor], about: dict, shards: Sequence[str] = ()) -> None:
    """The checkpoint is this file and the shards that it names, which must be there. Older shards go."""
    path = Path(path)
    absent = [name for name in shards if not path.with_name(name).exists()]
    if absent:
        raise ValueError(f"SecureAFL.save: path must lie in a folder that all ranks share, got no {absent[0]} in it")
    kind = {"format": SHARDED_FORMAT, "shards": list(shards)} if shards else {"format": FORMAT}
    write_file(path, tensors, {"secureafl": json.dumps({**kind, **about})})
    older = re.compile(rf"\.?{re.escape(path.name)}\.[0-9a-f]+\.\d+-of-\d+(\.\d+\.partial)?")
    for file in path.parent.iterdir():
        if older.fullmatch(file.name) and file.name not in shards:
            file.unlink(missing_ok=True)


def shard_name(path: Path, token: int, rank: int, ranks: int) -> str:
    """Another one for every save: a checkpoint stays whole while the next is written, whoever dies meanwhile."""
    return f"{path.name}.{token:013x}.{rank}-of-{ranks}"


def write_file(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Under another name first, then renamed: whoever looks finds the old file or the new one, whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial, header)
        _to_disk(partial)
        os.replace(partial, path)
        _to_disk(path.parent)  # the name too, before another file may name it
    finally:
        partial.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(
    path: str | os.PathLike,
    coordinates: Sequence[str] = (),
    bounds: Callable[[int], tuple[int, int]] = lambda size: (0, size),
) -> tuple[dict[str, Tensor], dict]:
    """(tensors on the CPU, about). Of those named in coordinates, (.., d), the slice that bounds(d) says."""
    with safe_open(path, "pt", device="cpu") as file:
        header = (file.metadata() or {}).get("secureafl")
        if header is None:
            raise ValueError(f"SecureAFL.load: {path} must be a file that SecureAFL.save wrote, got another one")
        about = json.loads(header)
        got = about.pop("format")
        if got not in (FORMAT, SHARDED_FORMAT):
            expected = f"{FORMAT} or {SHARDED_FORMAT}"
            raise ValueError(f"SecureAFL.load: {path} must have format {expected}, got {got!r}")
        whole = {name: file.get_tensor(name) for name in file.keys() if name not in coordinates}  # noqa: SIM118
    files = [Path(path).with_name(name) for name in about.pop("shards", [])] or [path]
    return {**whole, **(_slices(files, coordinates, bounds) if coordinates else {})}, about


def _slices(files: list, names: Sequence[str], bounds: Callable[[int], tuple[int, int]]) -> dict[str, Tensor]:
    """Of tensors whose last dimension goes on from file to file."""
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt", device="cpu")) for file in files]
        widths = [file.get_slice(names[0]).get_shape()[-1] for file in opened]
        begin, end = bounds(sum(widths))
        pieces = {name: [] for name in names}
        start = 0
        for file, width in zip(opened, widths, strict=True):
            here = slice(max(begin - start, 0), min(end - start, width))
            for name in names if here.start < here.stop else ():
                stored = file.get_slice(name)
                pieces[name].append(stored[(slice(None),) * (len(stored.get_shape()) - 1) + (here,)])
            start += width
        none = {name: [opened[0].get_tensor(name)[..., :0]] for name in names if not pieces[name]}
        return {
            name: torch.cat(parts, -1) if len(parts) > 1 else parts[0] for name, parts in {**pieces, **none}.items()
        }
