"""What examples/deployment says: its services, command lines and files."""

import re
import shlex
from pathlib import Path

import yaml
from places import ROOT

DEPLOYMENT = ROOT / "examples" / "deployment"
COMPOSE = yaml.safe_load((DEPLOYMENT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
UNITS = {path.name: path.read_text() for path in sorted((DEPLOYMENT / "systemd").glob("*.service"))}
KUBERNETES = [
    part for path in sorted((DEPLOYMENT / "kubernetes").glob("*.yaml")) for part in yaml.safe_load_all(path.read_text())
]
PODS = {
    part["metadata"]["name"]: part["spec"]["template"]["spec"]
    for part in KUBERNETES
    if "template" in part.get("spec", {})
}


def containers():
    """(name, pod, container) of Kubernetes."""
    return [(name, pod, container) for name, pod in PODS.items() for container in pod["containers"]]


def exec_start(unit):
    """The words of ExecStart, as systemd splits them."""
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.replace("\\\n", " "), re.MULTILINE)
    return shlex.split(line)


def command_lines():
    """(where it stands, its words) of every command of ours and of Flower's."""
    compose = {f"compose {name}": service["command"] for name, service in SERVICES.items() if "command" in service}
    pods = {f"kubernetes {name}": container["args"] for name, _, container in containers() if "args" in container}
    units = {name: exec_start(unit) for name, unit in UNITS.items()}
    found = {}
    for where, words in {**compose, **pods, **units}.items():
        words = [Path(words[0]).name, *words[1:]]
        if words[0] == "python":
            words = [Path(words[1]).name, *words[2:]]
        found[where] = words
    return found


def of_command(name):
    """where -> words of the command lines that call this command."""
    return {where: words[1:] for where, words in command_lines().items() if words[0] == name}


def run_settings(words):
    """The settings of --run-config, as text."""
    (config,) = [word.removeprefix("--run-config=") for word in words if word.startswith("--run-config=")]
    return dict(pair.split("=", 1) for pair in config.split())
