"""Kinds of damage to a state, each to one name, that nobody should take; and what a checkpoint says of itself."""

import json
import math

import torch
from safetensors import safe_open
from safetensors.torch import load

HUGE = 2**62


def put(name, value):
    """One value of that tensor becomes another."""

    def damaged(state):
        tensor = state[name].clone()
        tensor.view(-1)[-1] = value
        return {**state, name: tensor}

    return damaged


def swap(name, change):
    return lambda state: {**state, name: change(state[name])}


def drop(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


def byte_two(tensor):
    tensor = tensor.clone()
    tensor.view(torch.uint8)[0] = 2
    return tensor


def count_zero(counts):
    counts = counts.clone()
    counts[:2, 0] += 1
    return counts


FLOATS = ("models", "last_updates", "last_models", "dw", "dg", "centre", "kinship", "kin_centre", "similarity", "shift")
WHOLE = (
    "pairs", "oldest", "recorded", "factor_counts", "counts", "turns", "rounds", "met", "clock", "last_epoch",
    "uploads", "trials",
)  # fmt: skip
WORKED_OUT = ("factor_counts", "trials", "gram", "along", "weights", "status")  # if they are missing
TENSORS = (*FLOATS, *WHOLE, "seen", "factors", "scales", "gram", "along", "weights", "status", "products", "basis")
DAMAGE = {
    **{f"{name} {value}": (name, put(name, value)) for name in FLOATS for value in (math.nan, math.inf, -math.inf)},
    **{f"{name} {value}": (name, put(name, value)) for name in WHOLE for value in (-2, -HUGE)},
    **{f"{name} {value}": (name, put(name, value)) for name in ("pairs", "oldest") for value in (4, 10**6, HUGE)},
    **{f"{name} too large": (name, put(name, HUGE)) for name in WHOLE[2:]},
    **{f"{name} missing": (name, drop(name)) for name in TENSORS if name not in WORKED_OUT},
    **{f"{name} a row more": (name, swap(name, lambda t: torch.cat([t[None], t[None]]))) for name in TENSORS},
    **{f"{name} another dtype": (name, swap(name, lambda t: t.to(torch.int8))) for name in TENSORS},
    **{f"{name} a list": (name, swap(name, torch.Tensor.tolist)) for name in TENSORS},
    **{f"{name} without values": (name, swap(name, lambda t: t.to("meta"))) for name in TENSORS},
    **{f"status {value}": ("status", put("status", value)) for value in (-1, 5, 2**30)},
    **{f"scales {value}": ("scales", put("scales", value)) for value in (0.0, -1.0, 3.0, math.nan, math.inf)},
    **{f"factors {value}": ("factors", put("factors", value)) for value in (-1.0, math.nan, -math.inf, 0.5)},
    "factors inf within": ("factors", swap("factors", lambda t: torch.full_like(t, math.inf))),
    "factors empty": ("factors", swap("factors", lambda t: t[..., :0])),
    "recorded one more": ("factors", swap("recorded", lambda t: t + 1)),
    "factor_counts one more": ("factor_counts", put("factor_counts", 1)),
    "factor_counts one more in both rows": ("factor_counts", swap("factor_counts", count_zero)),
    "clock 2": ("clock", put("clock", 2)),
    "last_epoch to come": ("last_epoch", swap("last_epoch", lambda t: t + 10**6)),
    "uploads of a stranger": ("uploads", swap("seen", torch.zeros_like)),
    "weights nan": ("weights", put("weights", math.nan)),
    "seen 2": ("seen", swap("seen", byte_two)),
    "products one-sided": ("products", put("products", -1.0)),
    "products not symmetric": ("products", swap("products", lambda t: t + torch.ones_like(t).triu(1))),
    "products nan": ("products", swap("products", lambda t: torch.full_like(t, math.nan).fill_diagonal_(1))),
    "products nan square": ("products", put("products", math.nan)),
    **{
        f"{name} not symmetric": (name, swap(name, lambda t: t + torch.ones_like(t).triu(1)))
        for name in ("kinship", "similarity")
    },
    **{f"basis {value}": ("basis", put("basis", value)) for value in (math.nan, math.inf, 2.0)},
    "basis longer": ("basis", swap("basis", lambda t: 1.001 * t)),
    "basis of zeros": ("basis", swap("basis", torch.zeros_like)),
    "basis the same column twice": ("basis", swap("basis", lambda t: t[..., :1].expand_as(t).contiguous())),
    **{
        f"{name} {value!r}"[:40]: (name, lambda state, name=name, value=value: {**state, name: value})
        for name in ("version", "stale", "too_soon")
        for value in (-3, 1.5, True, None, "7", 2**60, math.nan, 10**400, [1])
    },
    "version missing": ("version", drop("version")),
    "an unknown name": ("gift", lambda state: {**state, "gift": torch.zeros(1)}),
    "a name that is no text": ("7", lambda state: {**state, 7: torch.zeros(1)}),
}


def damages(state, config):
    """(name, words that the refusal must have, the damaged state) of every kind that this state can have."""
    for kind, (name, damaged) in DAMAGE.items():
        if isinstance(state.get(name), torch.Tensor) and not state[name].numel():
            continue  # without pairs nothing of them can be wrong
        if name not in state and name in TENSORS:
            continue
        if kind in ("recorded one more", "factors 0.5") and config.window:
            continue  # a ring goes round
        if kind == "oldest missing" or (kind == "scales missing" and config.history_dtype != "float16"):
            continue  # worked out anew
        if kind in ("pairs 4", "oldest 4") and config.memory > 4 - (kind == "pairs 4"):
            continue
        if kind == "products nan" and len(state["pairs"]) == 1:
            continue  # there are no two clients
        bad = damaged(state)
        if bad.keys() == state.keys() and all(_equal(bad[key], state[key]) for key in state):
            continue  # no damage here: one client, an empty Q, a product so large that 1 is lost in it
        yield kind, name, bad


def _equal(one, other):
    if one is other:
        return True
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if not both or (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def described(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["secureafl"])


def tensors_of(path):
    return load(path.read_bytes())  # not mapped: the file may be written over


def split(data):
    """(header, the rest) of a checkpoint's bytes."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]
