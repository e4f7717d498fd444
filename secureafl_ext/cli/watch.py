"""`secureafl watch`: a live table of a server's page in the terminal, or the page of a log file."""

import argparse
import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..operate import View, serve
from ..operate.follow import Follow
from ..validation import printable, shown
from .errors import say

POLL_SECONDS = 1.0
SECONDS = 10.0  # for an answer
LATE = f"it was not whole after {SECONDS:g} seconds"
LARGEST_ANSWER = 2**24  # bytes
ROWS = 20  # clients in the table
COLUMNS = "client", "name", "state", "accepted", "rejected", "staleness", "factor", "weight", "left out", "named"
TEXTS = "name", "state", "named"
WIDE, IF_WIDE = 110, ("name", "staleness", "factor")  # in a narrower terminal all columns together could not be read
STATE = f"/state.json?count={ROWS}"
LONGEST_HEAD = 1_000  # characters above the table
TOKEN = "SECUREAFL_TOKEN"  # variable of the environment: other users can see the flags of a process


def watch(arguments: argparse.Namespace) -> None:
    """a live table of the page at a URL, or the page of a log file; suspicious clients first"""
    token = arguments.token or os.environ.get(TOKEN) or None
    try:
        if arguments.what.lower().startswith(("http:", "https:")):
            watch_url(arguments.what, token, arguments.once)
        else:
            watch_file(Path(arguments.what), arguments.host, arguments.port, token, arguments.once)
    except KeyboardInterrupt:
        say("stopped watching")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="URL-or-FILE", help="address of a live page, or a log of JsonLog")
    parser.add_argument("--once", action="store_true", help="print the table once and end")
    parser.add_argument("--token", help=f"token of the page (default: the variable {TOKEN})")
    parser.add_argument("--host", default="127.0.0.1", help="of a file: where to serve its page (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="of a file: port of its page (default: a free one)")


def watch_url(url: str, token: str | None, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    state = fetch_state(url, token)  # a mistake in the address ends the command, a later failure does not
    if once:
        console.print(table(state))
        return
    with Live(table(state), console=console, auto_refresh=False) as shown:
        while True:
            time.sleep(POLL_SECONDS)
            trouble = ""
            try:
                state = fetch_state(url, token)
            except (OSError, ValueError) as error:
                trouble = f"{error}; trying again"
            shown.update(table(state, trouble), refresh=True)


def fetch_state(url: str, token: str | None) -> dict[str, Any]:
    data = ask(url, token)
    try:
        state: dict[str, Any] = json.loads(data if len(data) <= LARGEST_ANSWER else b"")
        table(state)
    except Exception:  # the table cannot show it, so it is not the state of a page
        raise ValueError(f"watch: URL must lead to a page of SecureAFL, got another answer from {url}") from None
    return state


def ask(url: str, token: str | None) -> bytes:
    """The answer, all of it within SECONDS of the connection. No redirect is followed: the token must not."""
    connection, over = connection_to(url), threading.Event()
    try:
        connection.connect()
        with deadline(connection.sock, over):
            connection.request("GET", STATE, headers={"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            data = answer.read(LARGEST_ANSWER + 1)
    except (OSError, http.client.HTTPException) as error:
        why = LATE if over.is_set() else printable(str(error).strip(), 100) or type(error).__name__
        raise OSError(f"watch: no answer from {url}: {why}") from None
    finally:
        connection.close()
    if over.is_set():
        raise OSError(f"watch: no answer from {url}: {LATE}")
    if answer.status != http.HTTPStatus.OK:
        hint = f": it needs --token, or the variable {TOKEN}" if answer.status == http.HTTPStatus.UNAUTHORIZED else ""
        raise ValueError(f"watch: {url} answered {answer.status}{hint}")
    return data


def connection_to(url: str) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError("it names no host")
        parts.hostname.encode("idna")  # a UnicodeError is a ValueError
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname, parts.port, timeout=SECONDS)
    except (ValueError, http.client.InvalidURL) as error:
        raise ValueError(f"watch: URL must be like http://HOST:PORT/, got {shown(url)}: {error}") from None


@contextmanager
def deadline(connected: socket.socket, over: threading.Event) -> Iterator[None]:
    """End the connection after SECONDS. Its own timeout is for a single read: a byte now and then would renew it."""

    def end() -> None:
        over.set()
        with suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # SSLSocket's own would race with the reader

    timer = threading.Timer(SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watch_file(path: Path, host: str, port: int, token: str | None, once: bool) -> None:
    view = View(path.name)
    with Follow(path, view) as log:
        if once:
            from rich.console import Console

            log.step()
            Console().print(table(view.snapshot(count=ROWS)))
            return
        with serve(view, host=host, port=port, token=token) as page:
            print(f"{page.url} (Ctrl-C ends it)", flush=True)
            pause = threading.Event()
            while not pause.wait(0 if log.step() else POLL_SECONDS):
                pass


def table(state: Mapping[str, Any], trouble: str = "") -> Any:
    from rich.table import Table
    from rich.text import Text

    states = ", ".join(f"{count} {name}" for name, count in state["states"].items() if count)
    totals = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in state["totals"].items())
    head = f"{state['title']} version {state['version']}, {state['rate']:.1f} uploads/s\nclients: {states}\n{totals}"
    title, caption = Text(printable(head.strip(), LONGEST_HEAD, also="\n")), Text(printable(trouble))
    result = Table(title=title, caption=caption, title_justify="left")
    wide = shutil.get_terminal_size().columns >= WIDE
    names = [name for name in COLUMNS if wide or name not in IF_WIDE]
    for name in names:
        result.add_column(name, justify="left" if name in TEXTS else "right", overflow="ellipsis")
    for row in state["clients"]["rows"][:ROWS]:
        named = "" if row["named_at"] is None else clock(row["named_at"])
        cells = {
            "client": row["client"],
            "name": row["name"],
            "state": row["state"],
            "accepted": row["counts"].get("accepted", 0),
            "rejected": row["counts"].get("rejected", 0),
            "staleness": short(row["staleness"]),
            "factor": short(row["factor"]),
            "weight": short(row["weight"]),
            "left out": "-" if row["left_out"] is None else f"{row['left_out']:.0%}",
            "named": f"{named}, version {row['named_version']}" if named and wide else named,
        }
        # Text, not str: rich would obey [markup] in a name.
        result.add_row(
            *(Text(printable(str(cells[name]))) for name in names),
            style="red" if row["reason"] or row["state"] == "left out" else "",
        )
    return result


def short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
