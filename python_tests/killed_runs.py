"""Runs that are killed (SIGKILL) at random moments and resumed: python killed_runs.py FOLDER KILLS SEED, a JSON line.

Torch is imported once and every run forked off: a run then takes no longer than its rounds and saves.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from engines import ENGINES, make, run

from secureafl_ext import SecureAFL

ROUNDS, EVERY = 60, 3


def go_on(engine, path):
    server = SecureAFL.load(path) if path.exists() else make(engine)
    while server.version < ROUNDS:
        run(server, 1)
        if server.version % EVERY == 0:
            server.save(path)


def forked(engine, path):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            go_on(engine, path)
            status = 0
        finally:
            os._exit(status)
    return child


def ended(child):
    """Whether it came to its end by itself."""
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a run failed; it says why above")
    return os.WIFEXITED(status)


def main():
    folder, kills, dice = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    found = {"kills": 0, "kills amid a save": 0, "runs": 0, "other ends": [], "files left": []}
    while found["kills"] < kills:
        engine = list(ENGINES)[found["runs"] % len(ENGINES)]
        whole, path = folder / "whole" / "server", folder / "killed" / "server"
        for file in (whole, path):
            file.parent.mkdir(exist_ok=True)
            file.unlink(missing_ok=True)
        began = time.monotonic()
        assert ended(forked(engine, whole))
        span = (time.monotonic() - began) / 3
        while True:
            child = forked(engine, path)
            if found["kills"] < kills:
                time.sleep(dice.uniform(0, span))
                os.kill(child, signal.SIGKILL)
            if ended(child):
                break
            found["kills"] += 1
            found["kills amid a save"] += any(file.name.endswith(".partial") for file in path.parent.iterdir())
        found["runs"] += 1
        if path.read_bytes() != whole.read_bytes():
            found["other ends"].append(engine)
        found["files left"] += [file.name for file in path.parent.iterdir() if file != path]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
