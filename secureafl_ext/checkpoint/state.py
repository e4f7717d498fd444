"""Checks of a server's state: one table entry per tensor, and how the entries fit together.

A state may come from an untrusted file. The kernels use pairs, oldest and recorded as indices without a check, so a
state that does not match this table is refused before anything changes. Every state that a server produces must pass:
the bounds below hold after any rounds, also after updates near the largest float.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..config import CHECKS, COUNTS, GONE, Config, is_rule
from ..engines.averaged import LAST_NAMES, has_basis
from ..engines.factor_counts import COLUMNS, ROWS
from ..engines.fused import CARRIED
from ..engines.quantile import split_factors
from ..engines.trials import COLUMNS as TRIAL_COLUMNS
from ..engines.trials import LEFT, WHOLE
from ..rules.mean_steps import SPAN
from ..rules.row_rules import MAX_SQUARE
from ..rules.support import STAGES
from ..validation import LAST, MOST, converted, describe, is_fake, name_of, shown, whole
from .upgrade import FROM_SEEN, upgraded_file, upgraded_state
from .values import (
    LARGEST_MEAN,
    as_long,
    dense,
    not_negative,
    ones,
    orthogonal,
    powers,
    products,
    short_products,
    symmetric,
    units,
    within,
)

NUMBERS = ("version", "stale", "too_soon")  # of a state; the rest are tensors


@dataclass(frozen=True)
class Entry:
    shape: tuple[int | None, ...]  # None: any length
    dtype: torch.dtype
    expected: str  # for the error message
    holds: Callable[[Tensor], bool]


@dataclass(frozen=True)
class Checkpoint:
    """The checked contents of a checkpoint file."""

    config: Config
    clients: int
    size: int  # d
    dtype: torch.dtype  # of the model
    state: dict[str, Tensor | int]


def table(config: Config, clients: int, size: int) -> dict[str, Entry]:
    """Every tensor that a state of these settings may have."""
    n, m, d = clients, config.memory, size
    lists, room = 1 if config.factors == "pooled" else n, config.room
    half = config.pair_dtype == torch.float16
    kept, pair, f64, i64 = config.dtype, config.pair_dtype, torch.float64, torch.int64
    count = ("0 or more", within(0, MOST))
    finite = ("finite", within(-math.inf, math.inf, closed=False))
    sketches = {
        "update_sketches": Entry((n, config.sketch), kept, *finite),
        "model_sketches": Entry((n, config.sketch), kept, *finite),
    }
    whole_updates = {
        "last_updates": Entry((n, d), kept, *finite),
        "last_models": Entry((n, d), kept, *finite),
        "dw": Entry((n, m, d), pair, *finite),
        "dg": Entry((n, m, d), pair, *finite),
        "pairs": Entry((n,), i64, f"0 to {m}", within(0, m)),
    }
    kept_updates = sketches if config.sketch else whole_updates
    entries = {
        "models": Entry((config.max_staleness + 2, d), kept, *finite),
        **{name: entry for name, entry in kept_updates.items() if config.keeps_last or name not in LAST_NAMES},
        "seen": Entry((n,), torch.bool, "0 or 1", lambda t: within(0, 1)(t.contiguous().view(torch.uint8))),
        "factors": Entry((lists, room), f64, "0 or more, not NaN", within(0, math.inf)),
        "recorded": Entry((lists,), i64, *count),
        "counts": Entry((len(COUNTS),), i64, "0 or more", within(0, math.inf)),
        "turns": Entry((n,), i64, *count),
        "clock": Entry((3,), i64, "0 or more, and 0 or 1 at the end", lambda t: count[1](t) and int(t[2]) <= 1),
        "last_epoch": Entry((n,), i64, "-1 or more", within(GONE, MOST)),
        "uploads": Entry((n, 3), i64, *count),
    }
    if config.trial:
        entries["trials"] = Entry((n + 1, TRIAL_COLUMNS), i64, f"{LEFT} or more", within(LEFT, MOST))
    if config.keeps_all:
        entries["factor_counts"] = Entry((1 + ROWS, COLUMNS), i64, *count)
    if config.averaging:
        width = config.sketch or d
        # A bucket has at most d / k coordinates of an update of length 1 or less. Twice that: rounding.
        most = 2 * math.ceil(d / max(width, 1)) ** 0.5
        means = Entry((n, width), kept, f"between -{most:.3g} and {most:.3g}", within(-most, most))
        mean_updates = Entry((n, d), config.mean_dtype, "rows of length 1 at most", units)
        entries |= {
            "rounds": Entry((), i64, *count),
            **({"means": means} if config.sketch else {"mean_updates": mean_updates}),
            "norms": Entry((n,), f64, "finite, 0 or more", not_negative),
            "shift": Entry((n,), f64, *finite),
        }
        if config.averages == "steps":
            entries["total"] = Entry((n,), f64, f"0 to {SPAN}", within(0, SPAN))
            entries["noise"] = Entry((n,), f64, "0 to 1", within(0, 1))
            if has_basis(config, n):
                entries["basis"] = Entry((STAGES, n, n), f64, "orthogonal", orthogonal)
        else:
            entries |= {"squares": Entry((n,), f64, *finite), "met": Entry((n,), i64, *count)}
        if config.sketch:  # not in the message: it is a secret
            of_this_server = "the seed of this server", lambda t: int(t) == config.sketch_seed
            entries["sketch_seed"] = Entry((), i64, *of_this_server)
        return entries
    if config.row_wise:
        entries |= {
            "products": (
                Entry((n, n), f64, "symmetric, and finite where no update is too long", products)
                if kept == f64
                else Entry((n, n), f64, f"symmetric and finite, the squares at most {MAX_SQUARE:g}", short_products)
            ),
            "centre": Entry((d,), kept, *finite),
            "rounds": Entry((), i64, *count),
        }
    else:  # products of huge updates may overflow; the round then gives up the correction
        anything: tuple[str, Callable[[Tensor], bool]] = ("numbers", lambda t: True)
        entries |= {
            "oldest": Entry((n,), i64, f"0 to {max(m - 1, 0)}", within(0, max(m - 1, 0))),
            "scales": Entry((n, 2 * m), torch.float32, "powers of two" if half else "1", powers if half else ones),
            "gram": Entry((n, m * (2 * m + 1)), f64, *anything),
            "along": Entry((n, 2 * m + 2), f64, *anything),
            "weights": Entry((n, 2 * m + 2), torch.float32, "not NaN", within(-math.inf, math.inf)),
            "status": Entry((n,), torch.int32, f"0 to {len(ops.STATUS) - 1}", within(0, len(ops.STATUS) - 1)),
        }
    mean_products = (
        f"symmetric, between -{LARGEST_MEAN:g} and {LARGEST_MEAN:g}",
        lambda t: symmetric(t) and within(-LARGEST_MEAN, LARGEST_MEAN)(t),
    )
    if config.rule == "kinship":
        entries |= {
            "kinship": Entry((n, n), f64, *mean_products),
            "met": Entry((n,), i64, *count),
            "kin_centre": Entry((n,), f64, "0 to 1", within(0, 1)),
        }
    if config.rule == "support":
        entries |= {
            "similarity": Entry((n, n), f64, *mean_products),
            "met": Entry((n,), i64, *count),
            "basis": Entry((STAGES, n, n), f64, "orthogonal", orthogonal),
            "shift": Entry((n,), f64, *finite),
        }
    return entries


def check(
    caller: str, state: Mapping[str, Any], config: Config, clients: int, size: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """(tensors, numbers) of a state if a server with these settings can continue from it; otherwise a ValueError."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{caller}: state must be a dict, got {type(state).__name__}")
    entries = table(config, clients, size)
    state = upgraded_state(state, config, clients)
    listed = config.keeps_all and "factor_counts" not in state  # by an earlier version: a list of all factors
    if listed:
        del entries["factor_counts"]
        entries["factors"] = replace(entries["factors"], shape=(1, None))
    missing = required(config, entries) - set(state)
    if missing & FROM_SEEN and "seen" in state:  # they may be missing because `seen` is wrong
        _check_shape(caller, "seen", state["seen"], entries["seen"])
    if missing:
        raise ValueError(f"{caller}: state must have {', '.join(sorted(missing))}, got none")
    unknown = [repr(name)[:40] for name in state if name not in entries and name not in NUMBERS]
    if unknown:
        raise ValueError(
            f"{caller}: state must have no other names than {', '.join(entries)}, got {', '.join(unknown[:5])}"
        )
    numbers = {name: _count(caller, name, state[name]) for name in NUMBERS}
    tensors = {name: state[name] for name in entries if name in state}
    for name, tensor in tensors.items():
        _check_shape(caller, name, tensor, entries[name])
    for name, tensor in tensors.items():
        if not entries[name].holds(tensor):
            raise ValueError(f"{caller}: {name} must be {entries[name].expected}, got other values")
    if listed:
        tensors["factors"], tensors["factor_counts"] = split_factors(tensors["factors"].detach(), config.room)
    _check_factors(caller, tensors["factors"], tensors["recorded"])
    if config.keeps_all:
        _check_counts(caller, tensors["factor_counts"], max(int(tensors["recorded"]) - config.room, 0))
    _check_rounds(caller, tensors, numbers["version"], clients)
    kept = config.estimate and not (config.memory and config.trust)  # otherwise no round reads or changes `products`
    if kept and "products" in tensors and not as_long(tensors["last_updates"], tensors["products"].diagonal()):
        raise ValueError(f"{caller}: products must have the squares of last_updates, got smaller ones")
    latest = int(tensors["turns"].max())
    if latest > numbers["version"]:
        raise ValueError(f"{caller}: turns must be at most the version, {numbers['version']}, got {latest}")
    _check_presence(caller, tensors)
    if config.trial:
        _check_trials(caller, tensors["trials"], config.trial, numbers["version"])
    return {name: tensor.detach() for name, tensor in tensors.items()}, numbers


