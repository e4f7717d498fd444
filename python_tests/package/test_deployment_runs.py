"""The commands of examples/deployment/compose.yaml on loopback: SuperLink, gateway, SuperExec, SuperNodes, a run."""

import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
yaml = pytest.importorskip("yaml")

from flower_processes import events_of, free_port, listens, running, said_by, server_of, wait_for  # noqa: E402
from places import ROOT  # noqa: E402

DEPLOYMENT = ROOT / "examples" / "deployment"
NODES = 2
HAS_METRICS = importlib.util.find_spec("secureafl_ext.operate.prometheus") and importlib.util.find_spec(
    "prometheus_client"
)


class Loopback:
    """The services of compose.yaml as processes of this machine: the same words, other folders and ports."""

    def __init__(self, folder: Path, stack: ExitStack, monkeypatch):
        self.folder, self.stack, self.monkeypatch = folder, stack, monkeypatch
        self.services = yaml.safe_load((DEPLOYMENT / "compose.yaml").read_text())["services"]
        self.port, self.gateway, self.metrics = free_port(), free_port(), free_port()
        self.health: dict[str, int] = {}
        link = (DEPLOYMENT / "flwr" / "config.toml").read_text()
        (folder / "home" / "config.toml").write_text(self.moved(link))

    def moved(self, text: str) -> str:
        here = {
            "superlink:8000": f"127.0.0.1:{self.port}",
            "gateway:9443": f"127.0.0.1:{self.gateway}",
            "localhost:8000": f"localhost:{self.port}",
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--port=8000": f"--port={self.port}",
            "--port=9094": f"--port={free_port()}",
            "/opt/deployment": str(DEPLOYMENT),
            "/opt/app": str(self.folder / "app"),
            "/keys": f"{self.folder}/keys",
            "/state": f"{self.folder}/state",
        }
        for there, where in here.items():
            text = re.sub(rf"(?<![\w/]){re.escape(there)}(?!\w)", where, text)
        return text

    def words(self, service: str) -> list[str]:
        words = self.services[service]["command"]
        node = service.partition("node-")[2]
        words = [word.replace("/keys/node/", f"/keys/nodes/{node}/") for word in words]
        if any("9098" in word for word in words):
            self.health[service] = free_port()
        return [self.moved(word.replace("9098", str(self.health.get(service)))) for word in words]

    def start(self, service: str, words: list[str] | None = None) -> subprocess.Popen:
        log = self.folder / f"{service}.log"
        return self.stack.enter_context(running(words or self.words(service), log))

    def start_gateway(self) -> None:
        given = {name: self.moved(text) for name, text in self.services["gateway"]["environment"].items()}
        ports = {"GATEWAY_FLEET": self.gateway, "GATEWAY_METRICS": free_port()}
        for name, text in (given | {name: f"127.0.0.1:{port}" for name, port in ports.items()}).items():
            self.monkeypatch.setenv(name, text)
        self.start("gateway", ["haproxy", "-db", "-f", str(DEPLOYMENT / "gateway" / "haproxy.cfg")])

    def run_words(self) -> list[str]:
        """As few nodes as the test has, a checkpoint after every update, and time for a slow machine."""
        *words, settings = self.words("run")
        served = f"127.0.0.1:{self.metrics}" if HAS_METRICS else ""
        patient = f"capacity={NODES} ttl=900.0 patience=1800.0 slowest=0.2 malicious=0.0"
        for old, new in {"capacity=3": patient, "every=20": "every=1", "0.0.0.0:9464": served}.items():
            assert settings.count(old) == 1 and "resume=true" in settings, settings
            settings = settings.replace(old, new)
        return [sys.executable, *words[1:], settings]

    def check_health(self, *words: str) -> None:
        command = [word for word in self.services["superlink"]["healthcheck"]["test"] if word.endswith("health.py")]
        subprocess.run([sys.executable, *map(self.moved, command), *words], check=True)

    def live_run(self) -> str:
        done = subprocess.run(["flwr", "list", "production", "--format", "json"], stdout=subprocess.PIPE, check=True)
        (run,) = [run for run in json.loads(done.stdout)["runs"] if not run["status"].startswith("finished")]
        return run["run-id"]


