"""The server: `SecureAFL` takes one client's update at a time; `Server` is what any defense offers a loop."""

from .protocol import Server
from .receipt import Receipt
from .server import SecureAFL

__all__ = ["Receipt", "SecureAFL", "Server"]