def described(caller: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Checkpoint:
    """The contents of a file, if its header and its tensors fit together.

    No server exists yet: the tensors are in memory already, and this allocates nothing larger.
    """
    kinds = {"config": dict, "clients": int, "dtype": str, "state": dict}
    if about.keys() != kinds.keys():
        got = ", ".join(map(str, about))[:80] or "none"
        raise ValueError(f"{caller}: header must have {', '.join(kinds)}, got {got}")
    expected = {dict: "an object", str: "a text", int: "a whole number, 1 or more"}
    for name, kind in kinds.items():
        if type(about[name]) is not kind or (name == "clients" and about[name] < 1):
            raise ValueError(f"{caller}: {name} must be {expected[kind]}, got {shown(about[name])}")
    tensors, about = upgraded_file(tensors, about)
    unknown = [name[:40] for name in about["config"] if name not in CHECKS]
    if unknown:
        raise ValueError(f"{caller}: config must have the settings of this version, got also {', '.join(unknown[:5])}")
    rule = about["config"].get("rule", Config.rule)
    if isinstance(rule, str) and not is_rule(rule):
        how = "install its package or call secureafl_ext.rules.register_rule before load"
        raise ValueError(f"{caller}: the server has rule={shown(rule)}, which is not registered here; {how}")
    config, clients = Config(**about["config"]), about["clients"]
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(about["dtype"])
    if dtype is None:
        raise ValueError(f"{caller}: dtype must be float32 or float64, got {about['dtype'][:40]!r}")
    models = tensors.get("models")
    if models is None or models.dim() != 2:
        raise ValueError(f"{caller}: models must be (rows, d), got {describe(models)}")
    both = set(tensors) & set(about["state"])
    if both:
        raise ValueError(f"{caller}: state must have each name once, got {', '.join(sorted(both))} twice")
    size = models.shape[1]
    checked, numbers = check(caller, {**tensors, **about["state"]}, config, clients, size)
    return Checkpoint(config, clients, size, dtype, {**checked, **numbers})


def required(config: Config, entries: Mapping[str, Entry]) -> set[str]:
    """Names that a state must have. Those of CARRIED may be missing, as Fused can compute them; but float16 pairs
    cannot be read without their scales."""
    optional = set(CARRIED) - ({"scales"} if config.pair_dtype == torch.float16 else set())
    return {*entries, *NUMBERS} - optional


def _count(caller: str, name: str, value: object) -> int:
    most = LAST if name == "version" else MOST
    expected = f"a whole number, 0 or more, at most 2**{most.bit_length() - 1}"
    return converted(caller, name, value, whole, expected, lambda number: 0 <= number <= most)


def _check_rounds(caller: str, tensors: Mapping[str, Tensor], version: int, clients: int) -> None:
    """Bound every counter by LAST + version; those in `counts` by LAST + version * clients.

    A round raises a counter by at most as much as it raises its bound. So a server that continues from a state that
    passes makes states that pass.
    """
    for name in ("recorded", "counts", "clock", "last_epoch", "uploads", "rounds", "met"):
        most = LAST + version * (clients if name == "counts" else 1)
        got = int(tensors[name].max()) if name in tensors else 0
        if got > most:
            raise ValueError(f"{caller}: {name} must be at most {most} at version {version}, got {got}")


def _check_shape(caller: str, name: str, tensor: Tensor, entry: Entry) -> None:
    fits = dense(tensor) and tensor.dtype == entry.dtype and tensor.dim() == len(entry.shape)
    if not fits or any(want not in (None, got) for want, got in zip(entry.shape, tensor.shape, strict=True)):
        lengths = ", ".join("any" if length is None else str(length) for length in entry.shape)
        shape = f"({lengths},)" if len(entry.shape) == 1 else f"({lengths})"
        is_tensor = isinstance(tensor, Tensor)
        place = " on meta" if is_tensor and tensor.is_meta else " without values" * (is_tensor and is_fake(tensor))
        raise ValueError(f"{caller}: {name} must be {shape} {name_of(entry.dtype)}, got {describe(tensor)}{place}")


def _check_factors(caller: str, factors: Tensor, recorded: Tensor) -> None:
    """Q: the first `recorded` places of a list are finite, and the others are inf."""
    taken = torch.arange(factors.shape[-1], device=recorded.device) < recorded[..., None]
    if not torch.equal(factors.isfinite().to(taken.device), taken.expand(factors.shape)):
        raise ValueError(f"{caller}: factors must be `recorded` finite values per list, then inf, got other values")


def _check_counts(caller: str, counts: Tensor, counted: int) -> None:
    """The counts of Q: row 0 has the sums of the others, `counted` in all."""
    sums = counts[1:].sum(1, dtype=torch.float64)  # exact up to 2^53, and no overflow
    if not torch.equal(counts[0].double(), torch.nn.functional.pad(sums, (0, counts.shape[1] - len(sums)))):
        raise ValueError(f"{caller}: factor_counts must have the sums of its rows in row 0, got other values")
    if float(sums.sum()) != counted:
        raise ValueError(f"{caller}: factor_counts must count {counted} factors, got {float(sums.sum()):.0f}")


def _check_presence(caller: str, tensors: Mapping[str, Tensor]) -> None:
    """No client has uploaded in a future epoch, and clients without a history have no uploads."""
    epoch, latest = int(tensors["clock"][0]), int(tensors["last_epoch"].max())
    if latest > epoch:
        raise ValueError(f"{caller}: last_epoch must be at most the epoch of clock, {epoch}, got {latest}")
    unseen = ~tensors["seen"].cpu()
    for name in ("uploads", "last_epoch"):
        if (tensors[name].cpu()[unseen] > 0).any():
            raise ValueError(f"{caller}: {name} must be 0 or less for clients that are not seen, got other values")


def _check_trials(caller: str, trials: Tensor, epochs: int, version: int) -> None:
    """No epoch after the clock's, no more epochs than have passed, and no trial that is longer than the setting."""
    (epoch, rounds, founded, usual), clients = trials[0].tolist(), trials[1:]
    latest = max(founded, int(clients[:, :2].max()), int(clients[:, 2].max()) - 1)  # that one has not ended
    longest = int(clients[:, 3].max())
    if not latest <= epoch <= version:
        raise ValueError(f"{caller}: trials must end at the clock's epoch, {epoch}, at most {version}, got {latest}")
    if rounds < 0 or longest > epochs or int(clients[:, 2:].min()) < 0:
        raise ValueError(f"{caller}: trials must last 0 to {epochs} epochs, got {longest}")
    if not 0 <= usual <= WHOLE:
        raise ValueError(f"{caller}: the usual progress of trials must lie in 0 to {WHOLE}, got {usual}")
