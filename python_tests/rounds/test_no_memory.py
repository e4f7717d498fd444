"""A round that runs out of memory changes nothing, and can be repeated."""

import os
import subprocess
import sys

import pytest

# A refresh needs 8 n * n numbers (3.5 MiB), everything else less than 1 MiB.
SCRIPT = """
import resource, sys
import torch
from secureafl_ext import RECOMMENDED, SecureAFL

torch.set_num_threads(1)
settings = {"support": {"rule": "support", "memory": 0, "filter": False}, "steps": RECOMMENDED | {"quorum": 0.0}}
n, d = 240, 64
server, random = SecureAFL(torch.zeros(d), n, **settings[sys.argv[1]]), torch.Generator().manual_seed(0)
for k in range(2 * n - 1):
    server.submit(k % n, torch.randn(d, generator=random), server.version)
update, before = torch.randn(d, generator=random), server.state_dict()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (int(used + 1.5 * 2**20), resource.RLIM_INFINITY))
try:
    server.submit(0, update, server.version)
    print("there was enough memory")
except (MemoryError, RuntimeError):
    pass
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
after = server.state_dict()
changed = [name for name in before if not torch.equal(*(torch.as_tensor(state[name]) for state in (before, after)))]
print("changed:", changed)
server.submit(0, update, server.version)
print("shifts:", bool(server.state_dict()["shift"].any()))
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer needs all address space")
@pytest.mark.parametrize("rule", ["support", "steps"])
def test_a_refresh_without_memory_is_no_round(rule):
    small = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, rule]
    done = subprocess.run(command, env={**os.environ, **small}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["changed: []", "shifts: True"]
