"""Flower's own processes for the tests of its examples: an app's folder, ports, what servers and clients have said."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from places import ROOT

EXAMPLE = ROOT / "examples" / "flower"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture
def flower(tmp_path, monkeypatch):
    """The app's own copy, a home of its own for Flower, and no process left behind whatever happens."""
    for name, value in {**QUIET, "FLWR_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    # Flower's commands lie beside this Python, and its processes import the package that is tested.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    (tmp_path / "home").mkdir()
    shutil.copytree(EXAMPLE, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__", "deployment", "results"))
    yield tmp_path
    mine = b"FLWR_HOME=" + str(tmp_path).encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mine in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it has ended meanwhile, or is another user's
            pass


@contextmanager
def running(command, log, **settings):
    with open(log, "wb") as file, subprocess.Popen(command, stdout=file, stderr=file, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(ready, seconds, what):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.2)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def events_of(folder):
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


def said_by(results):
    """client -> node, of those that were heard."""
    events = events_of(results) if (results / "events.jsonl").exists() else []
    return {event["metrics"]["client"]: event["node"] for event in events if event["metrics"]}


def server_of(folder):
    server = next(servers_of(folder), None)
    assert server, "no flwr-serverapp runs"
    return server


def servers_of(folder):
    """Processes of servers whose environment names the folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = str(folder).encode() in (process / "environ").read_bytes()
            if ours and b"flwr-serverapp" in (process / "cmdline").read_bytes():
                yield int(process.name)
        except OSError:  # it has ended meanwhile, or is another user's
            pass
