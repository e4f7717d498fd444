"""BoundedConnections: a server that answers few connections at a time, none of them for long."""

import logging
import socket
import socketserver
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)


class BoundedConnections(socketserver.TCPServer):
    """Mix it in before a server with a thread per connection. Connections beyond the bound are closed at once.

    most, seconds: at a time, and how long one may last, however slowly a request trickles in
    """

    def __init__(self, *arguments: Any, most: int, seconds: float):
        self.most, self.seconds = most, seconds
        self._open: dict[socket.socket, float] = {}  # connections, and when they began
        self._open_lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            has_room = len(self._open) < self.most
            if has_room:
                self._open[request] = time.monotonic()
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        super().service_actions()
        self.cut(self.seconds)

    def cut(self, seconds: float) -> None:
        """End the connections that are as old as this. Their threads then fail to read or write, and close them."""
        now = time.monotonic()
        with self._open_lock:
            for connection, began in self._open.items():
                if now - began >= seconds:
                    try:
                        connection.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        logger.debug("a connection has ended by itself")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Without the traceback on stderr: whoever hangs up early would fill the log."""
        logger.debug("a connection from %s failed", client_address, exc_info=True)
