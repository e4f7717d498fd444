"""The files of examples/deployment agree with each other, with Flower's flags and with docs/guides/deploy.md."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployment_files import (
    COMPOSE,
    DEPLOYMENT,
    KUBERNETES,
    PODS,
    ROOT,
    SERVICES,
    UNITS,
    command_lines,
    containers,
    exec_start,
    of_command,
    run_settings,
    yaml,
)

GUIDE = ROOT / "docs" / "guides" / "deploy.md"
FLOWER = ("flower-superlink", "flower-superexec", "flower-supernode")
METRICS, GATEWAY_METRICS = 9464, 8405


# All that is asked of Flower in one process: its import takes seconds.
ASK = """
import contextlib, importlib.metadata, io, json, sys
from flwr.superlink.routers.fleet.router import router
said = {"fleet": " ".join(route.path for route in router.routes)}
for command in importlib.metadata.entry_points(group="console_scripts"):
    if command.name in sys.argv[1:]:
        main, names = command.load(), sys.argv
        with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
            sys.argv = [command.name, "--help"]
            main()
        sys.argv, said[command.name] = names, page.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def helps():
    """command -> what it says to --help; fleet -> the paths of the Fleet API."""
    quiet = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    words = {"flower": [sys.executable, "-c", ASK, *FLOWER]}
    words |= {name: [sys.executable, str(DEPLOYMENT / name), "--help"] for name in ("run.py", "keys.py")}
    said = {
        name: subprocess.run(command, stdout=subprocess.PIPE, env=quiet, text=True, check=True, timeout=300).stdout
        for name, command in words.items()
    }
    said |= json.loads(said.pop("flower").splitlines()[-1])
    assert said.keys() == {*FLOWER, "run.py", "keys.py", "fleet"}
    return said


def test_every_command_line_uses_flags_that_exist(helps):
    checked = 0
    known_flags = {name: set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) for name, text in helps.items()}
    for where, (command, *words) in command_lines().items():
        for word in words:
            if command in known_flags and word.startswith("--"):
                assert word.partition("=")[0] in known_flags[command], f"{where}: {word}"
                checked += 1
    assert checked > 50 and all(of_command(name) for name in (*FLOWER, "run.py"))


@pytest.mark.parametrize("command", FLOWER)
def test_compose_kubernetes_and_systemd_give_a_command_the_same_flags(command):
    local = {"--health-server-address"}  # a probe of Kubernetes needs it, systemd asks nobody
    flags = {where: {w.partition("=")[0] for w in words} - local for where, words in of_command(command).items()}
    assert len({frozenset(names) for names in flags.values()}) == 1, flags
    assert all("--insecure" not in names for names in flags.values())


def test_the_superlink_wants_tls_keys_of_nodes_and_the_secret_of_superexec():
    for where, words in of_command("flower-superlink").items():
        given = dict(word.partition("=")[::2] for word in words)
        assert {"--ssl-certfile", "--ssl-keyfile", "--enable-supernode-auth", "--database"} <= given.keys(), where
        assert given["--isolation"] == "process" and given["--superexec-auth-secret-file"], where


def test_ports_are_published_on_loopback_only():
    ports = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert all(port.startswith("127.0.0.1:") for published in ports.values() for port in published), ports
    assert not ports["superlink"] and not ports["serverapp"]
    assert all(part["spec"].get("type", "ClusterIP") == "ClusterIP" for part in KUBERNETES if part["kind"] == "Service")
    assert "--host=127.0.0.1" in exec_start(UNITS["secureafl-superlink.service"])
    here = "GATEWAY_FLEET=127.0.0.1:9443 GATEWAY_METRICS=127.0.0.1:8405"
    assert f"\nEnvironment={here}\n" in UNITS["secureafl-gateway.service"]
    assert not any("network_mode" in s and s["network_mode"] == "host" for s in SERVICES.values())


