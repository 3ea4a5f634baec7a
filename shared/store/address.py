"""Where the store is: one URL, read strictly, opened as a plain or TLS socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio.connection import SSLConnection, parse_url

P = TypeVar("P", bound=asyncio.Protocol)

_OPTIONS = {"db", "ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}


@dataclass(frozen=True)
class Address:
    """A parsed store URL: ``redis://``, ``rediss://`` (TLS) or ``unix://``, with user, password and database.

    TLS is verified unless ``ssl_cert_reqs=none``; ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile`` are
    file paths.
    """

    host: str
    port: int
    path: str | None
    db: int
    tls: Mapping[str, Any] | None
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a URL. Raises ValueError naming the rule, never the URL: it may hold a password."""
        try:
            parts, read = urlsplit(url), parse_url(url)
        except ValueError:
            raise ValueError(
                "the store URL must be redis://, rediss:// or unix://, with a numeric port and known options"
            ) from None
        given: dict[str, Any] = dict(read)
        connection_class = given.pop("connection_class", None)
        login = {name: given.pop(name, None) for name in ("username", "password")}
        host, port, path = given.pop("host", None), given.pop("port", 6379), given.pop("path", None)
        if unknown := sorted(given.keys() - _OPTIONS):
            raise ValueError(f"the store URL has an unknown option: {unknown[0]}")
        db = given.pop("db", 0)
        digits = parts.path.removeprefix("/")
        if type(db) is not int or db < 0 or (parts.scheme != "unix" and digits and not digits.isdecimal()):
            raise ValueError("the store URL must name its database by a number")
        tls = connection_class is SSLConnection
        if given and not tls:
            raise ValueError(f"the store URL has an option that needs rediss://: {min(given)}")
        if parts.scheme == "unix" and not path:
            raise ValueError("the store URL must name the path of its unix socket")
        return cls(host or "localhost", port, path, db, given if tls else None, **login)

    async def open(self, protocol: Callable[[], P]) -> P:
        """Connect and give the protocol that serves the socket. Raises OSError (TLS failures included)."""
        loop = asyncio.get_running_loop()
        if self.path is not None:
            return (await loop.create_unix_connection(protocol, self.path))[1]
        context = self._context() if self.tls is not None else None
        return (await loop.create_connection(protocol, self.host, self.port, ssl=context))[1]

    def _context(self) -> ssl.SSLContext:
        options = self.tls or {}
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        context.check_hostname = bool(options.get("ssl_check_hostname", True))
        if options.get("ssl_cert_reqs", "required") == "none":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if certificate := options.get("ssl_certfile"):
            context.load_cert_chain(certificate, options.get("ssl_keyfile"))
        return context
