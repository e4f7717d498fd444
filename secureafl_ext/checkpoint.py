"""Checkpoint files: tensors as safetensors, the rest as JSON in the header. No pickle."""

import json
import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1


def write(path: str | os.PathLike, tensors: dict[str, Tensor], about: dict) -> None:
    """Under another name first, then renamed: whoever looks finds the old file or the new one, whole."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        header = {"secureafl": json.dumps({"format": FORMAT, **about})}
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial, header)
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict]:
    """(tensors on the CPU, about)"""
    with safe_open(path, "pt", device="cpu") as file:
        header = (file.metadata() or {}).get("secureafl")
        if header is None:
            raise ValueError(f"SecureAFL.load: {path} must be a file that SecureAFL.save wrote, got another one")
        about = json.loads(header)
        if about.pop("format") != FORMAT:
            raise ValueError(f"SecureAFL.load: {path} must have format {FORMAT}, got {json.loads(header)['format']!r}")
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 - not a dict
