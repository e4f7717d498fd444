"""CIFAR's python batches without trust. A pickle may call whatever it names, so it gets to name only the stand-ins
below; numpy's own unpickling, which trusts what it reads, is never reached.
"""

import io
import pickle
from typing import Any

import numpy as np


class _Dtype:
    def __init__(self, code: Any, *_: Any):
        self.code = code.decode() if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: Any) -> None:
        if state[1] in (">", b">"):  # the order of the bytes; little-endian is what _values reads
            raise pickle.UnpicklingError("a big-endian array")


class _Array:
    """Where numpy's ndarray is named; what a batch holds of it is a shape, a dtype and bytes."""

    values: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.values = _values(data, dtype, shape, "F" if fortran else "C").values


def _values(data: Any, dtype: Any, shape: Any, order: str) -> _Array:
    if not isinstance(data, bytes | bytearray) or not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "i4", "i8"):
        raise pickle.UnpicklingError("an array that is not of whole numbers")
    array = _Array()
    array.values = np.frombuffer(data, "<" + dtype.code).reshape(shape, order=order)
    return array


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in the older protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


_ADMITTED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _values for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _ADMITTED[module, name]


def loads(data: bytes) -> dict[str, Any]:
    """A pickled dict of arrays, numbers, text, lists and dicts; anything else is refused before it is called."""
    loaded = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    named = {key.decode() if isinstance(key, bytes) else key: value for key, value in loaded.items()}
    return {key: value.values if isinstance(value, _Array) else value for key, value in named.items()}
