"""Access control of the page. Without a token only browsers and programs of this machine may read it."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")
TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,200}")


class Access:
    """The token, and the names under which browsers may reach the server."""

    def __init__(self, host: str, token: str | None, names: Sequence[str] = ()):
        if token is not None and not isinstance(token, str):
            raise ValueError(f"serve: token must be text or None, got {type(token).__name__}")
        if token is not None and not TOKEN.fullmatch(token):
            got = f"{len(token)} characters"
            raise ValueError(f"serve: token must have 16 to 200 letters, digits or . _ ~ -, got {got}")
        if token is None and not (host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)):
            raise ValueError(f"serve: host must be a loopback address if there is no token, got {host!r}")
        self.token = token
        self.names = {name.lower() for name in (*LOOPBACK, host, *names)}
        # The cookie is not the token itself.
        self.session = hmac.new(token.encode(), b"cookie", hashlib.sha256).hexdigest() if token else ""

    def is_for_us(self, host: str) -> bool:
        """Whether the header `Host` names this server. It prevents DNS rebinding: a page of another site, whose name
        resolves to this machine, sends that name. An unknown address passes only if there is a token to check."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.names or (self.token is not None and is_address(name))

    def is_token(self, given: str | None) -> bool:
        return same(given, self.token)

    def allows(self, headers: Message, cookie: str) -> bool:
        """Whether a request has the token, or the cookie of this name that a token was given for."""
        if self.token is None:
            return True
        kind, _, text = headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and same(text, self.token):
            return True
        try:
            cookies = SimpleCookie(headers.get("Cookie", ""))
        except CookieError:
            return False
        return cookie in cookies and same(cookies[cookie].value, self.session)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def same(given: str | None, known: str | None) -> bool:
    """Takes as long for any wrong text, so that nobody can guess a token letter by letter."""
    return bool(known) and hmac.compare_digest((given or "").encode(), (known or "").encode())
