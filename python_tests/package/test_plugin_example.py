"""The example package installs and runs, and so does the code of the two guides."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import scenes
import torch
from places import ROOT

import secureafl_ext
from secureafl_ext.attacks import ATTACKS
from secureafl_ext.defenses import DEFENSES

EXAMPLE = ROOT / "examples" / "plugin"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("my_plugin", EXAMPLE / "my_plugin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_attack_of_the_example_turns_the_honest_mean_round(example):
    scene = scenes.scene()
    attack = example.my_attack(scene, strength=2.0)
    view = scenes.view(scene, attack)
    mean = scene.net.gradients(view.model, *scene.data.train(view.honest)).mean(0)
    assert len(view.honest) == 5
    torch.testing.assert_close(attack.update(view), -2 * mean)


COMMANDS = """
import sys
from secureafl_ext.cli.main import main
few = "--rounds 8 --clients 5 --malicious 0.4 --evaluations 2 --batch 4 --device cpu".split()
for argv in (
    ["list", "attacks"],
    ["list", "defenses"],
    ["run", "--attack", "my-attack", "--attack-option", "strength=3", "--defense", "my-defense", *few],
    ["run", "--attack", "adaptive", "--defense", "my-defense", "--defense-option", "factor=1.5", *few],
    ["sweep", "seed=1,2", "--attack", "my-attack", "--defense", "my-defense", "--processes", "2", *few],
):
    if main(argv):
        sys.exit(f"failed: {argv}")
"""


def test_the_example_installs_and_runs_from_the_command_line(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    shutil.copytree(EXAMPLE, tmp_path / "source")  # a build leaves files behind
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", tmp_path / "site", tmp_path / "source"]
    subprocess.run(install, check=True)
    folders = [tmp_path / "site", Path(secureafl_ext.__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, folders)))}
    script = tmp_path / "commands.py"  # a file: processes of a pool import it again
    script.write_text(f"if __name__ == '__main__':\n{''.join(f'    {line}' for line in COMMANDS.splitlines(True))}")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "my-attack " in done.stdout and "the honest mean with the opposite sign [strength=5.0]" in done.stdout
    assert "my-defense " in done.stdout and "[factor=2.0, momentum=0.9]" in done.stdout
    kept = (tmp_path / "secureafl-results" / "results.jsonl").read_text().splitlines()
    assert len(kept) == 4 and sum('"attack": "adaptive"' in line for line in kept) == 1
    assert all('"defense": "my-defense"' in line for line in kept)


PRINTED = {
    "write-an-attack": r"test error after 20 rounds: 0\.\d\d\n",
    "write-a-defense": r"gaussian: \d+% of the .* rejected\nadaptive: \d+% of the .* rejected\n",
}


@pytest.mark.parametrize("guide", PRINTED)
def test_the_example_of_a_guide_runs(guide, capsys, monkeypatch):
    for table in (ATTACKS, DEFENSES):
        monkeypatch.setattr(table, "_added", {})  # and the old ones again afterwards
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, f"{guide}.md", "exec"), {"__name__": guide})
    printed = capsys.readouterr().out
    assert re.fullmatch(PRINTED[guide], printed), printed
