"""Random calls of every op: valid ones against oracles, broken ones must be refused and change nothing.

python python_tests/fuzz_ops.py --cases 1000000 --seed 0 --device cpu
A finding names its case; `--first CASE --cases 1` with the same seed repeats it.
"""

import argparse
import functools
import os
import sys
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads would only wait for each other

import torch
from fuzz.breaks import broken, tensors_of
from fuzz.cases import PURE
from fuzz.children import run_cases, told
from fuzz.dice import Call, Dice, need
from fuzz.rounds import STATEFUL

from secureafl_ext import _sim  # noqa: F401 - registers the simulator's ops

MAKERS = PURE | STATEFUL
GPU_ALONE = (  # torch.ops.secureafl_sim
    "cnn_gradient",
    "resnet_gradient",
    "resnet_predict",
)
WORDS = {"aggregate_status": "aggregate"}  # it is aggregate with an account, and speaks in its name
TEMPLATES = 60  # valid calls of each op that broken ones begin with: a refusal leaves them as they are


@functools.cache
def template(op: str, number: int, seed: int, device: str) -> tuple[Call, list]:
    """(a valid call, copies of its memory)"""
    draws = (MAKERS[op](op, Dice("template", seed, op, number, again), device) for again in range(99))
    call = next(call for call in draws if not call.facts.get("may_refuse"))
    return call, copies(call, tensors_of(call))


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes that it lies in, also those between its values."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def case(index: int, seed: int, device: str) -> Counter:
    dice = Dice(seed, index)
    if dice.chance(0.01):
        return no_kernel(dice, device)
    valid = dice.chance(0.08)
    op = dice.choice([*PURE, *PURE, *STATEFUL] if valid else [*MAKERS])
    if not valid:
        whole, before = template(op, dice.randrange(TEMPLATES), seed, device)
        changed, host_sees = broken(whole, dice)
        call = Call(op, whole.args | changed)
        if device != "cpu" and not host_sees:
            return clamped(call)
        own = [name for name in changed if isinstance(changed[name], torch.Tensor)]
        return refused(call, before + copies(call, own), device)
    call = MAKERS[op](op, dice, device)
    before = copies(call, tensors_of(call)) if op in PURE else []
    if call.facts.get("may_refuse"):
        before = copies(call, tensors_of(call))
        try:
            result, before = call.run(), []
        except RuntimeError:
            return refused(call, before, device)
    else:
        result = call.run()
    call.check(result)
    unchanged(before)
    settle(device)
    return Counter({(op, "valid"): 1})


def copies(call: Call, names: list[str]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    spaces = ((name, memory(call.args[name])) for name in names)
    return [(name, space, space.clone()) for name, space in spaces]


def unchanged(before: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    for name, now, then in before:
        need(torch.equal(now, then), name, "was written to")


def refused(call: Call, before: list, device: str) -> Counter:
    try:
        call.run()
    except RuntimeError as error:
        need(str(error).startswith(f"secureafl::{WORDS.get(call.op, call.op)}: "), "words:", str(error)[:300])
    else:
        need(False, call.op, "took", {name: describe(value) for name, value in call.args.items()})
    unchanged(before)
    settle(device)
    return Counter({(call.op, "refused"): 1})


def clamped(call: Call) -> Counter:
    """On a GPU: nothing is read or written elsewhere (the next call would tell), and models stay finite."""
    args = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.args.items()}
    Call(call.op, args).run()
    settle("cuda")
    need("models" not in args or bool(args["models"].isfinite().all()), "models left the floats")
    return Counter({(call.op, "clamped"): 1})


def no_kernel(dice: Dice, device: str) -> Counter:
    """On a CPU torch itself says that there is none; on a GPU such arguments are refused."""
    op = dice.choice(GPU_ALONE)
    arguments = [torch.zeros(3, device=device), torch.zeros(2, 3, device=device), torch.zeros(2, device=device), 4, 10]
    arguments = {"cnn_gradient": arguments, "resnet_gradient": arguments[:4]}.get(op, [*arguments[:2], 4])
    try:
        getattr(torch.ops.secureafl_sim, op)(*arguments)
    except RuntimeError as error:  # NotImplementedError is one
        words = (
            f"Could not run 'secureafl_sim::{op}' with arguments from the 'CPU'"
            if device == "cpu"
            else f"secureafl_sim::{op}: "
        )
        need(str(error).startswith(words), "words:", str(error)[:300])
        return Counter({(op, "refused"): 1})
    raise AssertionError(f"{op} took arguments that do not fit")


def describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)[:60]
    few = value.tolist() if value.numel() <= 12 else ".."
    return f"{tuple(value.shape)} {value.dtype} {value.stride()} {few}"


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    one = functools.partial(case, seed=options.seed, device=options.device)
    counts, findings = run_cases(one, options.first, options.cases, options.device)
    for op in (*MAKERS, *GPU_ALONE):
        print(f"{op:18}", *(f"{kind} {counts[op, kind]:8}" for kind in ("valid", "refused", "clamped")))
    print(f"{counts.total()} cases, seed {options.seed}, {options.device}: {len(findings)} findings")
    return told(findings, "case")


if __name__ == "__main__":
    sys.exit(main())
