"""What a state must be before a server takes it: one line for every name, and how the names go together.

A state may come from a file that anybody wrote. The rounds' kernels trust pairs, oldest and recorded as places in their
arrays, so what is not in this table, or not as it says, is refused before anything has changed. Any state that a server
gives must pass: the values below are bounds of what rounds can leave, also after updates near the largest float.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .. import ops
from ..config import CHECKS, COUNTS, Config
from ..rules.row_wise import LONGEST
from ..validation import MOST, converted, describe, name_of, whole

NUMBERS = ("version", "stale", "too_soon")  # of a state; the rest are tensors
CARRIED = ("oldest", "scales", "gram", "along", "weights", "status")  # a fused server works them out if one is missing


@dataclass(frozen=True)
class Entry:
    shape: tuple[int | None, ...]  # None: any length
    dtype: torch.dtype
    words: str
    holds: Callable[[Tensor], bool]


def table(config: Config, clients: int, size: int) -> dict[str, Entry]:
    """Every tensor that a state of these settings may have."""
    n, m, d = clients, config.memory, size
    lists, room = 1 if config.factors == "pooled" else n, None if config.grows else config.room
    half = config.pair_dtype == torch.float16
    kept, pair, f64, i64 = config.dtype, config.pair_dtype, torch.float64, torch.int64
    count = ("0 or more", _within(0, MOST))
    finite = ("finite", _within(-math.inf, math.inf, closed=False))
    entries = {
        "models": Entry((config.max_staleness + 2, d), kept, *finite),
        "last_updates": Entry((n, d), kept, *finite),
        "last_models": Entry((n, d), kept, *finite),
        "dw": Entry((n, m, d), pair, *finite),
        "dg": Entry((n, m, d), pair, *finite),
        "pairs": Entry((n,), i64, f"0 to {m}", _within(0, m)),
        "seen": Entry((n,), torch.bool, "0 or 1", lambda t: _within(0, 1)(t.contiguous().view(torch.uint8))),
        "factors": Entry((lists, room), f64, "0 or more, not NaN", _within(0, math.inf)),
        "recorded": Entry((lists,), i64, *count),
        "counts": Entry((len(COUNTS),), i64, *count),
        "turns": Entry((n,), i64, *count),
    }
    if config.row_wise:
        entries |= {
            "products": Entry((n, n), f64, "symmetric, and finite where no update is too long", _products),
            "centre": Entry((d,), kept, *finite),
            "rounds": Entry((), i64, *count),
        }
    else:  # near the largest float products may leave the floats: the correction is given up then
        anything = ("numbers", lambda t: True)
        entries |= {
            "oldest": Entry((n,), i64, f"0 to {max(m - 1, 0)}", _within(0, max(m - 1, 0))),
            "scales": Entry((n, 2 * m), torch.float32, "powers of two" if half else "1", _powers if half else _ones),
            "gram": Entry((n, m * (2 * m + 1)), f64, *anything),
            "along": Entry((n, 2 * m + 2), f64, *anything),
            "weights": Entry((n, 2 * m + 2), torch.float32, "not NaN", _within(-math.inf, math.inf)),
            "status": Entry((n,), torch.int32, f"0 to {len(ops.STATUS) - 1}", _within(0, len(ops.STATUS) - 1)),
        }
    if config.rule == "kinship":
        entries |= {
            "kinship": Entry((n, n), f64, "symmetric and finite", lambda t: _symmetric(t) and finite[1](t)),
            "met": Entry((n,), i64, *count),
            "kin_centre": Entry((n,), f64, "finite, 0 or more", lambda t: _within(0, math.inf)(t) and finite[1](t)),
        }
    return entries


def check(who: str, state: Mapping, config: Config, clients: int, size: int) -> dict[str, Tensor | int]:
    """The state, its numbers plain ones, if a server of these settings can go on from it; else an error in words."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{who}: state must be a dict, got {type(state).__name__}")
    entries = table(config, clients, size)
    missing = required(config, entries) - set(state)
    if missing:
        raise ValueError(f"{who}: state must have {', '.join(sorted(missing))}, got none")
    unknown = [repr(name)[:40] for name in state if name not in entries and name not in NUMBERS]
    if unknown:
        raise ValueError(f"{who}: state must have nothing but what such a server knows, got {', '.join(unknown[:5])}")
    numbers = {name: _count(who, name, state[name]) for name in NUMBERS}
    tensors = {name: state[name] for name in entries if name in state}
    for name, tensor in tensors.items():
        _check_shape(who, name, tensor, entries[name])
    for name, tensor in tensors.items():
        if not entries[name].holds(tensor):
            raise ValueError(f"{who}: {name} must be {entries[name].words}, got other values")
    _check_factors(who, tensors["factors"], tensors["recorded"], config, numbers["version"])
    if int(tensors["turns"].max()) > numbers["version"]:
        raise ValueError(f"{who}: turns must be at most the version, {numbers['version']}, got other values")
    return {**{name: tensor.detach() for name, tensor in tensors.items()}, **numbers}


