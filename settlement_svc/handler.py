"""Calling a handler: one fresh connection per call, opened before the gate.

A refused connection is known before anything was recorded as possibly begun; everything that goes wrong
after the request left proves nothing about what the handler did (DESIGN section 7). Only a 200 carries an
answer; a 202, the promise to answer by another way, is not offered yet and counts as no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

import h11

from shared.domain.canonical import MAX_MESSAGE_BYTES

CONNECT_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
_CHUNK: Final = 65_536
_HEAD_BYTES: Final = 32_768


class NoAnswer(Exception):
    """The call brought no answer that counts. ``reason`` is one of a closed set: lost, malformed,
    too-large, status.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class Endpoint:
    """Where a handler listens: ``http://``, ``https://`` or ``unix:///path/of/socket``."""

    host: str
    port: int
    socket: str
    target: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read a handler URL; ValueError names the rule."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError("the handler URL must have a numeric port") from None
        if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
            return cls("localhost", 0, unquote(parts.path), "/", tls=False)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(
                "the handler URL must be http://host:port/path, https:// or unix:///path, without login"
            )
        tls = parts.scheme == "https"
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not target.isascii() or not target.isprintable() or " " in target:
            raise ValueError("the handler URL must have its path percent-encoded")
        return cls(parts.hostname, port or (443 if tls else 80), "", target, tls)

    async def open(self) -> HandlerCall:
        """Connect; OSError (TLS failures and time-outs included) where that is not possible."""
        async with asyncio.timeout(CONNECT_S):
            if self.socket:
                streams = await asyncio.open_unix_connection(self.socket)
            else:
                context = ssl.create_default_context() if self.tls else None
                streams = await asyncio.open_connection(self.host, self.port, ssl=context)
        return HandlerCall(self, *streams)

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.socket or self.port in (80, 443) else f"{host}:{self.port}"


class HandlerCall:
    """One connection, good for one request."""

    def __init__(
        self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._endpoint = endpoint
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(our_role=h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)

    async def post(self, body: bytes, headers: dict[str, str] | None = None) -> bytes:
        """Send one JSON document and give the body of a 200; NoAnswer for everything else.

        The time it may take is the caller's to bound, by closing the connection.
        """
        try:
            await self._send(body, headers or {})
            return await self._receive()
        except OSError as error:
            raise NoAnswer("lost", type(error).__name__) from None
        except h11.RemoteProtocolError as error:
            raise NoAnswer("malformed", str(error)) from None

    async def _send(self, body: bytes, headers: dict[str, str]) -> None:
        request = h11.Request(
            method="POST",
            target=self._endpoint.target,
            headers=[
                ("Host", self._endpoint.authority),
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Accept", "application/json"),
                ("Connection", "close"),
                *headers.items(),
            ],
        )
        parts = (
            self._http.send(request),
            self._http.send(h11.Data(body)),
            self._http.send(h11.EndOfMessage()),
        )
        # A handler that died between connecting and this: some event loops raise anything for such a write.
        if self._writer.is_closing():
            raise ConnectionResetError
        self._writer.write(b"".join(part or b"" for part in parts))
        await self._writer.drain()

    async def _receive(self) -> bytes:
        status, received, size = 0, [], 0
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                chunk = await self._reader.read(_CHUNK)
                if not chunk and self._http.their_state is h11.SEND_RESPONSE:
                    raise NoAnswer("lost", "the connection ended before an answer")
                self._http.receive_data(chunk)
            elif isinstance(event, h11.Response):
                status = event.status_code
                if status != 200:
                    raise NoAnswer("status", str(status))
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > MAX_MESSAGE_BYTES:
                    raise NoAnswer("too-large", f"more than {MAX_MESSAGE_BYTES} bytes")
                received.append(bytes(event.data))
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                return b"".join(received)

    def close(self) -> None:
        """Drop the connection at once; a handler that is still working finds it gone."""
        self._writer.transport.abort()


class Handler:
    """A peer's handler, and whether it could be reached lately."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._closing = False
        self.reachable = False

    def close(self) -> None:
        """Wait for no connection any more."""
        self._closing = True

    async def connect(self, within_s: float) -> HandlerCall | None:
        """A connection, tried for so long with growing pauses; None where there was none in that time."""
        loop = asyncio.get_running_loop()
        give_up, pause = loop.time() + within_s, _FIRST_PAUSE_S
        while True:
            with contextlib.suppress(OSError):
                call = await self._endpoint.open()
                self.reachable = True
                return call
            self.reachable = False
            wait = pause * random.uniform(0.5, 1.0)  # noqa: S311
            if self._closing or loop.time() + wait >= give_up:
                return None
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def wait_reachable(self) -> None:
        """Return at once while it is reachable, else when a connection could be made again."""
        while not self.reachable:
            call = await self.connect(_LONGEST_PAUSE_S)
            if call is not None:
                call.close()
