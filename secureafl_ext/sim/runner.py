"""Many runs: one after the other, in parallel threads on a GPU, or in processes."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.queues import SimpleQueue
from typing import NamedTuple

import torch

from . import loop
from .loop import Outcome, Point, Stop
from .settings import Settings

log = logging.getLogger(__name__)

SIDE_BY_SIDE = 8  # threads on one GPU: an H200 gets no faster with 12 or 16
POLL_SECONDS = 0.1  # between two reads of the processes' queue

Watch = Callable[[int, Point], None]
Done = Callable[[int, Outcome], None]


class Worker(NamedTuple):
    """In a worker process: the queue for its evaluations, and the event that stops it."""

    points: "SimpleQueue[tuple[int, Point]]"
    stop: Stop


_workers: list[Worker] = []  # of this process: one, or none in the parent


def run_many(
    many: Sequence[Settings], watch: Watch | None = None, done: Done | None = None, processes: int = 1
) -> None:
    """All runs. `watch` gets every evaluation, `done` every outcome, both with the index of the run; never two at once.

    processes: number of worker processes, which share the CPU's threads; each makes one run at a time
    """
    if processes < 1:
        raise ValueError(f"processes must be 1 or more, got {processes}")
    watch, done = watch or (lambda i, point: None), done or (lambda i, outcome: None)
    log.info("%d runs in %d processes", len(many), processes)
    if len(many) > 1:
        set_up(many)
    if processes > 1:
        in_processes(many, watch, done, processes)
    elif all(settings.resolve().device.startswith("cuda") for settings in many):
        in_threads(many, watch, done)
    else:
        for i, settings in enumerate(many):
            done(i, loop.run(settings, partial(watch, i)))


def set_up(many: Sequence[Settings]) -> None:
    """Set up each attack and each defense with its options once. A wrong option is an error before the first run."""
    known: set[str] = set()
    for settings in many:
        place = settings.dataset, settings.data_dir, settings.model, settings.clients, settings.malicious
        attack, defense = (settings.attack, settings.attack_options), (settings.defense, settings.defense_options)
        keys = {repr((place, part)) for part in (("attack", *attack), ("defense", settings.trusted, *defense))}
        if not keys <= known:
            known |= keys
            loop.Rounds(settings.resolve())


def in_threads(many: Sequence[Settings], watch: Watch, done: Done) -> None:
    stop, callback_lock = threading.Event(), threading.Lock()

    def locked_watch(i: int, point: Point) -> None:
        with callback_lock:
            watch(i, point)

    def run_one(i: int) -> None:
        outcome = loop.run(many[i], partial(locked_watch, i), stop)
        with callback_lock:
            done(i, outcome)

    # Set torch's flags once around all threads: they are global, and each run restores the values that it found.
    with loop.exact(), ThreadPoolExecutor(SIDE_BY_SIDE) as pool, stop_on_error(pool, stop):
        for future in [pool.submit(run_one, i) for i in range(len(many))]:
            future.result()


def in_processes(many: Sequence[Settings], watch: Watch, done: Done, count: int) -> None:
    """Threads of one process share Python's lock; processes share only the device."""
    context = get_context("spawn")  # CUDA does not survive a fork
    # A SimpleQueue has no feeder thread: a point is in the queue before its run continues.
    points: SimpleQueue[tuple[int, Point]] = context.SimpleQueue()
    stop = context.Event()
    threads = max(1, torch.get_num_threads() // count)
    workers = ProcessPoolExecutor(count, context, initializer=start_worker, initargs=(points, stop, threads))
    with workers as pool, stop_on_error(pool, stop), cpu_threads(threads):  # the results record this number
        runs = {pool.submit(run_in_worker, i, settings): i for i, settings in enumerate(many)}
        waiting = set(runs)
        while waiting:
            finished, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
            while not points.empty():
                watch(*points.get())
            for future in finished:
                done(runs[future], future.result())


@contextmanager
def stop_on_error(pool: Executor, stop: Stop) -> Iterator[None]:
    """An error or an interrupt stops the other runs at their next evaluation."""
    try:
        yield
    except BaseException:
        stop.set()
        pool.shutdown(cancel_futures=True)
        raise


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start_worker(points: "SimpleQueue[tuple[int, Point]]", stop: Stop, threads: int) -> None:
    """The first call in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which sets `stop`
    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _workers.append(Worker(points, stop))


def exit_with_parent() -> None:
    """Exit if the parent dies; otherwise orphans hold the GPU."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def run_in_worker(i: int, settings: Settings) -> Outcome:
    worker = _workers[0]
    return loop.run(settings, lambda point: worker.points.put((i, point)), worker.stop)
