"""Several runs: one after the other, on a GPU in threads side by side, or in processes of their own."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.queues import SimpleQueue

import torch

from . import loop
from .loop import Outcome, Point
from .settings import Settings

SIDE_BY_SIDE = 8  # threads on one GPU: an H200 gets no faster with 12 or 16
LOOK = 0.1  # seconds between two looks at what processes tell
WORKER = {}  # in a process: where its points go, what ends it

Watch = Callable[[int, Point], None]
Done = Callable[[int, Outcome], None]


def run_many(many: list[Settings], watch: Watch | None = None, done: Done | None = None, processes: int = 1) -> None:
    """All of them. The callbacks get a run's place in the list, one at a time.

    processes: so many share the work, each with one run at a time, and the CPU's threads
    """
    if processes < 1:
        raise ValueError(f"processes must be 1 or more, got {processes}")
    watch, done = watch or (lambda i, point: None), done or (lambda i, outcome: None)
    if processes > 1:
        in_processes(many, watch, done, processes)
    elif all(settings.resolve().device.startswith("cuda") for settings in many):
        in_threads(many, watch, done)
    else:
        for i, settings in enumerate(many):
            done(i, loop.run(settings, partial(watch, i)))


def in_threads(many: list[Settings], watch: Watch, done: Done) -> None:
    stop, one_at_a_time = threading.Event(), threading.Lock()

    def say(what: Callable, *arguments: object) -> None:
        with one_at_a_time:
            what(*arguments)

    def one(i: int) -> None:
        say(done, i, loop.run(many[i], lambda point: say(watch, i, point), stop))

    # Threads that set torch's flags by turns must find the same ones.
    with loop.exact(), ThreadPoolExecutor(SIDE_BY_SIDE) as pool, ending(pool, stop):
        for future in [pool.submit(one, i) for i in range(len(many))]:
            future.result()


def in_processes(many: list[Settings], watch: Watch, done: Done, count: int) -> None:
    """Threads of one process wait for each other wherever Python is at work; processes only for the device."""
    context = get_context("spawn")  # CUDA survives no fork
    news, stop = context.SimpleQueue(), context.Event()  # simple: a point is in it before its run goes on
    threads = max(1, torch.get_num_threads() // count)
    workers = ProcessPoolExecutor(count, context, enter, (news, stop, threads))
    with workers as pool, ending(pool, stop), cpu_threads(threads):  # here too, for who asks what a run had
        runs = {pool.submit(one_of, i, settings): i for i, settings in enumerate(many)}
        waiting = set(runs)
        while waiting:
            finished, waiting = wait(waiting, LOOK, FIRST_COMPLETED)
            while not news.empty():
                watch(*news.get())
            for future in finished:
                done(runs[future], future.result())


@contextmanager
def ending(pool: Executor, stop: threading.Event) -> Iterator[None]:
    """What fails or is interrupted ends the other runs too, at their next evaluation."""
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


def enter(news: SimpleQueue, stop: threading.Event, threads: int) -> None:
    """In a process, first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the one that began it, which says when to stop
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    WORKER.update(news=news, stop=stop)


def end_with_parent() -> None:
    """Who is killed says nothing: its processes would keep the device until their runs, and a few more, are done."""
    parent_process().join()
    os._exit(1)


def one_of(i: int, settings: Settings) -> Outcome:
    return loop.run(settings, lambda point: WORKER["news"].put((i, point)), WORKER["stop"])
