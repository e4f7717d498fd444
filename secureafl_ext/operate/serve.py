"""serve: the live page over HTTP. It answers GET alone, on the loopback interface unless there is a token."""

import json
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np

from ..validation import converted, whole
from .access import Access
from .connections import BoundedConnections
from .view import View

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
ASSETS = ("index.html", "app.js", "drawing.js", "style.css", "icon.svg", "uPlot.iife.min.js", "uPlot.min.css")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_CONNECTIONS = 32  # at once; others are closed
LONGEST_CONNECTION = 10.0  # seconds, however slowly a request trickles in
LONGEST_PATH = 1_000  # characters, with the query
HEAT_SECONDS = 2.0  # between two reads of the similarities


class Answer(NamedTuple):
    status: HTTPStatus
    body: bytes = b""
    type: str = "text/plain"
    headers: tuple[tuple[str, str], ...] = ()


def serve(
    view: View,
    watched: Any = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    names: Sequence[str] = (),
) -> "Page":
    """Serve the page of this view in a thread, until `close`. Use it in a `with`, or keep it and close it.

    watched: `Watched`, or another object with `similarity(clients)`, for the heat map; None: no heat map
    port: 0: a free one    token: 16 or more of A-Z a-z 0-9 . _ ~ -; needed for any host but loopback
    names: of this machine, by which browsers may reach it besides `host`, its addresses and localhost
    """
    access = Access(host, token, names)
    port = converted("serve", "port", port, whole, "a whole number in 0..65535", lambda port: 0 <= port <= 65535)
    try:
        return Page(view, watched, host, port, access)
    except OSError as error:
        raise OSError(f"serve: cannot listen on {host}, port {port}: {error.strerror}") from error


class Page(BoundedConnections, ThreadingHTTPServer):
    """The HTTP server and its thread."""

    daemon_threads = False  # so that close() waits for them
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, view: View, watched: Any, host: str, port: int, access: Access):
        self.view, self.watched, self.host, self.access = view, watched, host, access
        self.assets = {name: (FOLDER / name).read_bytes() for name in ASSETS}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._heat_lock = threading.Lock()
        self._heat: tuple[float, bytes] = -HEAT_SECONDS, b""
        self._is_closed = False
        super().__init__((host, port), Handler, most=MOST_CONNECTIONS, seconds=LONGEST_CONNECTION)
        self.port: int = self.server_address[1]
        self.cookie = f"secureafl-{self.port}"  # all ports of a host share their cookies
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="secureafl-page", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the network for the name of this machine

    @property
    def url(self) -> str:
        """The address, without the token."""
        return f"http://[{self.host}]:{self.port}/" if ":" in self.host else f"http://{self.host}:{self.port}/"

    def close(self) -> None:
        """Stop, and close every connection."""
        if not self._is_closed:
            self._is_closed = True
            self.shutdown()
            self._thread.join()
            self.cut(0.0)
            self.server_close()

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Answers

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        name = path[1:] or "index.html"
        if name in self.assets:
            return Answer(HTTPStatus.OK, self.assets[name], TYPES[Path(name).suffix])
        if path == "/state.json":
            since = query.get("since", "")
            if since == self.view.since():
                return Answer(HTTPStatus.NO_CONTENT)
            start, count = number(query.get("start"), 0), number(query.get("count"), 100)
            return as_json(self.view.snapshot(since, start, count, query.get("search", "")))
        if path == "/similarity.json":
            return Answer(HTTPStatus.OK, self._similarity(), "application/json")
        if match := re.fullmatch(r"/client/(\d{1,9})\.json", path, re.ASCII):
            found = self.view.client(int(match[1]))
            return as_json(found or {"gone": True})
        return Answer(HTTPStatus.NOT_FOUND, b"not found\n")

    def _similarity(self) -> bytes:
        """The heat map. Many requests read the device no more often than one."""
        with self._heat_lock:
            at, body = self._heat
            if time.monotonic() - at >= HEAT_SECONDS:
                body = as_json(self._heat_map()).body
                self._heat = time.monotonic(), body
            return body

    def _heat_map(self) -> dict[str, Any]:
        clients = self.view.suspects()
        cosines = self.watched.similarity(clients) if self.watched is not None and clients else None
        if cosines is None:
            return {"clients": [], "names": [], "states": [], "cosines": []}
        labels = self.view.labels(clients)
        rows = [[round(float(x), 3) if np.isfinite(x) else None for x in row] for row in cosines]
        names, states = ([label[k] for label in labels] for k in range(2))
        return {"clients": clients, "names": names, "states": states, "cosines": rows}


class Handler(BaseHTTPRequestHandler):
    """One request per connection."""

    server: Page
    server_version, sys_version = "secureafl", ""
    timeout = LONGEST_CONNECTION

    def do_GET(self) -> None:
        try:
            answer = self._answer()
        except Exception:
            logger.exception("page: a request failed")
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the server failed, see its log\n")
        self._send(answer)

    def _answer(self) -> Answer:
        access, cookie = self.server.access, self.server.cookie
        if len(self.path) > LONGEST_PATH:
            return Answer(HTTPStatus.REQUEST_URI_TOO_LONG, b"too long\n")
        if not access.is_for_us(self.headers.get("Host", "")):
            return Answer(HTTPStatus.MISDIRECTED_REQUEST, b"unknown Host\n")
        try:
            address = urlsplit(self.path)
            given = parse_qs(address.query, max_num_fields=10, keep_blank_values=True)
        except ValueError:
            return Answer(HTTPStatus.BAD_REQUEST, b"bad request\n")
        query = {name: values[-1] for name, values in given.items()}
        if address.path == "/" and access.is_token(query.get("token")):  # and away with it from the address bar
            cookie = f"{cookie}={access.session}; HttpOnly; SameSite=Strict; Path=/"
            return Answer(HTTPStatus.SEE_OTHER, headers=(("Location", "/"), ("Set-Cookie", cookie)))
        if not access.allows(self.headers, cookie):
            return Answer(HTTPStatus.UNAUTHORIZED, b"a token is needed: open /?token=TOKEN once\n")
        return self.server.answer(address.path, query)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The answer to requests that the library refuses: bad ones, and every method but GET."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send(Answer(status, b"refused\n", headers=(("Allow", "GET"),)))

    def _send(self, answer: Answer) -> None:
        self.close_connection = True
        self.send_response(answer.status)
        for name, value in (*HEADERS.items(), *answer.headers):
            self.send_header(name, value)
        if answer.status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", f"{answer.type}; charset=utf-8")
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the library would print the request line, which may have the token."""


def number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text, re.ASCII) else otherwise


def as_json(data: Any) -> Answer:
    return Answer(HTTPStatus.OK, json.dumps(data, allow_nan=False).encode(), "application/json")
