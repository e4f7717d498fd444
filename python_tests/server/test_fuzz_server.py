"""A short run of the fuzzer of servers, what it must be able to find, and what it has found."""

import subprocess
import sys

import pytest
import torch
from fuzz.dice import MismatchError
from fuzz.oracle import Before, compare
from places import HERE

from secureafl_ext import SecureAFL

NAN = torch.full((6,), torch.nan)


def test_random_histories_of_every_kind_of_server():
    arguments = ["--histories", "120", "--seed", "7"]
    done = subprocess.run([sys.executable, HERE / "fuzz_server.py", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = dict(part.rsplit(" ", 1) for part in done.stdout.splitlines()[0].split(", "))
    assert int(counts["compared"]) > 500 and int(counts["refused"]) > 100 and int(counts["without a round"]) > 50


def after_rounds(rounds=24, **settings):
    random = torch.Generator().manual_seed(1)
    server = SecureAFL(torch.zeros(6), 4, lr=0.1, **settings)
    for t in range(rounds):
        server.submit(t % 4, server.model - t % 4 + 0.5 * torch.randn(6, generator=random), server.version)
    return server


@pytest.mark.parametrize(
    "settings",
    [{"memory": 1}, *({"rule": rule, "memory": 0} for rule in ("kinship", "support", "krum"))],
    ids=str,
)
def test_a_wrong_round_is_found(settings):
    server = after_rounds(filter=False, **settings)
    before, update = Before(server.config, 4, server.state_dict()), torch.linspace(1, 2, 6)
    server.submit(1, update, server.version)
    after = Before(server.config, 4, server.state_dict())
    arguments = before, 1, update.double().numpy(), before.version
    assert compare(*arguments, True, after) in ("compared", "verdict compared")
    with pytest.raises(MismatchError, match="verdict"):
        compare(*arguments, False, after)
    row = after.arrays["models"][after.version % len(after.arrays["models"])]
    row += 0.05
    with pytest.raises(MismatchError, match="model"):
        compare(*arguments, True, after)
    row -= 0.05
    after.arrays["last_updates"][1] += 0.05
    with pytest.raises(MismatchError, match="last_updates"):
        compare(*arguments, True, after)


def changed_by_rejected_ones(server):
    before = server.state_dict()
    for _ in range(5):
        assert not server.submit(3, NAN, server.version).accepted
    after = server.state_dict()
    return {
        name for name, value in before.items() if not torch.equal(torch.as_tensor(value), torch.as_tensor(after[name]))
    }


@pytest.mark.parametrize("rule", ["median", "centered_clip"])
def test_rejected_updates_change_nothing_but_what_is_counted(rule):
    assert changed_by_rejected_ones(after_rounds(rule=rule, memory=2)) <= {"version", "counts", "models", "rounds"}


def test_rejected_updates_push_no_estimates_as_pairs():
    """Else a client that sends NaN fills the others' histories with what the server made up itself."""
    assert not changed_by_rejected_ones(after_rounds(pairs="rounds", memory=2)) & {"dw", "dg", "pairs"}


@pytest.mark.parametrize("memory", [0, 2])
def test_rejected_updates_do_not_move_the_centre_of_kinship(memory):
    assert "kin_centre" not in changed_by_rejected_ones(after_rounds(rule="kinship", memory=memory))
