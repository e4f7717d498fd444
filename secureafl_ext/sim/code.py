"""code: a hash of the sources of the package and of its ops. With the settings it determines a result."""

import hashlib
from functools import cache
from pathlib import Path

import secureafl_ext

ELSEWHERE = ("audit", "cli", "flower", "operate", "report")  # subpackages that no run uses
LENGTH = 12


@cache
def code() -> str:
    """Equal for two installs with the same sources, whatever the compiler, the machine and the commit.

    Plug-ins are not part of it.
    """
    package, digest = Path(secureafl_ext.__path__[0]), hashlib.sha256()
    digest.update(str(secureafl_ext.build_info()["sources"]).encode())
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0] not in ELSEWHERE:
            digest.update(f"{place.as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:LENGTH]
