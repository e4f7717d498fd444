"""A safe reader of pickles, for CIFAR's python batches. A pickle is a program; only the opcodes below are executed.

No name in a file is ever imported. The names that numpy writes are mapped to functions of this module; any other name
is refused. The file's size bounds the memory, `MOST_OPCODES` bounds the time.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np

# CIFAR-100's training batch, the longest, has 300,000: three lists of 50,000 entries, and a memo for each name.
MOST_OPCODES = 1_000_000
MOST_VALUES = 2**32  # along one dimension of an array; a number in a pickle can be as long as the file
WHOLE = ("u1", "i4", "i8")  # the dtypes that a batch may have


class _Name(NamedTuple):
    module: str
    name: str


class _Dtype(NamedTuple):
    code: str


@dataclass(eq=False)
class _Array:
    """A numpy array of a batch, filled by the BUILD opcode."""

    values: np.ndarray | None = None


@dataclass(eq=False)
class _Machine:
    """The state of the pickle machine."""

    room: int  # bytes that it may still create beyond those in the file
    stack: list = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, kind: type = object) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise UnpicklingError("it takes a value where there is none")
        return _need(self.stack.pop(), kind)

    def top(self, kind: type = object) -> Any:
        self.push(self.pop(kind))
        return self.stack[-1]

    def last(self, count: int) -> list:
        return [self.pop() for _ in range(count)][::-1]

    def since_mark(self) -> list:
        if not self.marks:
            raise UnpicklingError("it ends a list that never began")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values


def _need(value: Any, kind: type) -> Any:
    """The value, if it has exactly this type."""
    if kind is not object and type(value) is not kind:
        expected, got = (each.__name__.strip("_").lower() for each in (kind, type(value)))
        raise UnpicklingError(f"{expected} expected, got {got}")
    return value


# The functions of the admitted names. Their arguments come from the file and can be anything.


def _dtype(_: _Machine, code: Any, *__: Any) -> _Dtype:
    return _Dtype(code.decode("latin1") if type(code) is bytes else _need(code, str))


def _encode(machine: _Machine, text: Any, encoding: Any) -> bytes:
    """Python 3 writes bytes like this in older protocols. `room` bounds a file that encodes one text many times."""
    if _need(encoding, str) != "latin1":
        raise UnpicklingError("bytes in another encoding than latin1")
    machine.room -= len(_need(text, str))
    if machine.room < 0:
        raise UnpicklingError("it makes more bytes than the file has")
    return text.encode("latin1")


def _values(_: _Machine, data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """A view of the bytes, without a copy: many arrays can share them."""
    if _need(dtype, _Dtype).code not in WHOLE:
        raise UnpicklingError("an array that is not of whole numbers")
    if type(data) not in (bytes, bytearray):
        raise UnpicklingError("an array without bytes")
    flat = np.frombuffer(data, "<" + dtype.code)
    fits = len(_need(shape, tuple)) <= 2 and all(0 <= _need(size, int) <= MOST_VALUES for size in shape)
    if not fits or math.prod(shape) != flat.size:
        raise UnpicklingError(f"an array whose shape does not fit its {flat.size} values")
    return _Array(flat.reshape(shape, order="F" if _need(order, str) == "F" else "C"))


ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): lambda *_: _Array(),  # only an argument of _reconstruct
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _values for core in ("core", "_core")},
}


# The opcodes


def _name(machine: _Machine, module: str, name: str) -> None:
    if (module, name) not in ADMITTED:
        raise UnpicklingError(f"it names {module[:80]}.{name[:80]}")
    machine.push(_Name(module, name))


def _stack_name(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(str), machine.pop(str)
    _name(machine, module, name)


def _reduce(machine: _Machine, _: Any) -> None:
    arguments, name = machine.pop(tuple), machine.pop(_Name)
    machine.push(ADMITTED[name](machine, *arguments))


def _build(machine: _Machine, _: Any) -> None:
    """Set the state of an array or a dtype, the second half of numpy's pickling."""
    state, target = machine.pop(tuple), machine.top()
    if type(target) is _Dtype and len(state) > 1:  # only the byte order of its state matters
        if state[1] in (">", b">"):
            raise UnpicklingError("a big-endian array")
    elif type(target) is _Array and len(state) == 5:
        _, shape, dtype, fortran, data = state
        target.values = _values(machine, data, dtype, shape, "F" if fortran is True or fortran == 1 else "C").values
    else:
        raise UnpicklingError("it sets the state of a value that is no array and no dtype")


def _extend(machine: _Machine, values: list) -> None:
    machine.top(list).extend(values)


def _store(machine: _Machine, values: list) -> None:
    """Keys must be text: the hash of nested tuples that share their parts takes exponential time."""
    target = machine.top(dict)
    if len(values) % 2:
        raise UnpicklingError("a key without a value")
    for key, value in zip(values[::2], values[1::2], strict=True):
        if type(key) not in (str, bytes):
            raise UnpicklingError(f"a key that is no text but {type(key).__name__}")
        target[key] = value


def _dict(machine: _Machine, _: Any) -> None:
    values = machine.since_mark()
    machine.push({})
    _store(machine, values)


def _get(machine: _Machine, index: int) -> None:
    if index not in machine.memo:
        raise UnpicklingError(f"it recalls {index}, which it never kept")
    machine.push(machine.memo[index])


OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,  # only a hint for readers of streams
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.last(3))),
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "DICT": _dict,
    "APPEND": lambda machine, _: _extend(machine, machine.last(1)),
    "APPENDS": lambda machine, _: _extend(machine, machine.since_mark()),
    "SETITEM": lambda machine, _: _store(machine, machine.last(2)),
    "SETITEMS": lambda machine, _: _store(machine, machine.since_mark()),
    "MEMOIZE": lambda machine, _: machine.memo.update({len(machine.memo): machine.top()}),
    "GLOBAL": lambda machine, names: _name(machine, *names.split(" ", 1)),
    "STACK_GLOBAL": _stack_name,
    "REDUCE": _reduce,
    "BUILD": _build,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, i: machine.memo.update({i: machine.top()})),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    # Python 2's strings are bytes; pickletools returns them as text.
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), lambda machine, x: machine.push(x.encode("latin1"))),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), _Machine.push),
    **dict.fromkeys(("FLOAT", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), _Machine.push),
}


def loads(data: bytes) -> dict[str, Any]:
    """A pickled dict of arrays, numbers, text, lists and dicts. Anything else is refused before it has any effect."""
    machine = _Machine(room=len(data))
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name == "STOP":
            break
        if opcode.name not in OPCODES:
            raise UnpicklingError(f"it has the opcode {opcode.name}")
        if count >= MOST_OPCODES:
            raise UnpicklingError(f"it has more than {MOST_OPCODES} opcodes")
        OPCODES[opcode.name](machine, argument)
    named = {key.decode() if type(key) is bytes else key: value for key, value in machine.pop(dict).items()}
    return {key: value.values if type(value) is _Array else value for key, value in named.items()}
