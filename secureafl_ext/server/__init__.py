"""The server: `SecureAFL` takes one client's update at a time. `Server` is the interface of every defense."""

from .protocol import Server
from .receipt import Receipt
from .server import SecureAFL

__all__ = ["Receipt", "SecureAFL", "Server"]
