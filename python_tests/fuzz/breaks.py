"""Ways to break a call that would succeed. Each gives the arguments that it changes, or None where it cannot.

What only a tensor's values say is refused on the CPU, and clamped on a GPU, whose host does not read them.
"""

import math
import struct
from collections.abc import Callable

import torch
from fuzz.dice import Call, Dice, names_of
from torch import Tensor

HUGE = (2**62, 2**63 - 1, -(2**63), -(2**40))
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool,
    torch.complex64, torch.int8,
)  # fmt: skip
ALSO_FLOATS = {"updates": DTYPES[:4], "slots": (torch.float16, torch.float32), "like": DTYPES}
READ_ONLY = ("update", "trained_on")
STATE_OPS = (
    "step_", "apply_", "renew_", "settle_", "refresh_", "kin_step_", "support_step_", "mean_step_", "row_step_",
    "sketch_step_", "update_sums",
)  # fmt: skip
# Lengths that no other argument fixes, by op and argument.
FREE = {
    "models": (0,), "seen_factors": (1,), "like": (0,),
    ("median", "updates"): (1,), ("trimmed_mean", "updates"): (1,),
    ("update_sums", "last"): (2, 3), ("settle_", "changes"): (1,),
}  # fmt: skip
Changes = dict[str, object] | None
BAD_FLOATS = {
    "lr": (math.nan, math.inf, -math.inf),
    "quantile": (math.nan, -0.1, 1.1, math.inf, -math.inf),
    "max_norm": (math.nan, 0.0, -1.0, -math.inf),
    "trust": (math.nan, -0.5, -math.inf),
    "remove": (math.nan, -0.1, 1.0, math.inf),
    "radius": (math.nan,),
    "least_share": (math.nan, 0.0, -0.1, 1.1),
    "noisy": (math.nan, 0.0, 1.0, math.inf),
}
RULES = ("", "Median", "Krum", "median ", "mean\0", "x" * 10_000, "médian")


def tensors_of(call: Call) -> list[str]:
    return [name for name in names_of(call.op) if isinstance(call.args[name], Tensor)]


def another_dtype(call: Call, dice: Dice) -> Changes:
    name = dice.choice(tensors_of(call))
    tensor = call.args[name]
    others = [dtype for dtype in DTYPES if dtype not in (tensor.dtype, *ALSO_FLOATS.get(name, ()))]
    return {name: torch.zeros(tensor.shape, dtype=dice.choice(others), device=tensor.device)} if others else None


def another_shape(call: Call, dice: Dice) -> Changes:
    name = dice.choice(tensors_of(call))
    tensor = call.args[name]
    if name == "like":
        return None
    if dice.chance(0.3) or tensor.dim() == 0:
        return {name: tensor[None] if dice.chance(0.5) or tensor.dim() < 2 else tensor.reshape(-1)}
    free = (*FREE.get(name, ()), *FREE.get((call.op, name), ()))
    if name == "updates" and call.args["mask"] is None:
        return None
    bound = [dim for dim in range(tensor.dim()) if dim not in free]
    if not bound:
        return None
    dim, shape = dice.choice(bound), list(tensor.shape)
    fits = {shape[dim]} | ({0} if name == "factor_counts" else set())  # which may have no rows
    shape[dim] = dice.choice([size for size in (0, 1, shape[dim] + 1, 2 * shape[dim], 4097) if size not in fits])
    if math.prod(shape) > 10**6:
        return None
    return {name: torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)}


def strides(call: Call, dice: Dice) -> Changes:
    """State that is written in place must be contiguous; no value may lie in two places either."""
    if call.op not in STATE_OPS:
        return None
    names = [name for name in tensors_of(call) if name not in READ_ONLY and call.args[name].numel() > 1]
    if not names:
        return None
    name = dice.choice(names)
    tensor = call.args[name]
    if dice.chance(0.5):
        return {name: torch.stack([tensor, tensor], -1)[..., 0]}
    return {name: tensor.reshape(-1)[:1].expand(tensor.numel()).as_strided(tensor.shape, [0] * tensor.dim())}


