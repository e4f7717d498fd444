"""The server with a live page and metrics, where the run asks for them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from secureafl_ext import SecureAFL
from secureafl_ext.flower import Event
from secureafl_ext.operate import Observer, View, Watched, serve


@contextmanager
def observed(
    server: Any, tell: Callable[[Event], None], metrics: str, port: int
) -> Iterator[tuple[Any, Callable[[Event], None], Callable[[float], None]]]:
    """(the server, who gets its events, who gets an error)

    metrics: HOST:PORT that Prometheus scrapes, or ""    port: of the live page on loopback, or 0
    """
    if not (metrics or port):
        yield server, tell, lambda error: None
        return
    view, observers = View("attacked"), list[Observer]()
    if port:
        observers.append(view)
    if metrics:
        from secureafl_ext.operate.prometheus import Prometheus  # needs the extra `operate`

        host, _, number = metrics.rpartition(":")
        prometheus = Prometheus()
        print(f"metrics: {prometheus.serve(int(number), host)}", flush=True)
        observers.append(prometheus)
    every = 2.0 if isinstance(server, SecureAFL) else 0  # other defenses cannot tell about all clients at once
    with ExitStack() as open_until_the_end:
        watched = open_until_the_end.enter_context(Watched(server, observers, every=every))
        if port:
            page = open_until_the_end.enter_context(serve(view, watched, port=port))
            print(f"live page: {page.url}", flush=True)

        def tell_both(event: Event) -> None:
            tell(event)
            watched.event(event)

        yield watched, tell_both, watched.evaluated
