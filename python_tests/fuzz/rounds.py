"""Calls of the ops on a server's state that must succeed, each with a check of what it did."""

import math
import struct

import numpy as np
import torch
from fuzz.averages import an_averaged_round
from fuzz.dice import OPS, Call, Dice, cast, need, offset, wide
from fuzz.scene import BOUND_NAMES, PER_CLIENT, ROW_OPS, SUPPORT_NAMES, Scene
from torch import Tensor

from secureafl_ext import _C

F64 = torch.float64
# client, reason, received, steps, stored, pushed, slot, clip, pending, g_square, rate, y_scale, s_scale:
# csrc/round/round.h
VERDICT = struct.Struct("i4xq????ifiddffd")


def a_round(op: str, dice: Dice, device: str) -> Call:
    """step_, kin_step_, support_step_ and row_step_, and the same round in phases for the ops of ranks."""
    scene = Scene(dice, device, dice.choice(ROW_OPS[op]) if op in ROW_OPS else None)
    args = scene.args(dice)
    if dice.chance(0.15):
        _wild_numbers(dice, scene, args)
    odd = dice.chance(0.05)
    if odd or dice.chance(0.15):
        for name in ("models", "last", "slots", "gram", "along", "last_updates", "products", "basis"):
            if name in args and dice.chance(0.5):
                items = 1 if odd else 16 // args[name].element_size()
                args[name], scene.sane = offset(args[name], items), False
    scene.models, scene.start = args["models"], args["models"].cpu().clone()
    # What is not at a multiple of 16 bytes may be refused: a GPU copies state in pieces of so many.
    facts = {"may_refuse": True} if odd else {}
    facts |= {"n": scene.n, "m": scene.m, "d": scene.d, "lists": len(args["recorded"])}
    call = Call(op, args, scene.check, facts)
    if op == "step_" and dice.chance(0.1):  # the end of another round comes first
        args["verdict"].copy_(a_verdict(dice, scene, device, pending=1))
        args["changes"].copy_(parts(dice, args["changes"].shape, device))
        scene.sane = False
    if op == "step_" or op in ROW_OPS:
        return call
    if op == "settle_":
        args["verdict"] = a_verdict(dice, scene, device, pending=dice.choice((0, 1, 1, -1, 2**31 - 1)))
        count, _ = args["changes"].shape
        args["changes"] = parts(dice, (count, dice.choice((0, 1, 2, 40)) if scene.m else 0), device)
        call.check = lambda _: check_settled(scene, args)
        return call
    if op == "update_sums":
        call.check = lambda sums: check_sums(scene, args, sums)
        return call
    zeros = {"dtype": F64, "device": device}
    sums = OPS.update_sums(args["update"], args["client"], args["trained_on"], scene.engine.last)
    if dice.chance(0.1):
        sums = cast(dice.spoil(sums.cpu().numpy(), 0.4), F64, device)
        scene.sane = False
    given = {"sums": sums, "changes": torch.zeros(_C.pass_sums(scene.n, scene.m), **zeros)}
    given["verdict"] = torch.zeros(_C.VERDICT_BYTES, dtype=torch.uint8, device=device)
    args |= given
    if op == "apply_":
        call.check = lambda outcome: check_phases(scene, args, outcome)
        return call
    if op == "renew_":
        given["verdict"] = a_verdict(dice, scene, device)
        args |= given
        args["changes"] = parts(dice, given["changes"].shape, device)
    call.check = lambda _: check_factors(scene, args, op)
    return call


