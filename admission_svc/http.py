"""What the HTTP carrier reads and writes: bounded bodies, strict headers, ready-made replies.

Plain ASGI, no request objects: the hottest route pays for every one of them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from shared.domain.canonical import MAX_MESSAGE_BYTES, SESSION, Document, parse
from shared.domain.errors import InputFault, InvalidInput
from shared.domain.ids import IdKind, check, safe_integer

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]
Stream: TypeAlias = Callable[[Send], Awaitable[None]]
"""An answer that sends itself: nothing can refuse it any more."""

JSON: Final = (b"content-type", b"application/json")
LONGEST_WAIT_S: Final = 30

_WAIT: Final = re.compile(rb"wait *= *\"?([0-9]{1,9})\"?")
_MEDIA_TYPE: Final = re.compile(rb"application/json *(?:; *charset *= *\"?utf-8\"? *)?", re.IGNORECASE)
_STREAM: Final = re.compile(rb"text/event-stream *(?:;(.*))?", re.IGNORECASE)
_NO_QUALITY: Final = re.compile(rb"q *= *0(?:\.0*)?")
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_MOST_PARAMETERS: Final = 8
_READ_APART_BYTES: Final = 65_536
"""A larger body is read in a thread: at its worst one of a mebibyte takes the better part of a second, and
the requests of all others go on meanwhile.
"""


class Disconnected(Exception):
    """The client went away before its request was whole: there is nobody to answer."""


class Reply(msgspec.Struct, frozen=True):
    """A whole response; content length is added when it is sent."""

    status: int
    body: bytes = b""
    headers: tuple[Header, ...] = ()


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a reply; JSON wherever there is a body and no other type was named."""
    headers: list[Header] = [(b"content-length", str(len(reply.body)).encode()), *reply.headers]
    if reply.body and not any(name == b"content-type" for name, _ in reply.headers):
        headers.append(JSON)
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


class Call:
    """One request of a route: its path values, headers and body."""

    __slots__ = ("headers", "method", "path", "query", "receive")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: dict[str, str] = scope.get("path_params", {})
        self.headers: Sequence[Header] = scope["headers"]
        self.query: bytes = scope["query_string"]
        self.receive = receive

    def header(self, name: bytes) -> bytes | None:
        """The value of a header that may be there once; InvalidInput where it is repeated."""
        found = [value for key, value in self.headers if key == name]
        if len(found) > 1:
            raise InvalidInput(_shown_name(name), "must be sent once")
        return found[0] if found else None

    def session_id(self) -> str:
        """The session in the path."""
        return check(IdKind.SESSION, self.path["session_id"], "session_id")

    def command_id(self) -> str:
        """The command in the path."""
        return check(IdKind.COMMAND, self.path["command_id"], "command_id")

    def client(self) -> str:
        """The client in the path."""
        return check(IdKind.CLIENT, self.path["client"], "client")

    def parameters(self, *known: str) -> dict[str, str]:
        """The query parameters; InvalidInput for unknown, repeated or undecodable ones."""
        try:
            pairs = parse_qsl(
                self.query.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=_MOST_PARAMETERS,
            )
        except ValueError:
            raise InvalidInput(
                "query", "must be a few name=value pairs in ASCII or percent-encoded UTF-8"
            ) from None
        found: dict[str, str] = {}
        for name, value in pairs:
            if name not in known:
                raise InvalidInput(
                    "query", f"has an unknown parameter; known are {', '.join(known) or 'none'}"
                )
            if name in found:
                raise InvalidInput(name, "must be given once")
            found[name] = value
        return found

    async def document(self) -> Document:
        """The body under the rules of session payloads. Raises InvalidInput (malformed, 413, 415)."""
        body = await read_body(self.headers, self.receive)
        if len(body) > _READ_APART_BYTES:
            return await asyncio.to_thread(parse, body, SESSION)
        return parse(body, SESSION)

    def wait_s(self) -> int | None:
        """The seconds that ``Prefer: wait=N`` asks for, cut to what is offered; None where it does not."""
        return wait_preference(self.headers)


def _shown_name(name: bytes) -> str:
    return "Last-Event-ID" if name == b"last-event-id" else name.decode().title()


def wait_preference(headers: Iterable[Header]) -> int | None:
    """The first ``wait`` preference (RFC 7240). Others, and malformed ones, are no business of ours: a
    preference is a wish.
    """
    for name, value in headers:
        if name == b"prefer":
            for part in value.split(b","):
                match = _WAIT.fullmatch(part.split(b";")[0].strip().lower())
                if match:
                    return min(int(match[1]), LONGEST_WAIT_S)
    return None


def applied(wait_s: int | None) -> tuple[Header, ...]:
    """``Preference-Applied`` for a wait that was kept."""
    return () if wait_s is None else ((b"preference-applied", b"wait=%d" % wait_s),)


def key_header(value: bytes) -> str:
    """The command id in an ``Idempotency-Key``, bare or as a quoted string without parameters.

    Both forms of one id are one id. Raises InvalidInput.
    """
    text = value.decode("latin-1").strip(" \t")
    quoted = _QUOTED.fullmatch(text)
    bare = _ESCAPED.sub(r"\1", quoted[1]) if quoted else text
    return check(IdKind.COMMAND, bare, "Idempotency-Key")


def traceparent(value: bytes | None) -> str:
    """A W3C trace context, "" where there is none or it is not one."""
    return value.decode() if value is not None and _TRACEPARENT.fullmatch(value) else ""


def wants_stream(headers: Iterable[Header]) -> bool:
    """Whether ``Accept`` names ``text/event-stream``."""
    for name, value in headers:
        if name == b"accept":
            for part in value.split(b","):
                match = _STREAM.fullmatch(part.strip())
                if match and not any(_NO_QUALITY.fullmatch(p.strip()) for p in (match[1] or b"").split(b";")):
                    return True
    return False


def integer_parameter(text: str, name: str, low: int, high: int) -> int:
    """A decimal parameter within bounds, both included; InvalidInput for all else (``$``, ``-1``, 2^64)."""
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else None
    return safe_integer(value, name, low, high)


def check_media_type(value: bytes | None) -> None:
    """Refuse bodies that are not said to be JSON in UTF-8 (415)."""
    if value is None or (value != b"application/json" and _MEDIA_TYPE.fullmatch(value) is None):
        raise InvalidInput("Content-Type", "must be application/json", code=InputFault.MEDIA_TYPE)


async def read_body(headers: Iterable[Header], receive: Receive, limit: int = MAX_MESSAGE_BYTES) -> bytes:
    """The whole body, never more than ``limit`` bytes of it in memory.

    Raises InvalidInput (media type, encoding, size) or Disconnected.
    """
    media_type = length = None
    for name, value in headers:
        if name == b"content-type":
            media_type = value
        elif name == b"content-length":
            length = value
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise InvalidInput("Content-Encoding", "must be identity", code=InputFault.MEDIA_TYPE)
    check_media_type(media_type)
    if length is not None and (len(length) > 15 or int(length) > limit):
        raise _too_large(limit)
    message = await receive()
    if message["type"] != "http.request":
        raise Disconnected
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise _too_large(limit)
        return body
    return await _rest(bytearray(body), receive, limit)


async def _rest(body: bytearray, receive: Receive, limit: int) -> bytes:
    more = True
    while more:
        if len(body) > limit:
            raise _too_large(limit)
        message = await receive()
        if message["type"] != "http.request":
            raise Disconnected
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if len(body) > limit:
        raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> InvalidInput:
    return InvalidInput("body", f"must not exceed {limit} bytes", code=InputFault.TOO_LARGE)
