"""An audited server that is killed (SIGKILL) at random moments, recovered, and compared with one that never was.

    python python_tests/killed_server.py --kills 200 [--seed 1] [--folder FOLDER]

A child submits and reports every receipt through a pipe. After each kill a new child recovers and tells how many calls
it has and the digest of its state: no call that was reported may be missing, and the state must be that of a plain
server after the same calls. Torch is imported once and every child forked off. Prints one JSON line.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from engines import ENGINES, make

from secureafl_ext import SecureAFL
from secureafl_ext.audit import Audited, log, verify
from secureafl_ext.audit.facts import digest
from secureafl_ext.audit.line import CALLS

KILLS_PER_RUN = 10  # then another engine, and a new log
SPAN = 0.15  # seconds within which a child is killed
SAVE_EVERY = 20  # calls


def call(server, number):
    """Call number `number`: mostly an upload, at times a stale one, or a client that leaves or is erased."""
    dice = torch.Generator().manual_seed(number)
    client, kind, back = torch.randint(0, 10**6, (3,), generator=dice).tolist()
    client %= server.clients
    if kind % 20 == 0:
        server.leave(client)
    elif kind % 20 == 1:
        server.forget(client)
    else:
        kept = max(0, server.version - back % (server.config.max_staleness + 1))
        model = server.model_at(kept)
        update = (0.5 + client) * (model - client) + 0.1 * torch.randn(len(model), generator=dice).to(model)
        server.submit(client, update, 0 if kind % 20 == 2 else kept)


def child(engine, folder, pipe):
    """Recover, say so, and go on until the kill."""
    path = folder / "server.safetensors"
    plain = SecureAFL.load(path) if path.exists() else make(engine)
    server = Audited(plain, folder / "audit", keep="recent", rotate=20_000)
    server.recover()
    done = sum(line.kind in CALLS for line in log.read(folder / "audit"))
    os.write(pipe, f"recovered {done} {digest(plain.state_dict())}\n".encode())
    while True:
        call(server, done)
        done += 1
        os.write(pipe, f"acknowledged {done}\n".encode())
        if done % SAVE_EVERY == 0:
            server.save(path)


def killed_child(engine, folder, dice):
    """All that a child reported before it was killed, as lines of words."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            child(engine, folder, writer)
        finally:
            os._exit(1)  # a child never ends by itself
    os.close(writer)
    try:
        if dice.random() < 0.5:  # otherwise the kill may come while the child recovers
            select.select([reader], [], [], 60)
        time.sleep(dice.uniform(0, SPAN))
        os.kill(process, signal.SIGKILL)
        with open(reader, closefd=False) as pipe:
            reports = [line.split() for line in pipe]
    finally:
        os.close(reader)
        status = os.waitpid(process, 0)[1]
    if not os.WIFSIGNALED(status):
        sys.exit("a child failed; it says why above")
    return reports


class Run:
    """One log, the server that is killed, and a plain twin that gets the same calls."""

    def __init__(self, engine, folder, found):
        self.engine, self.folder, self.found = engine, folder, found
        self.twin, self.done, self.acknowledged = make(engine), 0, 0

    def kill(self, dice):
        reports = killed_child(self.engine, self.folder, dice)
        self.found["kills"] += 1
        self.found["kills amid a recovery"] += not reports
        self.found["kills amid a save"] += any(self.folder.glob(".*.partial"))
        for kind, done, *state in reports:
            if kind == "recovered":
                self.compare(int(done), *state)
            self.acknowledged = int(done)

    def compare(self, done, state):
        self.found["recoveries"] += 1
        self.found["acknowledged and lost"] += max(0, self.acknowledged - done)
        self.found["logged, not acknowledged"] += max(0, done - self.acknowledged)
        while self.done < done:
            call(self.twin, self.done)
            self.done += 1
        self.found["other states"] += digest(self.twin.state_dict()) != state

    def end(self):
        """The last kill is recovered from too, here, and the whole chain is checked."""
        path = self.folder / "server.safetensors"
        plain = SecureAFL.load(path) if path.exists() else make(self.engine)
        with Audited(plain, self.folder / "audit", keep="recent") as server:
            server.recover()
            done = sum(line.kind in CALLS for line in log.read(self.folder / "audit"))
            self.compare(done, digest(plain.state_dict()))
            kinds = verify(self.folder / "audit", server.head).kinds
        self.found["runs"] += 1
        self.found["calls"] += done
        self.found["half lines mended"] += kinds["mended"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a process with threads of its own must not fork
    dice, found, folder = random.Random(options.seed), Counter(), options.folder or Path(tempfile.mkdtemp())
    try:
        while found["kills"] < options.kills:
            engine, place = list(ENGINES)[found["runs"] % len(ENGINES)], folder / f"run{found['runs']}"
            place.mkdir(parents=True)
            run = Run(engine, place, found)
            for _ in range(min(KILLS_PER_RUN, options.kills - found["kills"])):
                run.kill(dice)
            run.end()
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
