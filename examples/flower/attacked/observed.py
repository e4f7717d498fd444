"""The server with an audit log, a live page and metrics, where the run asks for them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from secureafl_ext.audit import Audited
from secureafl_ext.operate import Observer, View, Watched, serve


def audited(server: Any, folder: Path, keep: str, resume: bool) -> Any:
    """The server, whose calls go into a log if `keep` says which updates the log keeps: "nothing", "recent", "all"."""
    if not keep:
        return server
    if not resume and any(folder.glob("*")):
        raise ValueError(f"audit: {folder} has the log of an earlier run; set resume=true, or another out")
    return Audited(server, folder, keep=keep)


@contextmanager
def observed(server: Any, metrics: str, port: int) -> Iterator[Watched]:
    """metrics: HOST:PORT that Prometheus scrapes, or ""    port: of the live page on loopback, or 0"""
    view, observers = View("attacked"), list[Observer]()
    if port:
        observers.append(view)
    if metrics:
        from secureafl_ext.operate.prometheus import Prometheus  # needs the extra `operate`

        host, _, number = metrics.rpartition(":")
        prometheus = Prometheus()
        print(f"metrics: {prometheus.serve(int(number), host)}", flush=True)
        observers.append(prometheus)
    looks = observers and hasattr(server, "live")  # other defenses cannot tell about all clients at once
    with ExitStack() as open_until_the_end:
        watched = open_until_the_end.enter_context(Watched(server, observers, every=2.0 if looks else 0))
        if port:
            page = open_until_the_end.enter_context(serve(view, watched, port=port))
            print(f"live page: {page.url}", flush=True)
        yield watched
