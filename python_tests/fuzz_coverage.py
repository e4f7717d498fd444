"""Coverage-guided: bytes as a checkpoint, and as one array of a Flower reply. Needs Atheris, which no extra installs.

python python_tests/fuzz_coverage.py load -max_total_time=180     (or: layout)
Anything but the refusal that a reader promises ends the run, and libFuzzer writes the bytes down.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["secureafl_ext"]):
    from secureafl_ext import SecureAFL
    from secureafl_ext.checkpoint import files, state, tensor_file  # noqa: F401
    from secureafl_ext.flower import GarbageError, Layout

import torch
from damage import split
from engines import make, run
from flwr.app import Array, ArrayRecord
from safetensors.torch import load, save

torch.set_num_threads(1)


def checkpoints(folder: Path) -> tuple[Callable[[bytes], None], list[bytes]]:
    """(what to do with bytes, bytes to begin with: small checkpoints, with a digest and in the format without one)"""
    path, seeds = folder / "server", []
    for engine in ("fused", "kinship", "support", "composed", "row-wise"):
        server = make(engine)
        run(server, 6)
        server.save(path)
        data = path.read_bytes()
        about = json.loads(split(data)[0]["__metadata__"]["secureafl"])
        seeds += [data, save(load(data), {"secureafl": json.dumps({**about, "format": 1})})]

    def one(data: bytes) -> None:
        path.write_bytes(data)
        try:
            server = SecureAFL.load(path)
        except ValueError as error:
            assert str(error).startswith("SecureAFL")
            return
        run(server, 2)
        assert server.model.isfinite().all()

    return one, seeds


def replies(folder: Path) -> tuple[Callable[[bytes], None], list[bytes]]:
    layout = Layout({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    whole = layout.write(torch.arange(8.0))

    def one(data: bytes) -> None:
        record = ArrayRecord({"w": Array("float32", (2, 3), "numpy.ndarray", data), "b": whole["b"]})
        try:
            assert layout.read(record).shape == (8,)
        except GarbageError as error:
            assert len(str(error)) < 1000

    return one, [whole["w"].data, whole["b"].data]


def main() -> None:
    target = {"load": checkpoints, "layout": replies}[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory() as folder:
        one, seeds = target(Path(folder))
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, data in enumerate(seeds):
            (corpus / str(number)).write_bytes(data)
        atheris.Setup([*sys.argv, "-rss_limit_mb=4000", "-timeout=20", str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
