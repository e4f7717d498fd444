"""Prometheus: counts, histograms and gauges of a server. docs/guides/metrics.md says what each metric means."""

import math
import socket
import threading
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from ..validation import converted, text, whole
from .connections import BoundedConnections
from .observer import Observer
from .verdict import EVENTS, UPLOADS, Look, Queue, Verdict

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer
except ModuleNotFoundError as error:
    words = "secureafl_ext.operate.prometheus needs prometheus_client: pip install 'secureafl_ext[operate]'"
    raise ModuleNotFoundError(words, name=error.name) from error


PLACES = ("open", "waiting", "to_ask", "paused", "places")  # fields of Queue
STATES = ("present", "on_probation", "expired", "left_out", "on_trial")  # of SecureAFL.stats()
FACTORS = tuple(digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5))
STALENESS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
SECONDS = tuple(digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5))
# A client chooses its factor. One of 1e300 would leave the histogram's sum without any digit of the others, for good.
LARGEST_FACTOR = 1e6
MOST_CONNECTIONS = 8
LONGEST_CONNECTION = 10.0  # seconds, however slowly a request trickles in


class Prometheus(Observer):
    """Metrics for Prometheus: in `registry`, and at the address of `serve`.

    registry: of prometheus_client; default: a new one. Two servers in one process need two registries.
    clients: so many clients, those with the lowest numbers, have series of their own. Labels are numbers and kinds that
    the server chooses, never a text that a client chose.
    """

    def __init__(self, registry: Any = None, clients: int = 200):
        expected = "a whole number, 0 or more"
        self.clients = converted("Prometheus", "clients", clients, whole, expected, lambda count: count >= 0)
        self.registry = CollectorRegistry() if registry is None else registry
        self._metrics: list[Any] = []
        uploads = self._add(Counter, "uploads", "Uploads by verdict", ["kind"])
        events = self._add(Counter, "events", "Events of the Flower loop and calls of leave and forget", ["kind"])
        factor = self._add(Histogram, "factor", "Lipschitz factor of an upload", ["kind"], buckets=FACTORS)
        states = self._add(Gauge, "clients", "Clients by state; those left out are present too", ["state"])
        # Children that are there from the start: a rate needs the 0 before the first upload.
        self._counts = {kind: uploads.labels(kind) for kind in UPLOADS}
        self._counts |= {kind: events.labels(kind) for kind in EVENTS}
        self._factors = {kind: factor.labels(kind) for kind in ("accepted", "rejected")}
        self._states = {state: states.labels(state) for state in STATES}
        queue = self._add(Gauge, "queue", "What the Flower loop waits for, and what waits for it", ["part"])
        self._queue = {part: queue.labels(part) for part in PLACES}
        self._held = self._add(Gauge, "queue_bytes", "Memory of the replies that wait for their turn")
        self._wait = self._add(Gauge, "queue_wait_seconds", "Time that the oldest of them has waited")
        self._staleness = self._add(Histogram, "staleness", "Rounds that an upload is late by", buckets=STALENESS)
        self._seconds = self._add(Histogram, "submit_seconds", "Time of submit on the host", buckets=SECONDS)
        self._version = self._add(Gauge, "version", "Version of the model: rounds so far")
        self._threshold = self._add(Gauge, "threshold", "Largest factor that the filter accepts now")
        self._error = self._add(Gauge, "model_error", "Error of the model at its last evaluation")
        self._looked = self._add(Gauge, "look_timestamp_seconds", "Time of the last look at all clients")
        self._dropped = self._add(Counter, "dropped_verdicts", "Verdicts that observers were too slow for")
        self._of_client = self._add(Counter, "client_uploads", "Uploads of one client by verdict", ["client", "kind"])
        self._weight = self._add(Gauge, "client_weight", "Weight of a client in the next step", ["client"])
        self._left_out = self._add(Gauge, "client_left_out", "1: present, with almost no weight", ["client"])
        of_looks = *self._states.values(), *self._queue.values(), self._held, self._wait, self._threshold
        for gauge in (*of_looks, self._error):
            gauge.set(math.nan)  # not known yet
        self._endpoint: Endpoint | None = None
        self._thread: threading.Thread | None = None
        try:
            self.registry.register(self)  # all metrics or none
        except ValueError as error:
            words = "registry must have no metrics of another server"
            raise ValueError(f"Prometheus: {words}, got one with {str(error)[:200]}") from error

    def _add(self, kind: Any, name: str, about: str, labels: Sequence[str] = (), **buckets: Any) -> Any:
        self._metrics.append(kind(f"secureafl_{name}", about, labels, registry=None, **buckets))
        return self._metrics[-1]

    def describe(self) -> Iterator[Any]:
        """For the registry: names."""
        for metric in self._metrics:
            yield from metric.describe()

    def collect(self) -> Iterator[Any]:
        """For the registry: values."""
        for metric in self._metrics:
            yield from metric.collect()

    def serve(self, port: int = 9464, host: str = "127.0.0.1") -> str:
        """Answer scrapes until `close`. Returns the address; port 0 takes a free one.

        There is no password: for a host that others reach, put a proxy or a firewall before it.
        """
        port = converted("Prometheus.serve", "port", port, whole, "0 to 65535", lambda port: 0 <= port <= 65535)
        host = converted("Prometheus.serve", "host", host, text, "the name or address of a host")
        if self._endpoint is not None:
            raise ValueError(f"Prometheus.serve: must be called once, got a second call; it serves {self._address()}")
        self._endpoint = make_server(host, port, make_wsgi_app(self.registry), family_of(host, port), Handler)
        self._thread = threading.Thread(target=self._endpoint.serve_forever, name="secureafl-metrics", daemon=True)
        self._thread.start()
        return self._address()

    def _address(self) -> str:
        assert self._endpoint is not None
        host, port = self._endpoint.server_address[:2]
        return f"http://[{host!s}]:{port}/metrics" if ":" in str(host) else f"http://{host!s}:{port}/metrics"

    def verdicts(self, batch: Sequence[Verdict]) -> None:
        for kind, count in Counts(verdict.kind for verdict in batch).items():
            self._counts[kind].inc(count)
        own = Counts((verdict.client, verdict.kind) for verdict in batch if verdict.kind in UPLOADS)
        for (client, kind), count in own.items():
            if client is not None and client < self.clients:
                self._of_client.labels(client, kind).inc(count)
        for verdict in batch:
            if verdict.staleness is not None:
                self._staleness.observe(verdict.staleness)
            if verdict.seconds is not None:
                self._seconds.observe(verdict.seconds)
            if verdict.factor is not None and verdict.kind in self._factors:
                self._factors[verdict.kind].observe(min(verdict.factor, LARGEST_FACTOR))
        self._version.set(batch[-1].version)

    def look(self, look: Look) -> None:
        for state, gauge in self._states.items():
            gauge.set(look.stats.get(state, math.nan))
        self._version.set(look.version)
        self._threshold.set(look.threshold)
        self._looked.set(look.at)
        if look.queue is not None:
            self._look_at_queue(look.queue)
        for client, weight in enumerate(look.weights[: self.clients].tolist()):
            self._weight.labels(client).set(weight)
        if look.left_out is not None:
            for client, left_out in enumerate(look.left_out[: self.clients].tolist()):
                self._left_out.labels(client).set(left_out)

    def _look_at_queue(self, queue: Queue) -> None:
        for part, gauge in self._queue.items():
            gauge.set(getattr(queue, part))
        self._held.set(queue.waiting_bytes)
        self._wait.set(queue.longest_wait)

    def evaluated(self, at: float, version: int, error: float) -> None:
        self._error.set(error)

    def dropped(self, count: int) -> None:
        self._dropped.inc(count)

    def close(self) -> None:
        """No more scrapes at the address. The registry keeps the last values."""
        if self._endpoint is not None and self._thread is not None:
            self._endpoint.shutdown()
            self._thread.join()
            self._endpoint.cut(0.0)
            self._endpoint.server_close()
            self._endpoint = self._thread = None


class Endpoint(BoundedConnections, ThreadingWSGIServer):
    """prometheus_client's own server, with bounds."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments, most=MOST_CONNECTIONS, seconds=LONGEST_CONNECTION)


class Endpoint6(Endpoint):
    address_family = socket.AF_INET6


def family_of(host: str, port: int) -> type[Endpoint]:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return Endpoint6 if family == socket.AF_INET6 else Endpoint


class Handler(WSGIRequestHandler):
    timeout = LONGEST_CONNECTION

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape every few seconds is no news."""
