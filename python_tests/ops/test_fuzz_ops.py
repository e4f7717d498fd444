"""A short run of the fuzzer of the ops, what it must be able to find, and what it has found."""

import subprocess
import sys

import pytest
import torch
from fuzz.cases import PURE
from fuzz.dice import Call, Dice, MismatchError
from fuzz.rounds import STATEFUL, VERDICT
from places import HERE

from secureafl_ext import _C, _sim  # noqa: F401 - _sim registers the simulator's ops

MAKERS = PURE | STATEFUL


def test_random_calls_of_every_op(device):
    arguments = ["--cases", "2500", "--seed", "7", "--device", device]
    done = subprocess.run([sys.executable, HERE / "fuzz_ops.py", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counted = {
        line.split()[0]: [int(number) for number in line.split()[2::2]] for line in done.stdout.splitlines()[:22]
    }
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    every = {name for space, name in names if space in ("secureafl", "secureafl_sim")}
    assert set(counted) == every
    for op, (valid, refused, clamped) in counted.items():
        assert refused > 0 and (valid > 0) == (op in MAKERS) and (device != "cpu" or clamped == 0), op


def test_the_verdict_is_packed_as_the_kernels_have_it():
    assert VERDICT.size == _C.VERDICT_BYTES


def spoiled(result):
    """A little more than it was, wherever there is anything."""
    if isinstance(result, tuple):
        return tuple(spoiled(one) for one in result)
    return result * 1.001 + 0.001 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


@pytest.mark.parametrize("op", [op for op in MAKERS if op not in ("round_fits", "pass_blocks", "renew_", "settle_")])
def test_a_wrong_result_is_found(op):
    found = 0
    for number in range(60):
        call = MAKERS[op](op, Dice("wrong", number), "cpu")
        if call.facts.get("may_refuse"):
            continue
        result = call.run()
        if op in ("step_", "apply_", "kin_step_", "support_step_", "mean_step_", "row_step_", "sketch_step_"):
            call.args["models"][call.args["next_row"]] += 0.05
        elif op == "refresh_":
            call.args["factors"].mul_(0.9)
        else:
            result = spoiled(result)
        try:
            call.check(result)
        except MismatchError:
            found += 1
    assert found >= 5


CRASHES = """
import os, time, sys
sys.path.insert(0, {here!r})
from collections import Counter
from fuzz.children import run_cases

def case(index):
    if index == 3:
        os.abort()
    if index == 5:
        time.sleep(60)
    if index == 7:
        raise ValueError("seven")
    return Counter(done=1)

counts, findings = run_cases(case, 0, 10, "cpu", seconds=2)
assert counts["done"] == 3, counts  # what a process had counted before it ended is lost
assert [index for index, _ in findings] == [3, 5, 7], findings
assert ["SIGABRT" in findings[0][1], "hung" in findings[1][1], "seven" in findings[2][1]] == [True] * 3, findings
"""


def test_a_crash_and_a_hang_are_reported_by_their_case():
    subprocess.run([sys.executable, "-c", CRASHES.format(here=str(HERE))], check=True, capture_output=True)


# Found: tensors that lie in the same memory are taken.

SHARED = {
    "step_": [("pairs", "oldest"), ("recorded", "pairs")],
    "settle_": [("pairs", "oldest")],
    "kin_step_": [("last_updates", "last_models"), ("products", "kinship"), ("met", "recorded")],
    "sketch_step_": [("update_sketches", "means"), ("squares", "norms"), ("met", "recorded")],
    "mean_step_": [("last_updates", "means"), ("total", "noise"), ("norms", "shift")],
    "support_step_": [("products", "similarity"), ("met", "recorded")],
    "row_step_": [("last_updates", "last_models"), ("last_epoch", "recorded")],
    "renew_": [("pairs", "oldest")],
}


def a_call(op, **facts):
    """A valid call with these sizes, its places in pairs, oldest and so on zero: the same fits all of them."""
    numbers = range(1000)
    calls = (MAKERS[op](op, Dice("shared", op, number), "cpu") for number in numbers)
    calls = (call for call in calls if call.facts["d"] > 2 and "may_refuse" not in call.facts)
    call = next(call for call in calls if facts.items() <= call.facts.items())
    for name in ("pairs", "oldest", "recorded", "met"):
        if name in call.args:
            call.args[name].zero_()
    return call


@pytest.mark.parametrize(
    ("op", "names"), [(op, names) for op, all_names in SHARED.items() for names in all_names], ids=str
)
def test_state_that_shares_memory_is_refused(op, names):
    call = a_call(op, n=4, lists=4)
    call.args[names[1]] = call.args[names[0]]
    with pytest.raises(RuntimeError, match=f"secureafl::{op}: "):
        call.run()


@pytest.mark.parametrize("name", ["update", "trained_on"])
@pytest.mark.parametrize("op", ["step_", "kin_step_", "support_step_", "mean_step_", "row_step_", "sketch_step_"])
def test_what_is_read_may_not_lie_across_the_next_row(op, name):
    call = a_call(op)
    args, d = call.args, call.facts["d"]
    room = torch.zeros(len(args["models"]) * d + 1)
    room[:-1] = args["models"].reshape(-1)
    begin = args["next_row"] * d + 1
    args |= {"models": room[:-1].view(-1, d), name: room[begin : begin + d]}
    with pytest.raises(RuntimeError, match=f"{name} must not overlap .* got memory of the next row of models"):
        Call(op, args).run()


SEGMENTATION_FAULT = """
import torch
from secureafl_ext import _C
from secureafl_ext.config import Config
from secureafl_ext.engines.fused import Fused

n, d = 2, 130
e = Fused(Config(memory=1), n, d, torch.device("cpu"))
update = trained_on = torch.ones(d)
client, models, changes = e.number_of(0), torch.zeros(2, d), torch.zeros(_C.pass_sums(n, 1), dtype=torch.float64)
verdict = e.last.view(-1).view(torch.uint8)[: _C.VERDICT_BYTES]  # the pass writes here, and goes on reading it
sums = torch.ops.secureafl.update_sums(update, client, trained_on, e.last)
books = e.factors, e.recorded, e.factor_counts, e.counts, e._arrived
try:
    torch.ops.secureafl.apply_(
        sums, verdict, changes, update, client, trained_on, 0, 1, models, *e._past, *books, e.lr, *e._settings
    )
except RuntimeError as error:
    print(error)
"""


def test_a_verdict_in_the_memory_of_the_history_is_refused():
    done = subprocess.run([sys.executable, "-c", SEGMENTATION_FAULT], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("secureafl::apply_: ")
