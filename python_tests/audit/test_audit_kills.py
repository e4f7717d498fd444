"""kill -9 at random moments loses no acknowledged upload. `python killed_server.py --kills 200` does it for longer."""

import json
import os
import subprocess
import sys

from places import HERE

KILLS = 5


def test_a_killed_server_loses_no_acknowledged_upload(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    seed = os.environ.get("SECUREAFL_SEED", "1")
    command = [str(HERE / "killed_server.py"), "--kills", str(KILLS), "--seed", seed, "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == KILLS and found["recoveries"] > 0 and found["calls"] > 0
    assert found["acknowledged and lost"] == found["other states"] == 0