@pytest.mark.slow
@pytest.mark.usefixtures("flower")
def test_the_fleet_trains_through_the_gateway_and_a_killed_server_is_continued(tmp_path, monkeypatch):
    results = tmp_path / "state" / "results" / "secureafl"
    (tmp_path / "state").mkdir()
    with ExitStack() as stack:
        fleet = Loopback(tmp_path, stack, monkeypatch)
        subprocess.run([sys.executable, *fleet.words("keys")[1:]], check=True)
        fleet.start("superlink")
        wait_for(lambda: listens(fleet.port), 120, "the SuperLink answers")
        authority = str(tmp_path / "keys" / "trust" / "ca.crt")
        fleet.check_health(f"https://localhost:{fleet.port}/health", authority)
        if shutil.which("haproxy"):
            fleet.start_gateway()
            wait_for(lambda: listens(fleet.gateway), 60, "the gateway answers")
            only_the_fleet_api_passes(fleet, tmp_path)
        else:
            fleet.gateway = fleet.port  # the rest is the same without it
        for k in range(NODES):
            subprocess.run(
                ["flwr", "supernode", "register", f"{tmp_path}/keys/public/node-{k}.pub", "production"], check=True
            )
            fleet.start(f"node-{k}")
        fleet.start("serverapp")
        first = fleet.start("run", fleet.run_words())

        def saved():
            assert first.poll() is None, (tmp_path / "run.log").read_text()[-3000:]
            return len(said_by(results)) == NODES and (results / "server.safetensors").exists()

        wait_for(saved, 900, "a checkpoint that knows all nodes")
        for service, port in fleet.health.items():
            assert listens(port), service
            fleet.check_health(f"127.0.0.1:{port}")
        if HAS_METRICS:
            with urllib.request.urlopen(f"http://127.0.0.1:{fleet.metrics}/metrics", timeout=60) as page:
                assert b"secureafl" in page.read()
        os.kill(server_of(tmp_path), signal.SIGKILL)
        assert first.wait(300) == 1  # so that it is started again
        before = events_of(results)
        second = fleet.start("run", fleet.run_words())
        wait_for(lambda: judged(events_of(results)[len(before) :]), 600, "the training continues")
        again = judged(events_of(results)[len(before) :])
        last = judged(before)[-1]["version"]  # its checkpoint may have come too late
        assert again[0]["version"] in (last, last + 1) and last > 0
        assert not any("first contact" in event["reason"] for event in again)
        subprocess.run(["flwr", "stop", fleet.live_run(), "production"], check=True)
        assert second.wait(300) == 0  # so that it is not


def judged(events):
    return [event for event in events if event["kind"] in ("accepted", "rejected")]


def only_the_fleet_api_passes(fleet, folder):
    """A client that reaches the SuperLink itself may list and start runs. Behind the gateway it may not."""
    config = folder / "home" / "config.toml"
    plain = config.read_text()
    config.write_text(plain + plain.replace("production", "outside").replace(str(fleet.port), str(fleet.gateway)))
    inside, outside = (
        subprocess.run(["flwr", "list", link], capture_output=True, text=True) for link in ("production", "outside")
    )
    assert inside.returncode == 0, inside.stderr
    assert outside.returncode != 0
    trusted = ssl.create_default_context(cafile=folder / "keys" / "trust" / "ca.crt")

    def status(path, method="POST", **headers):
        connection = http.client.HTTPSConnection("localhost", fleet.gateway, context=trusted, timeout=20)
        with closing(connection):
            connection.request(method, path, headers=headers)
            return connection.getresponse().status

    for path in (
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/list-runs",
        "/docs",
        "/health",
    ):
        assert status(path) == 403, path
    assert status("/v1/fleet/get-run", "GET") == 403
    assert status("/v1/fleet/push-object", **{"Content-Length": str(10**9)}) == 413
    assert status("/v1/fleet/get-run") in (401, 415)  # passed on to Flower, which wants a signed message
