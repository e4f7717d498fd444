"""One line of the audit log: its fields, its JSON, and its hash, which covers the line and the hash before it."""

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..operate.verdict import UPLOADS
from ..validation import MOST, printable, shown

FIRST = "0" * 64  # stands for the hash before the first line
LONGEST = 2**16  # bytes of a line
LONGEST_NAME = 100  # characters of a client's name
DTYPES = {"float32": torch.float32, "float64": torch.float64}  # of an update
NO_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # texts, because JSON has no such numbers

CALL = ("client", "who", "version")
STATE = ("version", "state", "settings")
KINDS: dict[str, tuple[str, ...]] = {  # kind -> the fields that it has besides seq, at, kind, before and hash
    **dict.fromkeys(UPLOADS, (*CALL, "trained_on", "factor", "update", "dtype", "shape")),
    "leave": CALL,
    "forget": CALL,
    "joined": CALL,
    "file": ("count",),  # the first line of every file: the number of the file
    "state": STATE,  # the server has this state: a checkpoint of it can be continued from here
    "mended": ("count",),  # a crash left so many bytes of half a line, which were cut off
    "recovered": ("version", "count"),  # the server was started again, and so many calls were repeated
    "resumed": (*STATE, "count"),  # the server was started again from this state, and so many calls were given up
}
CALLS = (*UPLOADS, "leave", "forget")  # calls that change a server


@dataclass(frozen=True, slots=True)
class Line:
    """A line has the fields that KINDS lists for its kind; the others keep their defaults."""

    seq: int  # 1, 2, ..
    at: float  # seconds since 1970
    kind: str  # of KINDS
    client: int = -1
    who: str = ""  # the client's name; "" if it has none
    trained_on: int = -1  # version of the model that the update was computed on
    version: int = -1  # of the server, afterwards
    factor: float = math.nan
    weight: float | None = None  # of the client in the next step; None: not asked for
    update: str = ""  # SHA-256 of the update's bytes
    dtype: str = ""  # of the update
    shape: tuple[int, ...] = ()  # of the update
    state: str = ""  # digest of the server's state (facts.digest)
    settings: dict[str, Any] = field(default_factory=dict)  # of the server
    count: int = -1


def write(line: Line, before: str) -> tuple[bytes, str]:
    """(the line, its hash). before: hash of the line before. All characters are printable ASCII."""
    names = KINDS[line.kind] if line.weight is None else (*KINDS[line.kind], "weight")
    about = {name: plain(getattr(line, name)) for name in ("seq", "at", "kind", *names)}
    _check(about)  # otherwise nobody could read the log any more
    body = json.dumps({**about, "before": before}, separators=(",", ":"), allow_nan=False)
    hash_ = _hash(before, body.encode())
    return f'{body[:-1]},"hash":"{hash_}"}}\n'.encode(), hash_


def read(raw: bytes) -> tuple[Line, str, str]:
    """(the line, the hash before it, its own hash), or a ValueError that says what is wrong with it."""
    parts = re.fullmatch(rb'(\{.*),"hash":"([0-9a-f]{64})"\}\n', raw)
    if not parts:
        raise ValueError(f"a line must be JSON and end with its hash, got {shown(raw[-60:].decode('latin-1'))}")
    body = parts[1] + b"}"
    try:
        about = json.loads(body.decode("ascii"))
    except (ValueError, RecursionError):
        raise ValueError("a line must be JSON in ASCII, got something else") from None
    kind, before = about.get("kind"), about.get("before")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {shown(kind)}")
    names = {"seq", "at", "kind", *KINDS[kind], "before"}
    other = sorted((about.keys() - {"weight"}) ^ names)
    if other:
        expected = f"a line of kind {kind} must have {', '.join(sorted(names))} and no more"
        raise ValueError(f"{expected}, got {shown(', '.join(other))} missing or added")
    _check(about)
    if _hash(before, body) != parts[2].decode():
        raise ValueError("its hash must be that of its contents, got another: the line was changed")
    del about["before"]
    about |= {name: _number(about[name]) for name in ("factor", "weight") if name in about}
    if "shape" in about:
        about["shape"] = tuple(about["shape"])
    return Line(**about), before, parts[2].decode()


def plain(value: Any) -> Any:
    """The value as JSON has it. Floats keep all their bits."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def one_line(text: str) -> str:
    return printable(text, LONGEST_NAME).strip()


def _check(about: dict[str, Any]) -> None:
    for name, value in about.items():
        expected, holds = FIELDS[name]
        if not holds(value):
            raise ValueError(f"{name} must be {expected}, got {shown(value)}")


def _hash(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


def _number(value: Any) -> float:
    return NO_NUMBERS[value] if isinstance(value, str) else value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


COUNT = ("a whole number, 0 or more", _is_count)
NUMBER = ("a number, nan, inf or -inf", lambda v: _is_number(v) or (isinstance(v, str) and v in NO_NUMBERS))
HASH = ("64 hexadecimal digits", _is_hash)
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "at": ("a number", _is_number),
    "who": (f"a text of at most {LONGEST_NAME} characters", lambda v: isinstance(v, str) and len(v) <= LONGEST_NAME),
    "kind": ("a text", lambda value: isinstance(value, str)),
    "dtype": (" or ".join(DTYPES), lambda value: isinstance(value, str) and value in DTYPES),
    "shape": ("a list of one length", lambda v: isinstance(v, list) and len(v) == 1 and _is_count(v[0])),
    "settings": ("an object", lambda value: isinstance(value, dict)),
    **dict.fromkeys(("seq", "client", "trained_on", "version", "count"), COUNT),
    **dict.fromkeys(("factor", "weight"), NUMBER),
    **dict.fromkeys(("update", "state", "before"), HASH),
}
