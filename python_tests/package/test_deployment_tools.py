"""examples/deployment: certificates of keys.py are trusted by strict clients, run.py tells how a run ended."""

import importlib.util
import json
import ssl
import sys

import pytest
from places import ROOT

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

DEPLOYMENT = ROOT / "examples" / "deployment"
NAMES = ["gateway", "fleet.example.org", "127.0.0.1"]


@pytest.fixture
def tool(monkeypatch):
    """A script of the deployment, as a module."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # keys.py extends it

    def load(name):
        spec = importlib.util.spec_from_file_location(f"deployment_{name}", DEPLOYMENT / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def handshake(folder, service, name):
    """TLS between a strict client, as of Python 3.13, and this service, in memory."""
    trusting = ssl.create_default_context(cafile=folder / "trust" / "ca.crt")
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / service / "tls.crt", folder / service / "tls.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(down, up, server_hostname=name)
    server = serving.wrap_bio(up, down, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.version()


def test_strict_clients_trust_the_services_by_their_names_only(tool, tmp_path):
    tool("keys").make(tmp_path, 1, 90, NAMES)
    for service, name in (("superlink", "superlink"), ("gateway", "fleet.example.org"), ("gateway", "127.0.0.1")):
        assert handshake(tmp_path, service, name) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(tmp_path, "superlink", "gateway")


def test_keys_makes_what_is_missing_and_replaces_nothing(tool, tmp_path):
    keys = tool("keys")
    made = keys.make(tmp_path, 2, 90, NAMES)
    before = {path: path.read_bytes() for path in made}
    assert len(before) == len(made) == 12 and keys.make(tmp_path, 2, 90, NAMES) == []
    (tmp_path / "gateway" / "tls.crt").unlink()
    renewed = keys.make(tmp_path, 3, 90, NAMES)
    parts = {str(path.relative_to(tmp_path)) for path in renewed}
    assert parts == {"gateway/tls.crt", "gateway/tls.key", "nodes/2/key", "public/node-2.pub"}
    assert all(path.read_bytes() == content for path, content in before.items() if path not in renewed)
    assert handshake(tmp_path, "gateway", "gateway")


def test_secrets_are_readable_by_their_owner_only(tool, tmp_path):
    made = tool("keys").make(tmp_path, 1, 90, NAMES)
    public = {".crt", ".pub"}
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in made if path.suffix not in public}
    assert modes.pop("grafana/password") == 0o640  # Grafana is another user of the same group
    assert len(modes) == 5 and set(modes.values()) == {0o600}


def test_keys_refuses_half_an_authority(tool, tmp_path):
    keys = tool("keys")
    keys.make(tmp_path, 0, 90, NAMES)
    (tmp_path / "authority" / "ca.key").unlink()  # it is offline, as it should be
    (tmp_path / "gateway" / "tls.crt").unlink()
    with pytest.raises(SystemExit, match="only one of them exists"):
        keys.make(tmp_path, 0, 90, NAMES)
    assert not (tmp_path / "gateway" / "tls.crt").exists()


class SuperLink:
    """Stands for `flwr`: knows runs, and ends the one whose log is read."""

    def __init__(self, ends, runs=(), lost=0):
        self.ends, self.runs, self.lost, self.started = ends, dict(runs), lost, []

    def flwr(self, *words):
        if words[0] == "run":
            self.started.append(words)
            self.runs["7"] = "running"
            return {"success": True, "run-id": "7"}
        if self.lost and "--run-id" in words:
            self.lost -= 1
            raise RuntimeError("connection refused")
        shown = [words[words.index("--run-id") + 1]] if "--run-id" in words else self.runs
        fab = "secureafl/attacked"
        rows = [{"run-id": run, "fab-id": fab, "status": self.runs[run], "status-details": ""} for run in shown]
        return {"success": True, "runs": rows}

    def log(self, words):
        assert words[:2] == ["flwr", "log"] and words[-1] == "--stream"
        self.runs[words[2]] = self.ends.pop(0)


@pytest.fixture
def ran(tool, monkeypatch, tmp_path):
    """The exit status of run.py at this SuperLink."""
    run = tool("run")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "attacked"\n[tool.flwr.app]\npublisher = "secureafl"\n')

    def with_(link, *words):
        monkeypatch.setattr(run, "flwr", link.flwr)
        monkeypatch.setattr(run.subprocess, "run", link.log)
        monkeypatch.setattr(run, "PAUSE", 0)
        monkeypatch.setattr(run.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path), "production", *words])
        return run.main()

    return with_


@pytest.mark.parametrize(
    ("end", "status"), [("finished:completed", 0), ("finished:stopped", 0), ("finished:failed", 1)]
)
def test_only_a_failed_run_asks_for_another(ran, end, status):
    link = SuperLink([end])
    assert ran(link, "--run-config=resume=true updates=5") == status
    (words,) = link.started
    assert words[-1] == "resume=true updates=5"


def test_a_run_that_goes_on_is_not_started_twice(ran):
    link = SuperLink(["finished:completed"], {"3": "running", "2": "finished:failed"})
    assert ran(link) == 0 and link.started == [] and link.runs["3"] == "finished:completed"


def test_a_lost_superlink_is_asked_again(ran):
    link = SuperLink(["running", "running", "finished:failed"], lost=1)
    assert ran(link) == 1 and len(link.started) == 1


def test_flwr_reads_json_behind_words_for_people_and_says_errors(tool, monkeypatch, tmp_path):
    run = tool("run")
    answer = tmp_path / "flwr"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def says(text):
        answer.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        answer.chmod(0o755)
        return run.flwr("list", "production")

    assert says("Successfully started\n" + json.dumps({"success": True, "runs": []})) == {"success": True, "runs": []}
    with pytest.raises(RuntimeError, match="flwr list: no such run"):
        says(json.dumps({"success": False, "error-message": "no such run"}))
    with pytest.raises(ValueError):
        says("Connection refused")
