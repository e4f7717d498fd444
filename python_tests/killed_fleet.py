"""The Flower example, deployed on this machine. Its server is killed (SIGKILL) at random moments; the SuperLink, the
SuperNodes and their clients run on.

    python python_tests/killed_fleet.py --kills 200 [--seed 1] [--nodes 3] [--folder FOLDER]

After every kill a new run goes on from the checkpoint and the audit log. No upload that an event has told of may be
missing in the log or have another verdict, and every version must have one upload. At the end the log is verified, all
of it is decided again from the uploads, and a last run ends by itself. Clients send noise in place of a training, so
that they need no torch. Prints one JSON line; ends with 1 if anything was lost.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from flower_processes import EXAMPLE, QUIET, events_of, free_port, running, servers_of

from secureafl_ext.audit import log, verify
from secureafl_ext.audit.line import UPLOADS
from secureafl_ext.cli.main import main as secureafl

CLIENT = """
import random
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    dice = np.random.default_rng()
    time.sleep(random.uniform(0.0, 0.2))
    arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
    moved = {name: Array((a + 1e-3 * dice.standard_normal(a.shape)).astype(a.dtype)) for name, a in arrays.items()}
    return Message(RecordDict({"arrays": ArrayRecord(moved)}), reply_to=message)
"""
LONGEST = 600.0  # seconds of a run until its kill
JUDGED = ("accepted", "rejected")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="default: a temporary one")
    chosen = parser.parse_args()
    folder = Path(chosen.folder or tempfile.mkdtemp(prefix="killed-fleet-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= QUIET
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = f"{EXAMPLE.parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    shutil.copytree(EXAMPLE, folder / "app", ignore=shutil.ignore_patterns("__pycache__", "deployment", "results"))
    (folder / "app" / "attacked" / "client.py").write_text('"""Sends noise."""\n' + CLIENT)
    sys.path.insert(0, str(folder / "app"))
    from deploy import Deployment

    with Deployment(folder / "home", chosen.nodes, free_port()) as deployment:
        fleet = Fleet(folder, chosen.nodes, deployment.environment)
        for kill in range(chosen.kills):
            fleet.run_and_kill(random.Random(f"{chosen.seed} {kill}"))
            fleet.check()
        fleet.finish()
    print(json.dumps(fleet.summary()), flush=True)
    return int(bool(fleet.lost))


class Fleet:
    def __init__(self, folder: Path, nodes: int, environment: dict[str, str]):
        self.folder, self.results = folder, folder / "out" / "secureafl"
        self.first = folder / "first.safetensors"
        self.where = {"cwd": folder / "app", "env": environment}
        self.shared = f'capacity={nodes} ttl=900.0 patience=900.0 audit="all" checkpoint-every=4 resume=true '
        self.shared += f'max-staleness=5 evaluations=1 out="{folder}/out"'
        self.began, self.kills, self.lost = time.monotonic(), Counter(), []
        self.recovered: list[int] = []  # calls that a run repeated

    def command(self, updates: int) -> list[str]:
        return ["flwr", "run", ".", "loopback", "--stream", "--run-config", f"{self.shared} updates={updates}"]

    def run_and_kill(self, dice: random.Random) -> None:
        """One run, killed at its start, while it recovers, or after some uploads.

        Flower starts the server of a run again if it is killed early, also when the next run has begun. Whichever comes
        second ends with an error, because the log has one writer. All are killed.
        """
        heard, deadline = len(self.events()), time.monotonic() + LONGEST
        moment = dice.choice(("start", "begin", "work", "work"))
        uploads = {"start": 0, "begin": 1, "work": dice.randint(2, 6)}[moment]
        with running(self.command(10**6), self.folder / "run.log", **self.where) as run:
            while not list(servers_of(self.folder)) or len(self.events()) - heard < uploads:
                self.keep_first()
                if run.poll() is not None and "is in use by another process" in self.said():
                    moment = "second server"
                    break
                if run.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the run did not go on: {self.said()[-2000:]}")
                time.sleep(0.05)
            time.sleep(dice.uniform(0.0, 6.0 if moment == "start" else 0.3))
            for server in servers_of(self.folder):
                with suppress(ProcessLookupError):
                    os.kill(server, signal.SIGKILL)
            self.kills[moment] += 1

    def said(self) -> str:
        return (self.folder / "run.log").read_text()

    def keep_first(self) -> None:
        """The first checkpoint: everything is decided again from it."""
        if not self.first.exists() and (self.results / "server.safetensors").exists():
            shutil.copy(self.results / "server.safetensors", self.first)

    def events(self) -> list[dict]:
        """Those of uploads."""
        try:
            return [event for event in events_of(self.results) if event["kind"] in JUDGED]
        except FileNotFoundError:
            return []

    def uploads(self) -> dict[int, tuple[str, str]]:
        """version -> (node, verdict), as the log has it."""
        lines = [line for line in log.read(self.results / "audit") if line.kind in UPLOADS]
        found = {line.version: (line.who, line.kind) for line in lines if line.kind in JUDGED}
        if len(found) != sum(line.kind in JUDGED for line in lines) or sorted(found) != list(range(1, len(found) + 1)):
            self.lost.append(f"versions {sorted(found)[-3:]} of {len(lines)} uploads")
        return found

    def check(self) -> None:
        if not (self.results / "audit").exists():
            return
        logged = self.uploads()
        told = {event["version"]: (str(event["node"]), event["kind"]) for event in self.events()}
        missing = [version for version, about in told.items() if logged.get(version) != about]
        self.lost += [f"version {version}: {told[version]}, the log has {logged.get(version)}" for version in missing]
        print(f"{sum(self.kills.values())} kills, {len(logged)} uploads, {len(self.lost)} lost", file=sys.stderr)

    def finish(self) -> None:
        """A run that ends by itself, and the whole log decided again."""
        with running(self.command(len(self.uploads()) + 5), self.folder / "run.log", **self.where) as run:
            if run.wait(LONGEST) != 0:
                self.lost.append("the last run failed")
        self.check()
        self.recovered = [line.count for line in log.read(self.results / "audit") if line.kind == "recovered"]
        verify(self.results / "audit")
        if secureafl(["audit", "replay", str(self.results / "audit"), "--checkpoint", str(self.first)]):
            self.lost.append("decided again, the log has other verdicts")

    def summary(self) -> dict:
        return {
            "kills": sum(self.kills.values()),
            "moments": dict(self.kills),
            "uploads": len(self.uploads()),
            "events": len(self.events()),
            "recoveries": len(self.recovered),
            "calls repeated": sum(self.recovered),
            "lost": self.lost[:10],
            "seconds": round(time.monotonic() - self.began),
        }


if __name__ == "__main__":
    sys.exit(main())
