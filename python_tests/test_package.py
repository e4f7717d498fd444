import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import secureafl_ext
from secureafl_ext import reference


def test_build_info_tells_what_was_built():
    info = secureafl_ext.build_info()
    assert set(info) == {"version", "torch", "cuda", "commit", "compiler", "simd"}
    assert info["version"] == secureafl_ext.__version__ == version("secureafl_ext")
    assert info["torch"].startswith("2.")
    assert info["compiler"].split()[0] in {"GNU", "Clang", "AppleClang"}
    assert info["simd"] in {"avx512", "avx2", "sse2", "sve", "neon", "none"}
    if torch.cuda.is_available():
        assert info["cuda"] is not None


def test_reference_stands_alone():
    """The specification must not lean on what it specifies."""
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('reference', sys.argv[1]);"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec));"
        "assert not [name for name in sys.modules if 'secureafl' in name]"
    )
    subprocess.run([sys.executable, "-c", code, reference.__file__], check=True)


def test_every_op_has_a_reference():
    for name in ("median", "trimmed_mean", "lipschitz", "estimate", "aggregate"):
        assert callable(getattr(reference, name)) and getattr(secureafl_ext, name).__doc__


def test_readme_names_the_commands_that_ci_runs():
    root = Path(__file__).parent.parent
    readme, ci = (root / "README.md").read_text(), (root / ".ci" / "run").read_text()
    for command in ("pip install '.[test]' && pytest", "pip install '.[sim]' && secureafl compare"):
        assert command in readme and command in ci
