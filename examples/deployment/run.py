"""Run the app on the SuperLink until it is done: python run.py APP LINK [--run-config '..']

Exit status 0: the run completed, or somebody stopped it. 1: it failed. Whatever restarts this on failure (compose,
systemd, Kubernetes) thereby continues the training from its last checkpoint, if the run's settings say resume=true.
A run of this app that has not ended is not started a second time: two servers must not write one checkpoint.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

PAUSE = 5.0  # seconds before a lost SuperLink is asked again


def flwr(*words: str) -> dict:
    """What `flwr` says, as JSON. It prints a line for people first."""
    done = subprocess.run(["flwr", *words, "--format", "json"], stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout[done.stdout.index("{") :])
    if not said.get("success"):
        raise RuntimeError(f"flwr {words[0]}: {said.get('error-message', said)}")
    return said


def app_id(app: Path) -> str:
    described = tomllib.loads((app / "pyproject.toml").read_text())
    return f"{described['tool']['flwr']['app']['publisher']}/{described['project']['name']}"


def unfinished(app: Path, link: str) -> str | None:
    """The id of a run of this app that has not ended."""
    for run in flwr("list", link)["runs"]:
        if run["fab-id"] == app_id(app) and not run["status"].startswith("finished"):
            return run["run-id"]
    return None


def outcome(run: str, link: str) -> str:
    """Wait until the run has ended, and show its log. completed, stopped or failed."""
    while True:
        try:
            subprocess.run(["flwr", "log", run, link, "--stream"])  # ends with the run, or with the connection
            (state,) = flwr("list", link, "--run-id", run)["runs"]
            if state["status"].startswith("finished"):
                print(f"run {run}: {state['status']} {state['status-details']}", flush=True)
                return state["status"].partition(":")[2]
        except (subprocess.CalledProcessError, RuntimeError, ValueError) as error:
            print(f"run {run}: no answer from the SuperLink: {error}", flush=True)
        time.sleep(PAUSE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("app", type=Path)
    parser.add_argument("link", help="name of the connection in $FLWR_HOME/config.toml")
    parser.add_argument("--run-config", default="resume=true")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a container's first process would ignore it
    run = unfinished(chosen.app, chosen.link)
    if run is None:
        run = flwr("run", str(chosen.app), chosen.link, "--run-config", chosen.run_config)["run-id"]
    print(f"run {run} of {app_id(chosen.app)}", flush=True)
    return 1 if outcome(run, chosen.link) == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
