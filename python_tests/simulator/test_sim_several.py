"""Several runs: in order, in threads on a GPU, in processes; with what is told of them, and how they end."""

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from secureafl_ext.cli import main
from secureafl_ext.defenses import DEFENSES
from secureafl_ext.sim import loop, runner
from secureafl_ext.sim.settings import Settings

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def settings(device="cpu", **changed):
    few = {"clients": 6, "rounds": 12, "batch": 2, "evaluations": 2, "lr": 0.05, "trusted": 8}
    return Settings(device=device, **few | changed).resolve()


@pytest.fixture
def told():
    """What run_many tells, in the order in which it does: (run, round), (run, its outcome)."""

    class Told(list):
        def watch(self, i, point):
            self.append((i, point.round))

        def done(self, i, outcome):
            self.append((i, outcome))

    return Told()


@pytest.fixture
def one_thread():
    """As the processes here have it: other sums for each would be other results."""
    with runner.cpu_threads(1):
        yield


@pytest.mark.parametrize("processes", [1, 2])
def test_every_run_tells_its_points_then_its_outcome(processes, told, one_thread):
    many = [settings(defense=name) for name in ("async-sgd", "secureafl")]
    runner.run_many(many, told.watch, told.done, processes)
    for i, chosen in enumerate(many):
        *points, outcome = [what for run, what in told if run == i]
        assert points == [6, 12]
        assert outcome.settings == chosen and outcome.curve == loop.run(chosen).curve
    if processes == 1:
        assert [i for i, _ in told] == [0] * 3 + [1] * 3


@needs_gpu
@pytest.mark.parametrize("processes", [1, 2])
def test_runs_side_by_side_are_those_alone(processes, told):
    many = [settings("cuda", attack="gaussian", defense=name, rounds=60) for name in DEFENSES]
    runner.run_many(many, done=told.done, processes=processes)
    for i, outcome in told:
        assert outcome.curve == loop.run(many[i]).curve, many[i].defense
    assert len(told) == len(many)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failing_run_is_an_error_of_all(processes, told):
    wrong, others = settings(attack="gaussian", attack_options={"sigma": 3}), set(multiprocessing.active_children())
    rest = [settings(rounds=9_000, evaluations=9_000)] * (processes - 1)
    with pytest.raises(ValueError, match="unknown option 'sigma' of gaussian; choose from std"):
        runner.run_many([wrong, *rest], told.watch, told.done, processes)
    assert not any(isinstance(what, loop.Outcome) for _, what in told)
    assert set(multiprocessing.active_children()) <= others, "other tests have some too"


def test_an_interrupt_ends_the_processes():
    before, others = torch.get_num_threads(), set(multiprocessing.active_children())

    def interrupt(i, point):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_many([settings(rounds=9_000, evaluations=9_000)] * 3, interrupt, processes=2)
    assert set(multiprocessing.active_children()) <= others and torch.get_num_threads() == before


KILLED = """
from secureafl_ext.sim import runner
from secureafl_ext.sim.settings import Settings

if __name__ == "__main__":
    endless = Settings(clients=6, batch=2, rounds=90_000, evaluations=90_000)
    runner.run_many([endless] * 4, lambda i, point: print(i, flush=True), processes=2)
"""


def test_no_process_outlives_the_one_that_began_it(tmp_path):
    """They all write to one pipe, which ends with the last of them."""
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, "-P", str(tmp_path / "killed.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout.readline() in (b"0\n", b"1\n"), "they are at work"
            parent.kill()
            parent.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


def test_no_process_is_no_number_of_them(tmp_path, capsys):
    assert main.main(["run", "--processes", "0", "--out", str(tmp_path)]) == 2
    assert "processes must be 1 or more, got 0" in capsys.readouterr().err
