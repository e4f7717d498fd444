"""A state dict as one flat vector and back, and either as Flower's arrays: nothing else knows what lies where."""

import io
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

NUMPY = "numpy.ndarray"  # how Flower calls arrays in NumPy's own file format
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class GarbageError(ValueError):
    """A reply that is not the model it was asked for, in words."""


class Entry(NamedTuple):
    shape: tuple[int, ...]
    part: slice  # of the flat vector
    header: bytes  # of its bytes on the wire


class Layout:
    """Where each entry of a state dict lies in the flat vector. Made once; a message costs one copy each way.

    Floating entries, buffers among them, are the vector, one after the other. Whole numbers and booleans are `carried`:
    handed out as they are, and never taken from a client, since no rule judges them.
    """

    def __init__(self, state: Mapping[str, Tensor]):
        dtypes = {value.dtype for value in state.values() if value.is_floating_point() or value.is_complex()}
        if dtypes not in ({torch.float32}, {torch.float64}):
            got = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
            raise ValueError(f"Layout: state must have floating entries, all float32 or all float64, got {got}")
        (self.dtype,) = dtypes
        self.numpy_dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        self.names = list(state)
        others = {name: value for name, value in state.items() if value.dtype != self.dtype}
        self.carried = {name: value.detach().cpu().clone() for name, value in others.items()}
        self.entries: dict[str, Entry] = {}
        self.size = 0
        for name, value in state.items():
            if name not in self.carried:
                part = slice(self.size, self.size + value.numel())
                self.entries[name] = Entry(tuple(value.shape), part, header(self.numpy_dtype, tuple(value.shape)))
                self.size = part.stop

    def flatten(self, state: Mapping[str, Tensor | np.ndarray]) -> Tensor:
        """(d) on the CPU; what is carried is not looked at."""
        vector = torch.empty(self.size, dtype=self.dtype)
        filled = vector.numpy()
        for name, entry in self.entries.items():
            value = state[name]
            values = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
            filled[entry.part].reshape(entry.shape)[...] = values
        return vector

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """The state dict; floating entries are views of the vector (d)."""
        views = {name: vector[entry.part].view(entry.shape) for name, entry in self.entries.items()}
        return {name: views[name] if name in views else self.carried[name] for name in self.names}

    def write(self, vector: Tensor) -> ArrayRecord:
        """The state dict for a message: its bytes are written once."""
        flat = vector.detach().cpu().numpy()
        record = ArrayRecord()
        for name in self.names:
            if name in self.carried:
                record[name] = Array(self.carried[name].numpy())
                continue
            shape, part, head = self.entries[name]
            record[name] = Array(str(self.numpy_dtype), shape, NUMPY, b"".join((head, flat[part].data.cast("B"))))
        return record

    def read(self, record: ArrayRecord) -> Tensor:
        """The vector (d) of a client's state dict: views of its bytes, and flatten's one copy."""
        unknown = [name for name in record if name not in self.entries and name not in self.carried]
        missing = [name for name in self.entries if name not in record]
        if unknown or missing:
            raise GarbageError(f"entries missing: {', '.join(missing) or 'none'}; unknown: {len(unknown)}")
        return self.flatten({name: self._view(name, record[name]) for name in self.entries})

    def _view(self, name: str, array: Array) -> np.ndarray:
        expected = self.numpy_dtype, self.entries[name].shape
        try:
            values = view(array)
        except Exception as problem:  # NumPy evaluates a header as Python: there is no end to how it can be broken
            raise GarbageError(f"{name} cannot be read: {str(problem)[:200]}") from None
        if (values.dtype, values.shape) != expected:
            wanted, got = (f"{shape} {dtype}" for dtype, shape in (expected, (values.dtype, values.shape)))
            raise GarbageError(f"{name} must be {wanted}, got {got}")
        return values


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """What NumPy writes before the bytes of an array."""
    file = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def view(array: Array) -> np.ndarray:
    """The values where they are: a read-only view of the array's bytes."""
    if array.stype != NUMPY:
        raise ValueError(f"serialized as {array.stype!r}, not {NUMPY!r}")
    file = io.BytesIO(array.data)  # shares the bytes until somebody writes
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"NumPy format {version}")
    shape, fortran, dtype = HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    values = np.frombuffer(array.data, dtype, math.prod(shape), file.tell())
    return values.reshape(shape, order="F" if fortran else "C")
