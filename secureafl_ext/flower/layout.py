"""Layout as Flower's arrays: writes and reads the arrays of a message."""

import io
import math
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from .. import layout

NUMPY = "numpy.ndarray"  # Flower's name of arrays in NumPy's file format
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class GarbageError(ValueError):
    """A reply that does not contain a model of this layout."""


class Layout(layout.Layout):
    """A layout that also reads and writes Flower's arrays. Made once; a message costs one copy each way."""

    def __init__(self, state: Mapping[str, Tensor]):
        super().__init__(state)
        self.numpy_dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        self._headers = {name: header(self.numpy_dtype, entry.shape) for name, entry in self.entries.items()}

    def write(self, vector: Tensor) -> ArrayRecord:
        """The state dict for a message. Its bytes are written once."""
        flat = vector.detach().cpu().numpy()
        record = ArrayRecord()
        for name in self.names:
            if name in self.carried:
                record[name] = Array(self.carried[name].numpy())
                continue
            shape, part = self.entries[name]
            data = b"".join((self._headers[name], flat[part].data.cast("B")))
            record[name] = Array(str(self.numpy_dtype), shape, NUMPY, data)
        return record

    def read(self, record: ArrayRecord) -> Tensor:
        """The vector (d) of a client's state dict. The arrays are views of its bytes: there is one copy."""
        unknown = [name for name in record if name not in self.entries and name not in self.carried]
        missing = [name for name in self.entries if name not in record]
        if unknown or missing:
            raise GarbageError(f"entries missing: {', '.join(missing) or 'none'}; unknown: {len(unknown)}")
        vector = torch.empty(self.size, dtype=self.dtype)
        values = vector.numpy()
        for name, (shape, part) in self.entries.items():
            values[part].reshape(shape)[...] = self._view(name, record[name])
        return vector

    def _view(self, name: str, array: Array) -> np.ndarray:
        expected = self.numpy_dtype, self.entries[name].shape
        try:
            values = view(array)
        except Exception as problem:  # NumPy evaluates a header as Python: any error is possible
            raise GarbageError(f"{name} cannot be read: {str(problem)[:200]}") from None
        if (values.dtype, values.shape) != expected:
            wanted, got = (f"{shape} {dtype}" for dtype, shape in (expected, (values.dtype, values.shape)))
            raise GarbageError(f"{name} must be {wanted}, got {got}")
        return values


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The bytes that NumPy writes before the values of an array."""
    file = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def view(array: Array) -> np.ndarray:
    """A read-only view of the array's bytes."""
    if array.stype != NUMPY:
        raise ValueError(f"serialized as {array.stype!r}, not {NUMPY!r}")
    file = io.BytesIO(array.data)  # shares the bytes as long as nobody writes
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
