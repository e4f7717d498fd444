"""Histories of the Flower loop in a world full of faults, each compared with a plain model (docs/guides/faults.md).

python python_tests/loop_histories.py --histories 100000 --seed 1 --processes 2
History i has the seed SEED + i. A failure prints its seed: `--seed S --histories 1 --verbose` repeats it step by step.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads would only wait for each other

import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from fuzz.dice import Dice
from loop.disk import AtOnce, DiskError, path_on
from loop.model import Model
from loop.replies import SIZE, START
from loop.server import PlainServer
from loop.tables import DivergenceError, need
from loop.world import GridError, Killed, World, draw_faults

from secureafl_ext import SecureAFL
from secureafl_ext.checkpoint import files, tensor_file
from secureafl_ext.flower import Layout, Loop, loop

LR = 0.25
PATIENCE = 300.0
SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # no disk is needed: the simulation has its own fsync


@contextmanager
def patched(world: World) -> Iterator[None]:
    """The loop and its checkpoints in this world. Flower's messages ask which run they are made in: it is 1."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, name, 1)
        patch.setattr(loop, "time", world.clock)
        patch.setattr(loop, "NODES_EVERY", world.looks_every)
        patch.setattr(files, "os", world.disk)
        patch.setattr(files, "open", world.disk.open_file, raising=False)
        patch.setattr(files, "Path", path_on(world.disk))
        patch.setattr(tensor_file, "ThreadPoolExecutor", AtOnce)
        patch.setattr(loop.logger, "disabled", True)
        yield


class History:
    """One loop and its successors, from the first message to a fleet that is calm again."""

    def __init__(self, seed: int, folder: Path, say: Callable[[str], None] | None = None, kill_at: int | None = None):
        self.dice = dice = Dice("loop", seed)
        self.folder, self.path = folder, folder / "loop" if dice.chance(0.9) else None
        capacity = dice.choice((1, 2, 3, 4, 6, 12)) if dice.chance(0.98) else 150
        max_staleness = dice.choice((0, 1, 3, 50))
        if dice.chance(0.15):
            start = torch.zeros(SIZE)
            self.make = lambda: SecureAFL(start, capacity, lr=LR, max_staleness=max_staleness, quantile=0.9)
        else:
            self.make = lambda: PlainServer(torch.zeros(SIZE), capacity, LR, max_staleness)
        share, ttl = dice.choice((0.0, 0.25, 0.5, 0.5, 1.0, dice.random())), dice.choice((0.5, 3.0, 10.0))
        every = dice.choice((1, 2, 3, 5))
        self.settings = {"ttl": ttl, "turns": share, "every": every, "patience": PATIENCE, "checkpoint": self.path}
        self.model = Model(self.make, share, ttl, every if self.path else 10**9)
        self.world = World(dice, draw_faults(dice), self.model, say)
        self.world.kill_at = kill_at
        self.world.join(dice.choice((1, 2, 3, 4, 8)))
        self.aborted = 0
        self.world.tell(f"{capacity} slots, {self.settings}, {self.world.faults}")

    def run(self) -> Counter:
        with patched(self.world):
            self.begin()
            target = 0
            for _ in range(2):
                target += self.dice.randrange(1, 8)
                self.reach(target)
            self.world.calm = True
            self.reach(self.model.twin.version + 2)
            if self.path:
                need([*self.folder.iterdir()] == [self.path], "files left:", [*self.folder.iterdir()])
                self.begin()  # what the file holds is what the loop had
        return self.world.counts + Counter(rounds=self.model.twin.version, touches=self.world.touches)

    def begin(self) -> None:
        """A new process: from the last whole checkpoint, or from nothing."""
        world, model = self.world, self.model
        world.disk.dead, world.failed_pull = False, None
        model.start(model.snapshots[-1] if model.snapshots else None)
        self.loop = Loop(world, self.make(), Layout(START), watch=world.watch, **self.settings)
        world.loop = self.loop
        model.compare(self.loop)
        model.compare_states(self.loop.server)

    def reach(self, target: int) -> None:
        """This many rounds, whatever happens on the way."""
        world, model = self.world, self.model
        while True:
            model.resume(target)
            began = world.now
            try:
                world.tell(f"run to version {target}")
                self.loop.run(target)
            except Killed:
                if not world.disk.cut_power(self.dice.chance(0.5)):
                    world.counts["renames lost in a power cut"] += 1
                    model.snapshots.pop()
                self.begin()
            except (OSError, TimeoutError) as problem:
                self.ended_by(problem, began)
            else:
                break
            self.aborted += 1
            world.calm = world.calm or self.aborted > 6
        model.ended()
        if self.path:
            need(model.snapshots[-1]["server"]["version"] == target, "no checkpoint at the end of a run")
        model.compare(self.loop)
        model.compare_states(self.loop.server)

    def ended_by(self, problem: Exception, began: float) -> None:
        """Only errors of the world may end a run. The loop itself, or a new one, goes on."""
        world, chain = self.world, problem
        while chain and not isinstance(chain, GridError | DiskError):
            chain = chain.__cause__
        if type(problem) is TimeoutError:
            silent = world.now - max(began, world.last_round)
            need(silent > PATIENCE and not world.calm, "gave up after", silent, "s")
            world.calm = True
        elif chain is None:
            raise problem
        world.counts["runs ended by an error"] += 1
        self.model.compare(self.loop)
        if self.dice.chance(0.5):
            self.begin()


def check(seed: int, say: Callable[[str], None] | None = None, kill_at: int | None = None) -> tuple[int, Counter, str]:
    """(seed, counts of what happened, what differs: empty if nothing does)"""
    if seed % 50 == 0:
        gc.collect()
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        try:
            return seed, History(seed, Path(folder), say, kill_at).run(), ""
        except DivergenceError as problem:
            return seed, Counter(), str(problem)
        except Exception:
            return seed, Counter(), traceback.format_exc(limit=-6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first history; the next ones count on")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print every step")
    given = parser.parse_args()
    gc.disable()  # by hand, now and then: it would take a third of the time
    gc.freeze()
    seeds = range(given.seed, given.seed + given.histories)
    counts, failed, began = Counter(), 0, time.monotonic()
    with multiprocessing.get_context("fork").Pool(given.processes) as pool:
        work = map(lambda seed: check(seed, print), seeds) if given.verbose else pool.imap_unordered(check, seeds, 10)
        for done, (seed, found, problem) in enumerate(work, 1):
            counts += found
            if problem:
                failed += 1
                print(f"seed {seed}: {problem}\n  repeat: python {sys.argv[0]} --seed {seed} --histories 1 --verbose")
            if done % 1000 == 0:
                print(f"{done} histories, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"{given.histories} histories, {failed} failed, {time.monotonic() - began:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
