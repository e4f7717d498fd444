"""The C++ example, built against the installed package and run."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest
from places import ROOT

SOURCE = ROOT / "examples" / "cpp"
# cmake and ninja may lie beside a Python whose environment is not activated.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
ABSENT = [tool for tool in ("cmake", "ninja", "c++") if not shutil.which(tool, path=PATH)]
if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
    ABSENT.append("a shared libpython")


@pytest.mark.skipif(bool(ABSENT), reason=f"the C++ example needs {', '.join(ABSENT)}")
def test_ops_are_called_from_cpp(tmp_path):
    def run(*command):
        done = subprocess.run(command, env={**os.environ, "PATH": PATH}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("cmake", "-G", "Ninja", "-S", SOURCE, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}")
    run("cmake", "--build", tmp_path)
    assert "as expected" in run(tmp_path / "dispatcher")