def test_clients_reach_the_gateway_and_nothing_else():
    inner = {name for name, network in COMPOSE["networks"].items() if network.get("internal")}
    assert inner == {"control", "metrics"}
    assert all(set(SERVICES[name]["networks"]) <= inner for name in ("superlink", "serverapp", "run"))  # no way out
    nodes = [name for name in SERVICES if name.startswith("node-")]
    assert len(nodes) == 3 and all(SERVICES[name]["networks"] == ["fleet"] for name in nodes)
    on = {net: {n for n, s in SERVICES.items() if net in s.get("networks", [])} for net in COMPOSE["networks"]}
    assert on["fleet"] == {*nodes, "gateway"}
    assert on["control"] == {"superlink", "serverapp", "run", "operator", "gateway"}
    for where, words in of_command("flower-supernode").items():
        assert any(word.startswith(("--superlink=gateway:9443", "--superlink=${GATEWAY}")) for word in words), where
    policies = {part["metadata"]["name"]: part["spec"] for part in KUBERNETES if part["kind"] == "NetworkPolicy"}
    assert policies["nothing"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (rule,) = policies["superlink"]["ingress"]
    (allowed,) = rule["from"][0]["podSelector"]["matchExpressions"]
    assert allowed["values"] == ["gateway", "serverapp", "run"]


def test_the_gateway_passes_all_of_flowers_fleet_api_and_nothing_else(helps):
    config = (DEPLOYMENT / "gateway" / "haproxy.cfg").read_text()
    passed = {path for line in re.findall(r"acl fleet_api path (.*)", config) for path in line.split()}
    assert passed == set(helps["fleet"].split())
    assert re.search(r"http-request deny .* unless fleet_api METH_POST$", config, re.MULTILINE)


def test_images_have_versions():
    images = [s["image"] for s in SERVICES.values()] + [container["image"] for _, _, container in containers()]
    recipe = (DEPLOYMENT / "Containerfile").read_text()
    images += re.findall(r"^ARG \w+_IMAGE=(.*)$", recipe, re.MULTILINE)
    assert all(re.fullmatch(r"[a-z/-]+:v?\d[\w.-]*", image) for image in images), images
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", recipe, re.MULTILINE)
    assert [name for _, name in stages] == ["wheel", "runtime", "client", "server"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert all(image.endswith(f":{ours}") for image in images if image.startswith("secureafl"))


def test_containers_run_without_root_on_a_file_system_that_they_cannot_write():
    for name, service in SERVICES.items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert int(service["user"].split(":")[0]) > 0, name
        if "profiles" not in service:
            assert service["restart"] in ("unless-stopped", "on-failure"), name
            assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory", "pids"}, name
            assert "healthcheck" in service or name == "run", name
    for name, pod, container in containers():
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["automountServiceAccountToken"] is False, name
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"], name
        assert own["capabilities"] == {"drop": ["ALL"]} and container["resources"]["limits"]["memory"], name
        assert "livenessProbe" in container or name == "run", name
    users = re.findall(r"^USER (.*)$", (DEPLOYMENT / "Containerfile").read_text(), re.MULTILINE)
    assert users == ["10001:10001"]
    for name, unit in UNITS.items():
        wanted = ("NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet=\n", "Restart=on-failure")
        assert all(f"\n{line}" in unit for line in wanted), name
        assert "\nUser=secureafl" in unit or "\nDynamicUser=yes" in unit, name


def mounts(service):
    """(source, target, whether it is read-only)"""
    parts = [volume.split(":") for volume in service.get("volumes", [])]
    return [(source, target, mode == ["ro"]) for source, target, *mode in parts]


def test_mounted_files_exist_and_a_key_is_seen_by_its_owner_only():
    seen = {}
    for name, service in SERVICES.items():
        for source, target, read_only in mounts(service):
            if source.startswith("./"):
                pending = source == "./grafana/secureafl.json"  # test_the_dashboard_reads.. has it
                assert read_only and (pending or (DEPLOYMENT / source).exists()), f"{name}: {source}"
            else:
                seen.setdefault(source, set()).add(name)
                assert read_only or name == "keys" or source.endswith("-state"), f"{name}: {source} -> {target}"
    assert seen.keys() == COMPOSE["volumes"].keys()
    owners = {name: services - {"keys"} for name, services in seen.items()}
    assert owners["authority"] == set() and owners["superlink-keys"] == {"superlink"}
    assert owners["gateway-keys"] == {"gateway"} and owners["superexec-keys"] == {"superlink", "serverapp"}
    assert all(owners[f"node-{k}-key"] == {f"node-{k}"} for k in range(3))
    state = {target for name in ("superlink", "serverapp") for _, target, fixed in mounts(SERVICES[name]) if not fixed}
    assert state == {"/state"}


def test_the_containerfile_copies_what_exists_and_owns_the_folders_of_volumes():
    recipe = (DEPLOYMENT / "Containerfile").read_text()
    for words in re.findall(r"^COPY (?!--from)(.*)$", recipe, re.MULTILINE):
        assert all((ROOT / source).exists() for source in words.split()[:-1]), words
    ours = [service for service in SERVICES.values() if service["image"].startswith("secureafl")]
    folders = {target for service in ours for source, target, _ in mounts(service) if not source.startswith("./")}
    (made,) = re.findall(r"mkdir -p (.*?) && chown -R 10001:10001 /state /keys", re.sub(r"\\\n\s*", "", recipe))
    assert folders <= set(made.split()), folders - set(made.split())


def test_the_metrics_have_one_port_and_path_everywhere():
    config = yaml.safe_load((DEPLOYMENT / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["secureafl"]["static_configs"] == [{"targets": [f"serverapp:{METRICS}"]}]
    assert jobs["gateway"]["static_configs"] == [{"targets": [f"gateway:{GATEWAY_METRICS}"]}]
    assert jobs["secureafl"]["metrics_path"] == jobs["gateway"]["metrics_path"] == "/metrics"
    assert SERVICES["serverapp"]["expose"] == [str(METRICS)]
    for words in of_command("run.py").values():
        assert run_settings(words)["metrics"].strip('"').rpartition(":")[2] == str(METRICS)
    services = {part["metadata"]["name"]: part["spec"] for part in KUBERNETES if part["kind"] == "Service"}
    assert [port["port"] for port in services["serverapp"]["ports"]] == [METRICS]
    config = (DEPLOYMENT / "gateway" / "haproxy.cfg").read_text()
    assert 'bind "${GATEWAY_METRICS}"\n' in config and "if { path /metrics }" in config
    assert SERVICES["gateway"]["environment"]["GATEWAY_METRICS"] == f":{GATEWAY_METRICS}"
    assert f"{METRICS}" in GUIDE.read_text() and f"{GATEWAY_METRICS}" in GUIDE.read_text()
    source = yaml.safe_load((DEPLOYMENT / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_a_run_resumes_and_its_settings_are_the_apps():
    app = tomllib.loads((ROOT / "examples/flower/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert len(of_command("run.py")) == 3
    for where, words in of_command("run.py").items():
        settings = run_settings(words)
        assert settings.keys() <= app.keys() and settings["resume"] == "true", where
        state = "/var/lib/secureafl/serverapp/" if where.endswith(".service") else "/state/"
        assert settings["out"].strip('"').startswith(state), where


def test_kustomization_takes_every_file_and_pods_find_their_volumes():
    listed = yaml.safe_load((DEPLOYMENT / "kustomization.yaml").read_text())
    assert sorted(listed["resources"]) == sorted(f"kubernetes/{p.name}" for p in DEPLOYMENT.glob("kubernetes/*.yaml"))
    maps = {entry["name"] for entry in listed["configMapGenerator"]}
    assert all((DEPLOYMENT / file).exists() for entry in listed["configMapGenerator"] for file in entry["files"])
    claims = {p["metadata"]["name"]: p["spec"].get("volumeClaimTemplates", []) for p in KUBERNETES if "spec" in p}
    guide = GUIDE.read_text()
    for name, pod, container in containers():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        there = volumes.keys() | {claim["metadata"]["name"] for claim in claims[name]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= there, name
        for volume in volumes.values():
            assert volume.get("configMap", {"name": "flwr"})["name"] in maps
            if "secret" in volume:
                assert f"secret generic {volume['secret']['secretName']} " in guide, "the guide makes each secret"
    assert [claim["metadata"]["name"] for claim in claims["serverapp"]] == ["state"] and PODS["serverapp"]


def test_the_dashboard_reads_the_provisioned_prometheus():
    dashboard = DEPLOYMENT / "grafana" / "secureafl.json"
    if not dashboard.exists():
        pytest.skip("the dashboard is not there yet")
    panels = json.loads(dashboard.read_text())["panels"]
    uid = yaml.safe_load((DEPLOYMENT / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    used = {panel["datasource"]["uid"] for panel in panels if isinstance(panel.get("datasource"), dict)}
    assert all(name == uid["datasources"][0]["uid"] or name.startswith("${") for name in used), used


TOOLS = {
    "promtool": ["promtool", "check", "config", "prometheus.yml"],
    "kubectl": ["kubectl", "kustomize", "."],
    "systemd-analyze": ["systemd-analyze", "verify", "systemd/secureafl-gateway.service"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_tools_that_are_here_accept_the_files(tool):
    if not shutil.which(tool) or (tool == "systemd-analyze" and not Path("/usr/sbin/haproxy").exists()):
        pytest.skip(f"no {tool} here")
    done = subprocess.run(TOOLS[tool], cwd=DEPLOYMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
