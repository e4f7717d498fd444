"""Byzantine-robust asynchronous federated learning as torch ops for CPU and CUDA."""

from pkgutil import extend_path

import torch as _torch  # noqa: F401 - loads the libraries that _C and _sim link to

# A checkout on sys.path has the sources but no binary: let it find the installed one.
__path__ = extend_path(__path__, __name__)

from . import _C  # importing it registers the ops
from .config import RECOMMENDED
from .engines.ranks import gather, shard
from .layout import Layout
from .ops import aggregate, estimate, lipschitz, median, trimmed_mean
from .server.server import Receipt, SecureAFL

__all__ = [
    "RECOMMENDED",
    "Layout",
    "Receipt",
    "SecureAFL",
    "__version__",
    "aggregate",
    "build_info",
    "estimate",
    "gather",
    "lipschitz",
    "median",
    "shard",
    "trimmed_mean",
]


def build_info() -> dict[str, str | None]:
    """The build: version, torch of the headers, CUDA architectures or None, commit or None, a digest of the sources in
    csrc, compiler, SIMD."""
    return dict(_C.build_info())


__version__ = str(build_info()["version"])
