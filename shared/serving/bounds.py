"""How much of a process its connections may hold, and the refusals that a connection itself gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import msgspec

from shared.domain.errors import ErrorKind
from shared.telemetry import CONNECTIONS_CUT

MAX_HEAD_BYTES: Final = 32_768
"""The request line and headers of one request."""
MAX_HEADERS: Final = 100
MAX_REQUEST_BYTES: Final = 2_162_688
"""One request as it comes over the wire: twice the largest body, for one in small chunks, and the head."""
MAX_PIPELINED: Final = 16
"""Requests that may wait behind one another on a connection."""
UNASKED_BYTES: Final = 65_536
"""The rest of a body that is read past, to keep its connection, after its request was answered already."""
UNREAD_BYTES: Final = 65_536
"""Bytes of an answer that wait in the process for its reader before the next ones are made."""
HEAD_WITHIN_S: Final = 10.0
LINGER_S: Final = 2.0
"""How long a connection that was told its end is read past, so that the telling arrives."""
SPARE: Final = 256
"""Connections beyond the bound that are told so; further ones are dropped."""
_ALL_UNREAD_BYTES: Final = 268_435_456
_HELD_BESIDE_BYTES: Final = 1_048_576
_SLOW_S: Final = 5.0

Cut: TypeAlias = Literal["full", "idle", "late", "unread", "malformed", "large", "pipelined"]
"""Why a connection was ended by us."""


@dataclass(frozen=True)
class Bounds:
    """What one process allows: connections, and seconds for a request to arrive whole, for a connection
    without one to stay, and for an answer to be taken.
    """

    connections: int
    arrival_s: float = 60.0
    idle_s: float = 75.0
    unread_s: float = 60.0


@dataclass(frozen=True)
class Refusal:
    """A whole response, its connection's last, and what it is counted as."""

    cut: Cut
    response: bytes


def _refusal(cut: Cut, status: bytes, kind: ErrorKind, description: str, headers: bytes = b"") -> Refusal:
    body = msgspec.json.encode({"kind": kind.value, "description": description})
    head = (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
    )
    return Refusal(cut, head % (status, len(body), headers) + body)


NOT_HTTP: Final = _refusal(
    "malformed", b"400 Bad Request", ErrorKind.INVALID_INPUT, "request: is not HTTP/1.1"
)
HOST: Final = _refusal(
    "malformed", b"400 Bad Request", ErrorKind.INVALID_INPUT, "Host: must be sent, and once"
)
CODING: Final = _refusal(
    "malformed",
    b"400 Bad Request",
    ErrorKind.INVALID_INPUT,
    "Transfer-Encoding: must be chunked, in HTTP/1.1, and sent once",
)
PIPELINED: Final = _refusal(
    "pipelined",
    b"400 Bad Request",
    ErrorKind.INVALID_INPUT,
    f"request: no more than {MAX_PIPELINED} may wait behind one another",
)
HEAD_TOO_LARGE: Final = _refusal(
    "large",
    b"431 Request Header Fields Too Large",
    ErrorKind.INVALID_INPUT,
    f"request line and headers: must not exceed {MAX_HEAD_BYTES} bytes",
)
TOO_MANY_HEADERS: Final = _refusal(
    "large",
    b"431 Request Header Fields Too Large",
    ErrorKind.INVALID_INPUT,
    f"headers: must not be more than {MAX_HEADERS}",
)
REQUEST_TOO_LARGE: Final = _refusal(
    "large",
    b"413 Content Too Large",
    ErrorKind.INVALID_INPUT,
    f"request: must not exceed {MAX_REQUEST_BYTES} bytes as it is sent",
)
LATE: Final = _refusal(
    "late", b"408 Request Timeout", ErrorKind.UNAVAILABLE, "the request did not arrive whole in time"
)
FULL: Final = _refusal(
    "full",
    b"503 Service Unavailable",
    ErrorKind.UNAVAILABLE,
    "too many connections are open",
    b"retry-after: 1\r\n",
)


class Connection(Protocol):
    """What the guard knows of a connection."""

    unread_since: float | None

    def look(self, now: float) -> None: ...

    def unread(self) -> int: ...

    def end(self, cut: Cut) -> None: ...

    def abort(self, cut: Cut) -> None: ...


class Guard:
    """The connections of one server. ``idle`` holds those without a request, the longest idle one first."""

    def __init__(self, bounds: Bounds, service: str) -> None:
        self.bounds = bounds
        self.idle: dict[Any, None] = {}
        self._cut = {name: CONNECTIONS_CUT.labels(service, name) for name in get_args(Cut)}

    def count(self, cut: Cut) -> None:
        """One connection ended by us."""
        self._cut[cut].inc()

    def has_room(self, connections: int) -> bool:
        """Whether one more may stay, with which there are so many; an idle one makes room for it."""
        if connections <= self.bounds.connections:
            return True
        longest_idle: Connection | None = next(iter(self.idle), None)
        if longest_idle is None:
            return False
        longest_idle.end("idle")
        return True

    def sweep(self, connections: Iterable[Any], now: float) -> None:
        """Cut off what is past a bound of time, and of those that do not take their answers the slowest while
        what waits for them is too much. ``now`` is loop time (s).
        """
        slow: list[Connection] = []
        for connection in list(connections):
            connection.look(now)
            since = connection.unread_since
            if since is not None and now - since > _SLOW_S:
                slow.append(connection)
        held = sum(connection.unread() + _HELD_BESIDE_BYTES for connection in slow)
        slow.sort(key=lambda connection: connection.unread_since or now)
        for connection in slow:
            if held <= _ALL_UNREAD_BYTES:
                return
            held -= connection.unread() + _HELD_BESIDE_BYTES
            connection.abort("unread")