def described(who: str, tensors: Mapping, about: object) -> tuple[int, dict, torch.dtype, dict[str, Tensor | int]]:
    """(clients, settings, dtype of the model, state) of a file, if its header and its tensors go together.

    Before a server is made: the tensors are in memory already, and nothing larger will be asked for.
    """
    kinds = {"config": dict, "clients": int, "dtype": str, "state": dict}
    if {name: type(value) for name, value in about.items()} != kinds:
        raise ValueError(f"{who}: header must have {', '.join(kinds)}, got {', '.join(map(str, about))[:80] or 'none'}")
    tensors, about = _upgraded(tensors, about)
    unknown = [name[:40] for name in about["config"] if name not in CHECKS]
    if unknown:
        raise ValueError(f"{who}: config must have the settings of this version, got also {', '.join(unknown[:5])}")
    config, clients = Config(**about["config"]), about["clients"]
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(about["dtype"])
    if dtype is None:
        raise ValueError(f"{who}: dtype must be float32 or float64, got {about['dtype'][:40]!r}")
    models = tensors.get("models")
    if models is None or models.dim() != 2:
        raise ValueError(f"{who}: models must be (rows, d), got {describe(models)}")
    both = set(tensors) & set(about["state"])
    if both:
        raise ValueError(f"{who}: state must have each name once, got {', '.join(sorted(both))} twice")
    state = check(who, {**tensors, **about["state"]}, config, clients, models.shape[1])
    return clients, asdict(config), dtype, state


def _upgraded(tensors: Mapping, about: dict) -> tuple[Mapping, dict]:
    """Files of formats 1 and 2 know neither these settings, so that their server was the paper's, nor turns."""
    if "factors" in about["config"]:
        return tensors, about
    tensors = {name: t[None] if name in ("factors", "recorded") else t for name, t in tensors.items()}
    if isinstance(tensors.get("pairs"), Tensor):
        tensors["turns"] = torch.zeros(len(tensors["pairs"].view(-1)), dtype=torch.int64)
    config = {"factors": "pooled", "on_reject": "step", **about["config"]}
    return tensors, {**about, "config": config, "state": {"too_soon": 0, **about["state"]}}


def required(config: Config, entries: Mapping[str, Entry]) -> set[str]:
    """Float16 pairs mean nothing without their scales."""
    optional = set(CARRIED) - ({"scales"} if config.pair_dtype == torch.float16 else set())
    return {*entries, *NUMBERS} - optional


def _count(who: str, name: str, value: object) -> int:
    return converted(who, name, value, whole, "a whole number, 0 or more, at most 2**53", lambda number: number >= 0)


def _check_shape(who: str, name: str, tensor: Tensor, entry: Entry) -> None:
    fits = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta"
    fits = fits and tensor.dtype == entry.dtype and tensor.dim() == len(entry.shape)
    if not fits or any(want not in (None, got) for want, got in zip(entry.shape, tensor.shape, strict=True)):
        lengths = ", ".join("any" if length is None else str(length) for length in entry.shape)
        shape = f"({lengths},)" if len(entry.shape) == 1 else f"({lengths})"
        raise ValueError(f"{who}: {name} must be {shape} {name_of(entry.dtype)}, got {describe(tensor)}")


def _check_factors(who: str, factors: Tensor, recorded: Tensor, config: Config, version: int) -> None:
    """Q: its first places are taken, as many as were recorded, and the others are inf."""
    room = factors.shape[-1]
    # Q grows with version: a number that no room came with would take memory at the next round.
    if room < 1 or (config.grows and version > room):
        raise ValueError(f"{who}: factors must have room for {max(version, 1)} rounds, got {room}")
    taken = torch.arange(room, device=recorded.device) < recorded[..., None]
    if not torch.equal(factors.isfinite().to(taken.device), taken.expand(factors.shape)):
        raise ValueError(f"{who}: factors must be finite as far as recorded says, then inf, got other values")


def _within(low: float, high: float, closed: bool = True) -> Callable[[Tensor], bool]:
    """Whether all values lie there; NaN lies nowhere. Takes no memory: a history may fill most of it."""

    def holds(tensor: Tensor) -> bool:
        if not tensor.numel():
            return True
        least, most = (value.item() for value in tensor.detach().aminmax())
        return low <= least and most <= high if closed else low < least and most < high

    return holds


def _ones(tensor: Tensor) -> bool:
    return _within(1, 1)(tensor)


def _powers(tensor: Tensor) -> bool:
    """float16 pairs are scaled by 2^-100 to 2^113 (csrc/round/judge.h)."""
    return _within(2.0**-100, 2.0**113)(tensor) and _within(0.5, 0.5)(tensor.frexp().mantissa)


def _symmetric(tensor: Tensor) -> bool:
    return bool(((tensor == tensor.T) | (tensor.isnan() & tensor.T.isnan())).all())


def _products(tensor: Tensor) -> bool:
    """A square of a float64 update may be inf, its products NaN. A rule leaves such a row out."""
    squares = tensor.diagonal()
    short = squares <= LONGEST
    usual = tensor.isfinite() | ~short[:, None] | ~short
    return bool(usual.all()) and bool((squares >= 0).all()) and _symmetric(tensor)
