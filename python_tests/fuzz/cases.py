"""Calls of the ops that must succeed, drawn at random, each with a check of what it did.

A sane call has numbers of ordinary size, and an oracle in float64 says what must come out. A wild one has NaN, inf, the
largest and the smallest floats among its values: nothing may crash, and no model may leave the floats.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import oracles
import torch
from fuzz.dice import OPS, Call, Dice, cast, need, wide
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TRUSTS = (1.0, 1.0, 0.0, 0.1, 3.0, math.inf)


# median and trimmed_mean


def rows(op: str, dice: Dice, device: str) -> Call:
    n, d = dice.choice((0, 1, 2, 3, 4, 5, 8, 17, 33)), dice.choice((0, 1, 2, 3, 7, 64, 65))
    if dice.chance(0.01):
        n, d = 1030, 3  # beyond what the CPU sorts in a network
    trimmed = op == "trimmed_mean"
    n = max(n, 1) if trimmed else n
    values = dice.ties(n, d) if dice.chance(0.2) else dice.normal(n, d)
    values = dice.spoil(values) if dice.chance(0.3) else values
    dtype = dice.choice(FLOATS)
    updates = dice.laid_out(cast(values, dtype, device))
    mask = dice.bools(n) if dice.chance(0.5) else None
    if mask is not None and trimmed:
        mask[dice.randrange(n)] = True
    kept = wide(updates) if mask is None else wide(updates)[mask]
    args = {"updates": updates, "mask": None if mask is None else dice.laid_out(torch.from_numpy(mask).to(device))}
    if trimmed:
        args["trim"] = dice.randrange((len(kept) + 1) // 2)

    def check(result: Tensor) -> None:
        need(result.shape == (d,) and result.dtype == dtype, "shape and dtype", result.shape, result.dtype)
        if not trimmed:
            return need(oracles.same(result, oracles.median(kept)), "median", result, kept)
        expected = torch.from_numpy(oracles.trimmed(kept, args["trim"])).to(dtype)
        finite = np.where(np.isfinite(kept), np.abs(kept), 0).max(initial=0)
        bound = {"rtol": torch.finfo(dtype).eps, "atol": 1e-14 * float(finite) + 1e-14}
        close = torch.isclose(result.cpu().double(), expected.double(), **bound, equal_nan=True)
        need(bool(close.all()), "trimmed mean", result, expected)

    return Call(op, args, check, {"n": n, "kept": len(kept)})


def lipschitz(op: str, dice: Dice, device: str) -> Call:
    d, dtype = dice.choice((0, 1, 2, 3, 8, 65, 300)), dice.choice(FLOATS[:2])
    vectors = dice.normal(4, d)
    vectors = dice.spoil(vectors) if dice.chance(0.3) else vectors
    for to, source in ((1, 0), (3, 2)):
        vectors[to] = vectors[source] if dice.chance(0.2) else vectors[to]
    tensors = [dice.laid_out(cast(vector, dtype, device)) for vector in vectors]
    g, last_g, w, last_w = (wide(tensor).astype(np.float64) for tensor in tensors)

    def check(result: Tensor) -> None:
        with np.errstate(all="ignore"):
            up, down = np.linalg.norm(g - last_g), np.linalg.norm(w - last_w)
            expected = 0.0 if up == 0 and down == 0 else np.float64(up) / np.float64(down)
        got = result.item()
        same = (
            got == expected or (math.isnan(got) and math.isnan(expected)) or math.isclose(got, expected, rel_tol=1e-12)
        )
        need(same, "factor", got, expected)

    return Call(op, dict(zip(("update", "last_update", "model", "last_model"), tensors, strict=True)), check)


# estimate and aggregate


@dataclass
class Past:
    """A history in float64, and whether its pairs are so far from depending on each other that rounding stays small."""

    values: dict[str, np.ndarray]
    pairs: np.ndarray
    sane: bool


def past(dice: Dice, n: int, m: int, d: int) -> Past:
    """Clients with a quadratic of their own, as oracles.make_history has them; unused slots hold NaN."""
    curvature = 0.5 + 1.5 * dice.numbers.random((n, 1, d))
    dw = dice.normal(n, m, d)
    dg = curvature * dw + 0.05 * dice.normal(n, m, d)
    pairs = dice.numbers.integers(0, m + 1, n)
    unused = np.arange(m) >= pairs[:, None]
    dw[unused], dg[unused] = np.nan, np.nan
    length = dice.choice((1.0, 0.3, 5.0))
    values = {"model": dice.normal(d), "last_updates": length * dice.normal(n, d), "last_models": dice.normal(n, d)}
    values |= {"dw": dw, "dg": dg}
    wild = dice.chance(0.3)
    if wild:
        name = dice.choice(list(values))
        values[name] = dice.spoil(values[name], 0.05)
    sound = all(is_sound(dw[k, : pairs[k]], dg[k, : pairs[k]]) for k in range(n)) and not wild
    return Past(values, pairs, sound)


def is_sound(dw: np.ndarray, dg: np.ndarray) -> bool:
    """Whether the pairs of one client are far from depending on each other."""
    count, d = dw.shape
    if count == 0:
        return True
    if count > d or (np.einsum("md,md->m", dw, dg) < 0.1 * np.einsum("md,md->m", dw, dw)).any():
        return False
    directions = dw / np.linalg.norm(dw, axis=1, keepdims=True)
    return np.linalg.cond(directions) < 30


def estimates(given: dict[str, np.ndarray], pairs: np.ndarray, trust: float) -> tuple[np.ndarray, np.ndarray]:
    """(n, d) through dense matrices; (n): how long the terms of each are"""
    result, terms = given["last_updates"].copy(), np.linalg.norm(given["last_updates"], axis=1)
    for k, count in enumerate(pairs):
        x = given["model"] - given["last_models"][k]
        if count == 0 or not x.any():
            continue
        correction = oracles.dense_bfgs(given["dw"][k, :count], given["dg"][k, :count]) @ x
        norm, most = np.linalg.norm(correction), trust * terms[k] if trust < math.inf else math.inf
        correction = correction * min(1.0, most / norm if norm else 1.0)
        result[k] += correction
        terms[k] += np.linalg.norm(correction)
    return result, terms


BOUND = {torch.float64: 1e-9, torch.float32: 1e-6}


def history(op: str, dice: Dice, device: str) -> Call:
    n, m = dice.choice((0, 1, 2, 3, 5, 9)), dice.choice((0, 1, 1, 2, 3, 16))
    d, dtype = dice.choice((0, 1, 2, 5, 8, 33, 65)), dice.choice(FLOATS[:2])
    n = max(n, 1) if op != "estimate" else n
    drawn, trust = past(dice, n, m, d), dice.choice(TRUSTS)
    tensors = {name: cast(values, dtype, device) for name, values in drawn.values.items()}
    given = {name: wide(tensor).astype(np.float64) for name, tensor in tensors.items()}
    pairs = torch.from_numpy(drawn.pairs).to(device)
    args = {name: dice.laid_out(tensor) for name, tensor in {**tensors, "pairs": pairs}.items()} | {"trust": trust}
    call = Call(op, args, facts={"n": n, "m": m})

    def close(result: Tensor, expected: np.ndarray, terms: np.ndarray) -> None:
        error = np.abs(wide(result).astype(np.float64) - expected).max(initial=0, axis=-1)
        need((error <= BOUND[dtype] * terms + 1e-300).all(), "error", error, "of", terms)

    if op == "estimate":

        def check(result: Tensor) -> None:
            need(result.shape == (n, d) and result.dtype == dtype, "shape and dtype")
            if drawn.sane:
                return close(result, *estimates(given, drawn.pairs, trust))
            bad = ~np.isfinite(wide(result)).all(1) & np.isfinite(given["last_updates"]).all(1)
            far = np.linalg.norm(given["last_updates"], axis=1) > 1e37
            need(not (bad & ~far).any(), "an estimate left the floats", result, args)

        call.check = check
        return call

    seen, client, accepted = dice.bools(n), dice.randrange(n), dice.chance(0.6)
    rule = dice.choice(("median", "trimmed_mean", "mean"))
    trim = dice.randrange((n + 1) // 2) if rule == "trimmed_mean" else dice.choice((0, 0, -5, 2**62))
    sent = cast(dice.spoil(dice.normal(d)) if dice.chance(0.1) else dice.normal(d), dtype, device)
    args |= {
        "update": dice.laid_out(sent), "client": client, "accepted": torch.tensor(accepted, device=device),
        "seen": dice.laid_out(torch.from_numpy(seen).to(device)), "rule": rule, "trim": trim,
    }  # fmt: skip
    call.facts["wanted"] = [k for k in range(n) if seen[k] and k != client]

    def check_direction(result: Tensor | tuple[Tensor, Tensor]) -> None:
        direction, status = result if op == "aggregate_status" else (result, None)
        need(direction.shape == (d,) and direction.dtype == dtype, "shape and dtype")
        if drawn.sane:
            found, terms = estimates(given, drawn.pairs, trust)
        else:
            names = ("model", "last_updates", "last_models", "dw", "dg", "pairs", "trust")
            found, terms = wide(OPS.estimate(*(args[name] for name in names))).astype(np.float64), np.ones(n)
        found[client], takes_part = wide(sent), seen.copy()
        takes_part[client] = accepted
        kept, depth = found[takes_part], trim if rule == "trimmed_mean" else 0
        if len(kept) <= 2 * depth:
            return need(not wide(direction).any(), "no row is left, so zeros", direction)
        expected = oracles.median(kept) if rule == "median" else oracles.trimmed(kept, depth)
        if np.isfinite(kept).all():
            close(direction, expected, np.abs(kept).max(initial=0) + terms.max(initial=0))
        if status is None or not drawn.sane:
            return None
        for k, code in enumerate(status.tolist()):
            wanted = seen[k] and k != client
            allowed = (0,) if not wanted else (1,) if drawn.pairs[k] == 0 else (2, 3, 4)
            need(code in allowed, "status of", k, "is", code)

    call.check = check_direction
    return call


def round_fits(op: str, dice: Dice, device: str) -> Call:
    n, m = dice.choice((1, 4, 8, 300, 1024)), dice.choice((0, 1, 2, 3, 5))
    args = {"like": cast(dice.normal(2), torch.float32, device), "clients": n, "pairs": m, "half": dice.chance(0.5)}
    args["shared_bytes"] = dice.choice((None, 0, 1000, 10**6, -1, 2**62))

    def check(result: bool) -> None:
        need(isinstance(result, bool) and (result or device != "cpu"), "fits", result)

    return Call(op, args, check)


def pass_blocks(op: str, dice: Dice, device: str) -> Call:
    n, m, tiles = dice.choice((1, 4, 8, 300)), dice.choice((0, 1, 2, 3)), dice.choice((0, 1, 7, 10**6, 2**31 - 1))
    args = {"like": cast(dice.normal(2), torch.float32, device), "clients": n, "pairs": m, "half": dice.chance(0.5)}

    def check(blocks: int) -> None:
        need(blocks == 0 if m == 0 else 1 <= blocks <= max(tiles, 1), "blocks", blocks)
        need(device != "cpu" or blocks == (m > 0), "blocks on a CPU", blocks)

    return Call(op, args | {"tiles": tiles}, check)


PURE: dict[str, Callable[[str, Dice, str], Call]] = {
    **dict.fromkeys(("median", "trimmed_mean"), rows),
    "lipschitz": lipschitz,
    **dict.fromkeys(("estimate", "aggregate", "aggregate_status"), history),
    "round_fits": round_fits,
    "pass_blocks": pass_blocks,
}
