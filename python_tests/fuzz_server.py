"""Random histories of small servers: every rule, engine and setting, honest and hostile calls, against the slow ones.

python python_tests/fuzz_server.py --histories 100000 --seed 0
A finding names its history; `--first HISTORY --histories 1` with the same seed repeats it.
"""

import argparse
import functools
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads would only wait for each other

import numpy as np
import torch
from damage import damages
from fuzz.children import run_cases, told
from fuzz.dice import Dice, need
from fuzz.oracle import Before, compare
from fuzz.settings import at, bits, composed_alone, same, settings_of
from torch import Tensor

from secureafl_ext import SecureAFL
from secureafl_ext.engines import fused

HELD = (
    "last_updates", "last_models", "dw", "dg", "pairs", "seen", "products", "kinship", "similarity", "met", "centre",
    "oldest", "gram", "scales",
)  # fmt: skip


class Run:
    """One server, what its clients are like, and every call with what must hold after it."""

    def __init__(self, dice: Dice, folder: Path):
        self.dice, self.folder, self.counts = dice, folder, Counter()
        self.n, self.d = dice.randrange(1, 7), dice.choice((1, 2, 3, 5, 6, 7, 8, 8))
        settings, self.dtype = settings_of(dice, self.n)
        self.plain_ops = settings["history_dtype"] != torch.float16 and dice.chance(0.1)
        start = torch.from_numpy(dice.normal(self.d)).to(self.dtype)
        with composed_alone(self.plain_ops):
            self.server = SecureAFL(start, self.n, **settings)
        self.wild = dice.chance(0.25)
        self.centres, self.bends = dice.normal(self.n, self.d), 0.5 + dice.numbers.random((self.n, self.d))
        self.sent, self.kept_states = {}, []
        self.dense = None  # the state, and the oracle's view of it, as the last round left them

    # What is sent

    def update_of(self, client: int, version: int) -> np.ndarray:
        dice = self.dice
        model = self.server.model_at(version).double().numpy()
        honest = self.bends[client] * (model - self.centres[client]) + 0.05 * dice.normal(self.d)
        kind = dice.randrange(12)
        if kind == 0:
            return dice.spoil(honest, 0.5) if self.wild else np.where(dice.bools(self.d, 0.4), math.nan, honest)
        if kind == 1:
            return honest * dice.choice((-3.0, 5.0, 30.0))
        if kind == 2 and client in self.sent:
            return self.sent[client]
        if self.wild and kind <= 6:
            return dice.choice(
                (0 * honest, 1e-30 * honest, 3e38 * np.sign(honest), 1e20 * honest, 1e38 * dice.normal(self.d))
            )
        return honest

    def arrival(self) -> tuple[int, Tensor, int]:
        server, dice = self.server, self.dice
        client = dice.randrange(self.n)
        version = max(0, server.version - dice.randrange(server.config.max_staleness + 1))
        with np.errstate(all="ignore"):
            update = torch.from_numpy(self.update_of(client, version)).to(self.dtype)
        self.sent[client] = update.double().numpy()
        return client, update, version

    # Calls

    def submit(self) -> None:
        client, update, version = self.arrival()
        server, turn = self.server, self.server._turns[client]
        if turn and server.version - turn < server.config.spacing:
            return self.without_a_round(lambda: server.submit(client, update, version), "too soon", "too_soon")
        self.a_round(client, update, version, lambda: server.submit(client, update, version))

    def enqueue(self) -> None:
        server = self.server
        if not server.capturable:
            return self.refused(lambda: server.enqueue(torch.tensor([0]), *torch.zeros(2, self.d)), ValueError)
        client, update, version = self.arrival()
        if self.dice.chance(0.2):
            nobody = torch.tensor([self.dice.choice((-1, self.n, 2**40))])
            return self.refused(
                lambda: server.enqueue(nobody, update, server.model_at(version)), RuntimeError, IndexError
            )
        model = server.models[version % len(server.models)].clone()  # in the history's dtype, as submit takes it
        self.a_round(client, update, version, lambda: server.enqueue(torch.tensor([client]), update, model))

    def stale(self) -> None:
        server = self.server
        version = server.version - server.config.max_staleness - 1
        if version >= 0:
            update = torch.ones(self.d, dtype=self.dtype)
            self.without_a_round(lambda: server.submit(0, update, self.dice.randrange(version + 1)), "stale", "stale")

    def mistake(self) -> None:
        server, dice, good = self.server, self.dice, torch.ones(self.d, dtype=self.dtype)
        other = torch.float32 if self.dtype == torch.float64 else torch.float64
        bad = [(0, update, server.version) for update in (good[:-1], good[None], good.to(other), [1.0] * self.d, None)]
        bad += [(0, good.to("meta"), server.version), (0, good.long(), server.version)]
        bad += [(client, good, server.version) for client in (-1, self.n, 10**30, 0.5, "0", None, math.nan)]
        bad += [(0, good, version) for version in (-1, server.version + 1, 10**30, 0.5, None, -(2**63))]
        arguments = dice.choice(bad)
        self.refused(lambda: server.submit(*arguments), ValueError, TypeError)

    def forget(self) -> None:
        server, client = self.server, self.dice.randrange(self.n)
        if self.dice.chance(0.2):
            return self.refused(lambda: server.forget(self.dice.choice((-1, self.n, 10**30))), ValueError)
        before = server.state_dict()
        server.forget(client)
        after = server.state_dict()
        others = [k for k in range(self.n) if k != client]
        need(not after["seen"][client] and not after["pairs"][client], "forgotten, but still known")
        for name in ("last_updates", "last_models", "dw", "dg", "pairs", "seen"):
            need(not after[name][client].any(), name, "of a forgotten client is kept")
            need(torch.equal(after[name][others], before[name][others]), name, "of others changed")
        need(torch.equal(after["models"], before["models"]) and after["version"] == before["version"], "model changed")
        self.sent.pop(client, None)

    def rate(self) -> None:
        """The rounds that follow have another step size, and nothing else changes."""
        server, before, old = self.server, self.memory(), self.server.lr
        if self.dice.chance(0.3):
            wrong = self.dice.choice((math.nan, math.inf, None, "0.1", [0.1]))
            self.refused(lambda: setattr(server, "lr", wrong), ValueError, TypeError)
            return need(server.lr == old, "lr", server.lr)
        server.lr = self.dice.choice((0.05, 0.3, -0.1, 0.0))
        self.unchanged(before)

    def look(self) -> None:
        """Nothing changes by looking."""
        server, before = self.server, self.memory()
        model, version = server.checkout()
        need(torch.equal(model, server.model) and version == server.version, "checkout")
        estimates = server.estimates()
        need(estimates.shape == (self.n, self.d) and not estimates[~server.seen].any(), "estimates", estimates)
        client = torch.tensor([self.dice.randrange(self.n)])
        for one in (server.threshold(), server.threshold(client)):
            need(float(one) >= 0, "threshold", one)
        server.last(client), server.stats(), server.kinship_apart, server.phase()
        self.unchanged(before)

    def keep(self) -> None:
        self.kept_states.append(self.server.state_dict())

    def go_back(self) -> None:
        """To a state from before, or from a damaged one, which nobody takes."""
        server = self.server
        if self.dice.chance(0.5):
            state = server.state_dict()
            kinds = list(damages(state, server.config))
            kind, _, damaged = self.dice.choice(kinds)
            return self.refused(lambda: need(server.load_state_dict(damaged), kind), ValueError)
        if not self.kept_states:
            return self.keep()
        state = self.dice.choice(self.kept_states)
        server.load_state_dict(state)
        same(server.state_dict(), state)

    def save(self) -> None:
        before, path = self.server.state_dict(), self.folder / "server"
        self.server.save(path)
        with composed_alone(self.plain_ops):
            self.server = SecureAFL.load(path)
        same(self.server.state_dict(), before)
        need(self.server.dtype == self.dtype, "dtype", self.server.dtype)

    # What must hold

    def a_round(self, client: int, update: Tensor, version: int, call: Callable) -> None:
        server, c = self.server, self.server.config
        state, before = self.dense or (server.state_dict(), None)
        receipt = call()
        after = server.state_dict()
        accepted, finite = bool(receipt.accepted), bool(update.isfinite().all())
        need(server.version == state["version"] + 1 == receipt.version, "version", server.version)
        need(receipt.reason.startswith("accepted" if accepted else "rejected"), receipt.reason)
        need(finite or not accepted, "accepted what is not finite")
        counts = (after["counts"] - state["counts"]).tolist()
        need(counts[:3] == [int(accepted), int(not accepted), int(not finite)], "counts", counts)
        if not accepted and c.on_reject == "hold":
            need(torch.equal(at(after), at(state)), "a rejected update moved the model")
            for name in HELD:
                if name in state:
                    need(torch.equal(after[name], state[name]), "a rejected update changed", name)
        need(bool(after["models"].isfinite().all()), "models left the floats")
        self.counts["rounds"] += 1
        if self.wild:
            self.dense = after, None
            return
        left = Before(c, self.n, after)
        self.dense = after, left
        before = before or Before(c, self.n, state)
        self.counts[compare(before, client, update.double().numpy(), version, accepted, left)] += 1

    def without_a_round(self, call: Callable, reason: str, counted: str) -> None:
        server, before, count = self.server, self.memory(), self.server.stats()[counted]
        receipt = call()
        need(not receipt.accepted and receipt.reason.startswith(reason), "reason", receipt.reason)
        need(server.stats()[counted] == count + 1, counted, server.stats())
        self.unchanged(before, {counted})
        self.counts["without a round"] += 1

    def refused(self, call: Callable, *errors: type[Exception]) -> None:
        before = self.memory()
        try:
            call()
        except errors:
            self.unchanged(before)
            self.counts["refused"] += 1
            return
        raise AssertionError("was not refused")

    def memory(self) -> dict[str, Tensor]:
        """Copies of all that the server has."""
        server, engine = self.server, self.server._engine
        tensors = {name: value for name, value in vars(engine).items() if isinstance(value, Tensor)}
        tensors |= engine._tensors() if not isinstance(engine, fused.Fused) else {}
        numbers = {"version": server.version, "stale": server._stale, "too_soon": server._too_soon}
        own = {"models": server._models, "turns": torch.tensor(server._turns)}
        own |= {name: torch.tensor(value) for name, value in numbers.items()}
        return {name: tensor.clone() for name, tensor in {**tensors, **own}.items()}

    def unchanged(self, before: dict[str, Tensor], but: set[str] = frozenset()) -> None:
        for name, value in self.memory().items():
            if name not in but:
                need(torch.equal(bits(value), bits(before[name])), name, "changed")


CALLS = (
    *("submit",) * 24, *("enqueue",) * 4, "stale", "stale", "mistake", "mistake", "forget", "look", "keep", "go_back",
    "save", "rate",
)  # fmt: skip


def history(index: int, seed: int, folder: str) -> Counter:
    dice = Dice("history", seed, index)
    run = Run(dice, Path(folder))
    for _ in range(dice.choice((10, 10, 12, 15, 40))):
        name = dice.choice(CALLS)
        if name in ("forget", "go_back", "save", "rate"):
            run.dense = None
        getattr(run, name)()
        server, stats = run.server, run.server.stats()
        need(bool(server.model.isfinite().all()), "model left the floats")
        need(stats["accepted"] + stats["rejected"] == server.version, "stats", stats, server.version)
        need(stats["non_finite"] <= stats["rejected"], "stats", stats)
        run.counts["calls"] += 1
    return run.counts + Counter(histories=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        one = functools.partial(history, seed=options.seed, folder=folder)
        counts, findings = run_cases(one, options.first, options.histories, "cpu", batch=500)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"{counts['histories']} histories, seed {options.seed}: {len(findings)} findings")
    return told(findings, "history")


if __name__ == "__main__":
    sys.exit(main())
