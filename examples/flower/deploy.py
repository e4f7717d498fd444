"""SuperLink and SuperNodes on this machine, with TLS and node authentication, and the app on them.

python deploy.py [--nodes 3] [--port 9300] [--folder deployment] [--run-config 'updates=30']

Every command is printed as it is run. All ends with the run; a SuperNode's helpers a few seconds later.
"""

import argparse
import os
import shlex
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import certificates

HERE = Path(__file__).resolve().parent
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Deployment:
    """A SuperLink and so many SuperNodes, as a context. Nothing of it touches ~/.flwr."""

    def __init__(self, folder: Path, nodes: int, port: int):
        self.folder, self.nodes, self.port = folder.resolve(), nodes, port
        self.environment = os.environ | QUIET | {"FLWR_HOME": str(self.folder / "home")}
        self.started: dict[str, subprocess.Popen] = {}
        self.tls = [f"--ssl-ca-certfile={self.folder}/ca.pem", f"--ssl-certfile={self.folder}/superlink.pem"]
        self.tls.append(f"--ssl-keyfile={self.folder}/superlink.key")

    def __enter__(self) -> "Deployment":
        certificates.make(self.folder, self.nodes)
        (self.folder / "home").mkdir(exist_ok=True)
        link = f'[superlink.loopback]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{self.folder}/ca.pem"\n'
        (self.folder / "home" / "config.toml").write_text(link)
        try:
            self.superlink()
            for k in range(self.nodes):
                self.call("flwr", "supernode", "register", f"{self.folder}/node-{k}.pub", "loopback")
                self.supernode(k)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.started.values()):
            process.terminate()
        for process in self.started.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def superlink(self) -> None:
        nothing_else = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.start("superlink", "flower-superlink", *self.tls, *nothing_else, "--host=127.0.0.1", f"--port={self.port}")
        trusted = ssl.create_default_context(cafile=self.folder / "ca.pem")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.started["superlink"].poll() is None:
            try:
                urllib.request.urlopen(f"https://127.0.0.1:{self.port}/health", context=trusted, timeout=5)
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        raise RuntimeError(f"the SuperLink did not start: see {self.folder}/superlink.log")

    def supernode(self, k: int) -> None:
        link = [f"--superlink=127.0.0.1:{self.port}", f"--root-certificates={self.folder}/ca.pem"]
        own = [f"--auth-supernode-private-key={self.folder}/node-{k}", *self.tls]
        own += ["--host=127.0.0.1", f"--port={self.port + 1 + k}"]  # of what its own helpers talk to
        config = f"--node-config=partition-id={k} num-partitions={self.nodes}"
        self.start(f"node-{k}", "flower-supernode", *link, *own, config)

    def start(self, name: str, *command: str) -> None:
        print("+", shlex.join(command), "&", flush=True)
        with open(self.folder / f"{name}.log", "ab") as log:
            self.started[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def call(self, *command: str) -> None:
        print("+", shlex.join(command), flush=True)
        subprocess.run(command, cwd=HERE, env=self.environment, check=True)

    def run(self, config: str) -> None:
        self.call("flwr", "run", ".", "loopback", "--stream", "--run-config", config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--port", type=int, default=9300, help="of the SuperLink; the SuperNodes have the next ones")
    parser.add_argument("--folder", type=Path, default=Path("deployment"), help="for keys, logs and results")
    parser.add_argument("--run-config", default="updates=30 evaluations=6")
    chosen = parser.parse_args()
    with Deployment(chosen.folder, chosen.nodes, chosen.port) as deployment:
        shared = f'capacity={chosen.nodes} malicious=0.34 out="{deployment.folder}/results"'
        deployment.run(f"{shared} {chosen.run_config}")


if __name__ == "__main__":
    sys.exit(main())