def a_number(call: Call, dice: Dice) -> Changes:
    name = dice.choice(names_of(call.op))
    args, facts = call.args, call.facts
    if name in BAD_FLOATS:
        return {name: dice.choice(BAD_FLOATS[name])}
    match name:
        case "rule":
            return {name: dice.choice(RULES)}
        case "trim" if call.op == "trimmed_mean":
            return {name: dice.choice((-1, (facts["kept"] + 1) // 2 if args["mask"] is None else facts["n"], *HUGE))}
        case "trim" if call.op in ("step_", "apply_"):
            return {name: dice.choice((-1, -7, -(2**63)))}
        case "trim":
            return {"rule": "trimmed_mean", name: dice.choice((-1, (facts["n"] + 1) // 2, *HUGE))}
        case "client" if not isinstance(args[name], Tensor):
            return {name: dice.choice((-1, facts["n"], *HUGE))}
        case "now_row" | "next_row":
            return {name: dice.choice((-1, len(args["models"]), *HUGE))}
        case "expiry":
            return {name: dice.choice((0, -1, *HUGE[2:]))}
        case "probation":
            return {name: dice.choice((-1, *HUGE[2:]))}
        case "quorum":
            return {name: dice.choice((-1, facts["n"] + 1, *HUGE))}
        case "span" | "every" | "iterations":
            return {name: dice.choice((0, -1, 2**31, *HUGE))}
        case "tiles":
            return {name: dice.choice((-1, 2**31, *HUGE))}
        case "clients":
            return {name: dice.choice((0, -1, 4097, *HUGE))}
        case "pairs" if not isinstance(args[name], Tensor):
            return {name: dice.choice((-1, 17, *HUGE))}
    return None


def same_row(call: Call, dice: Dice) -> Changes:
    """The next model's row is one that is read."""
    if "next_row" not in call.args or call.op in ("renew_", "settle_", "refresh_", "update_sums"):
        return None
    if dice.chance(0.5):
        return {"next_row": call.args["now_row"]}
    return {dice.choice(READ_ONLY): call.args["models"][call.args["next_row"]]} if call.facts["d"] else None


def lists(call: Call, dice: Dice) -> Changes:
    """Q has one list or one of each client, and room."""
    if "seen_factors" not in names_of(call.op):
        return None
    n, old = call.facts["n"], call.args["seen_factors"]
    shape = dice.choice(((n + 1, 4), (0, 4), (1, 0), (n, 0), (2 * n + 1, 1)))
    changes = {"seen_factors": torch.zeros(shape, dtype=old.dtype, device=old.device)}
    return changes | {"recorded": torch.zeros(shape[0], dtype=torch.int64, device=old.device)}


def another_device(call: Call, dice: Dice) -> Changes:
    names = tensors_of(call)
    name = dice.choice(names)
    return {name: call.args[name].cpu()} if len(names) > 1 and call.args[name].is_cuda else None


def a_value(call: Call, dice: Dice) -> Changes:
    """A number inside a tensor that is a place in another one."""
    n, m = call.facts.get("n", 0), call.facts.get("m", 0)
    bad = {
        "pairs": (-1, m + 1, *HUGE), "oldest": (-1, max(m, 1), *HUGE), "client": (-1, n, *HUGE), "met": (-1, *HUGE[1:]),
        "recorded": (-1, *HUGE[1:]), "clock": (-1, *HUGE[1:]), "uploads": (-1, *HUGE[1:]), "last_epoch": (-2, *HUGE),
        "places": (-1 - call.facts.get("d", 0), call.facts.get("d", 0)),
    }  # fmt: skip
    names = [name for name in bad if name in tensors_of(call) and call.args[name].numel()]
    names += ["verdict"] if call.op in ("renew_", "settle_", "step_") else []
    if not names:
        return None
    name = dice.choice(names)
    if name == "verdict":
        return {name: _verdict(call, dice)}
    tensor = call.args[name].clone(memory_format=torch.contiguous_format)
    place = dice.randrange(tensor.numel())
    if call.op in ("aggregate", "aggregate_status"):  # of the others nothing is looked at
        if not call.facts["wanted"]:
            return None
        place = dice.choice(call.facts["wanted"])
    tensor.view(-1)[place] = dice.choice(bad[name])
    return {name: tensor}


def _verdict(call: Call, dice: Dice) -> Tensor:
    data = bytearray(call.args["verdict"].cpu().numpy().tobytes())
    at, most = dice.choice(((0, call.facts["n"]), (20, max(call.facts["m"], 1))))  # its client, its slot
    struct.pack_into("i", data, 28, 1)  # pending
    struct.pack_into("i", data, at, dice.choice((-1, most, 2**31 - 1, -(2**31))))
    return torch.tensor(list(data), dtype=torch.uint8, device=call.args["verdict"].device)


def too_few_rows(call: Call, dice: Dice) -> Changes:
    """A mask that leaves no row behind the trim."""
    if call.op != "trimmed_mean" or call.args["mask"] is None:
        return None
    mask = torch.zeros_like(call.args["mask"])
    return {"mask": mask}


def shared_memory(call: Call, dice: Dice) -> Changes:
    """Two tensors of the state are the same one."""
    state = [name for name in tensors_of(call) if name not in READ_ONLY] if call.op in STATE_OPS else []
    kinds = {name: (call.args[name].shape, call.args[name].dtype) for name in state if call.args[name].numel()}
    alike = [(one, other) for one in kinds for other in kinds if one < other and kinds[one] == kinds[other]]
    if not alike:
        return None
    one, other = dice.choice(alike)
    return {one: call.args[one], other: call.args[one]}  # both, so that no other break separates them again


REFUSED: tuple[Callable[[Call, Dice], Changes], ...] = (
    another_dtype, another_shape, strides, a_number, same_row, lists, another_device, shared_memory,
)  # fmt: skip
VALUES: tuple[Callable[[Call, Dice], Changes], ...] = (a_value, too_few_rows)


def broken(call: Call, dice: Dice) -> tuple[dict[str, object], bool]:
    """(one to three arguments of the call, broken; whether a host sees it without reading a tensor)"""
    changed, ways, wanted = {}, [], dice.choice((1, 1, 1, 2, 3))
    for _ in range(30):
        way = dice.choice(REFUSED + VALUES)
        if way in (another_shape, another_device) and way in ways:
            continue  # two might fit each other
        changes = way(call, dice)
        if changes and not set(changed) & set(changes):
            changed |= changes
            ways.append(way)
        if len(ways) == wanted:
            break
    if not ways:
        changed, ways = another_dtype(call, dice) or {"clients": 0}, [another_dtype]
    return changed, any(way in REFUSED for way in ways)
