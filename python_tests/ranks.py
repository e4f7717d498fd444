"""Processes that are the ranks of gloo groups, started once and used by test after test."""

import tempfile
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=20)  # of the groups
ANSWER_WITHIN = 60  # seconds that a test waits for a rank at most: a rank that hangs is an answer too


class Ranks:
    def __init__(self):
        # A fork of this process would inherit torch's threads, half of them. That of a server which has only imported
        # torch starts in no time.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["secureafl_ext", "torch.distributed"])
        self._workers = []

    def run(self, count, task, *arguments, backend="gloo"):
        """What task(process_group, *arguments) returned on each rank, or the exception it raised; None if it died."""
        self._workers = [worker for worker in self._workers if worker[0].is_alive()]
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            assert self._answer(process, ours) == "ready"  # or the time it takes to start would count as a rank's
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self._workers[:count]):
                pipe.send((task, arguments, rank, count, backend, str(Path(folder, "store"))))
            return [self._answer(process, pipe) for process, pipe in self._workers[:count]]

    def _answer(self, process, pipe: Connection):
        try:
            if pipe.poll(ANSWER_WITHIN):
                return pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            return None
        process.kill()
        raise TimeoutError(f"a rank gave no answer within {ANSWER_WITHIN} seconds")

    def close(self):
        for process, pipe in self._workers:
            pipe.close()
            process.join(5)
            process.kill()
            process.join()


def _work(pipe: Connection):
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            task, arguments, rank, count, backend, store = pipe.recv()
        except EOFError:
            return
        try:
            store = dist.FileStore(store, count)
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
            answer = task(dist.group.WORLD, *arguments)
        except Exception as error:
            answer = error
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)