def _wild_numbers(dice: Dice, scene: Scene, args: dict[str, object]) -> None:
    """The state itself, and the settings that may be any number, hold odd ones."""
    scene.sane = False
    for name in dice.sample(sorted(args), 3):
        value = args[name]
        if isinstance(value, Tensor) and value.is_floating_point() and name != "models" and value.numel():
            value.copy_(cast(dice.spoil(value.double().cpu().numpy()), value.dtype, scene.device))
        elif name in BOUND_NAMES[2:] or name in SUPPORT_NAMES:
            args[name] = dice.choice((math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300))
        elif name == "known":
            args[name] = dice.choice((-(2**63), 0, 2**63 - 1))
        elif name == "trim":
            args[name] = dice.choice((0, 7, 2**62, 2**63 - 1))
        elif name == "lr":
            args[name] = dice.choice((1e308, -1e38, 1e-320))


def parts(dice: Dice, shape: tuple[int, ...], device: str) -> Tensor:
    """Sums of a pass."""
    return cast(dice.spoil(dice.normal(*shape), 0.05), F64, device)


def a_verdict(dice: Dice, scene: Scene, device: str, pending: int = 0) -> Tensor:
    """Of a client and a slot that there are; the rest may be anything."""
    slot = dice.randrange(max(scene.m, 1))
    flags = [dice.chance(0.5) for _ in range(4)]
    clip, *numbers = [dice.choice((1.0, 0.5, math.nan, math.inf)) for _ in range(6)]
    packed = VERDICT.pack(scene.client, dice.randrange(5), *flags, slot, clip, pending, *numbers)
    return torch.tensor(list(packed), dtype=torch.uint8, device=device)


def check_sums(scene: Scene, args: dict[str, object], sums: Tensor) -> None:
    last = scene.engine._rows(args["last"], 0)[scene.client], scene.engine._rows(args["last"], 1)[scene.client]
    w, g = (wide(row) for row in last)
    update, start = wide(args["update"]), wide(args["trained_on"])
    with np.errstate(all="ignore"):
        s, y = (start - w).astype(np.float64), (update - g).astype(np.float64)
        long = update.astype(np.float64)
        expected = [(~np.isfinite(long)).sum(), long @ long, y @ y, s @ s, s @ y]
        bound = np.abs([1, long @ long, y @ y, s @ s, np.linalg.norm(s) * np.linalg.norm(y)]) * 1e-12
        same = np.isclose(sums.cpu().numpy(), expected, rtol=0, atol=np.nan_to_num(bound), equal_nan=True)
    need(same.all(), "sums", sums, expected)


def check_phases(scene: Scene, args: dict[str, object], outcome: tuple[Tensor, ...]) -> None:
    """apply_ has judged and stepped; renew_ makes the state whole."""
    OPS.renew_(args["verdict"], args["changes"], *(args[name] for name in PER_CLIENT), args["trust"])
    scene.check(outcome)


def check_settled(scene: Scene, args: dict[str, object]) -> None:
    pending = VERDICT.unpack(args["verdict"].cpu().numpy().tobytes())[8]
    need(not scene.m or pending == 0, "still pending:", pending)
    check_factors(scene, args, "settle_")


def check_factors(scene: Scene, args: dict[str, object], op: str) -> None:
    """Estimates from the factors are those of the history."""
    status = args["status"].cpu()
    need(bool(((status >= 0) & (status <= 4)).all()), "status", status)
    if op in ("renew_", "settle_") or not scene.sane:
        return
    need(not args["factors"].isnan().any(), "factors are NaN")
    model = scene.start[scene.now].to(scene.device)
    ours = scene.engine.estimates(model).cpu().double()
    past = [scene.state[name].double() for name in ("last_updates", "last_models", "dw", "dg")]
    theirs = OPS.estimate(model.cpu().double(), *past, scene.state["pairs"], args["trust"])
    error = (ours - theirs).abs()[scene.state["seen"]]
    need(not error.numel() or error.max() <= 1e-4 * (1 + theirs.abs().max()), "estimates differ by", error)


STATEFUL = dict.fromkeys(("step_", *ROW_OPS, "update_sums", "apply_", "renew_", "settle_", "refresh_"), a_round)
STATEFUL |= dict.fromkeys(("sketch_step_", "mean_step_"), an_averaged_round)
