"""What the door's tests look with: the whole store, refusals, and streams frame by frame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import redis

from tests.admission.house import Client

PATIENCE_S = 20


def everything(raw: redis.Redis) -> dict[bytes, Any]:
    """Every key of the store with its bytes: two of these are equal when nothing was stored in between."""
    client: Any = raw
    return {key: client.dump(key) for key in client.scan_iter(count=1_000)}


def assert_refused(
    response: httpx.Response, status: int, *said: str, kind: str = "invalid-input", hidden: str = ""
) -> None:
    """The response is this refusal: a body of the error table that names a place and a rule, and no more."""
    told = (response.status_code, response.text)
    assert response.status_code == status, told
    assert response.headers["content-type"] == "application/json", told
    body = response.json()
    assert set(body) == {"kind", "description"}, told
    assert body["kind"] == kind, told
    for part in said:
        assert part in body["description"], told
    assert len(response.content) < 2_000, told
    assert not hidden or hidden not in response.text, told


def told(response: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    """All that a response says, but for the time of day."""
    headers = [(name, value) for name, value in response.headers.items() if name != "date"]
    return response.status_code, response.content, headers


def plain(method: str, target: str, *headers: bytes, body: bytes = b"") -> bytes:
    """A request as bytes, header lines as they are, that asks the server to close."""
    lines = [f"{method} {target} HTTP/1.1".encode(), b"host: door", b"connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*pieces: bytes) -> bytes:
    """A body without a length."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def read_reply(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a whole response."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    named = (line.partition(": ") for line in lines)
    return int(first.split(" ")[1]), {name.lower(): value for name, _, value in named}, body


class Frame(msgspec.Struct, frozen=True):
    """One frame of an event stream; ``comment`` for a heartbeat."""

    id: str = ""
    event: str = ""
    data: str = ""
    comment: bool = False

    @property
    def sequence(self) -> int:
        return int(json.loads(self.data)["data"]["sequence"])


class Feed:
    """An open event stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def frame(self) -> Frame | None:
        """The next frame; None at the end of the stream."""
        fields: dict[str, Any] = {}
        async with asyncio.timeout(PATIENCE_S):
            async for line in self._lines:
                if not line:
                    return Frame(**fields)
                name, _, value = line.partition(":")
                if name:
                    assert name not in fields, line
                    fields[name] = value.removeprefix(" ")
                else:
                    fields["comment"] = True
        return None

    async def updates(self, count: int) -> list[Frame]:
        """The next ``count`` updates, heartbeats passed over."""
        found: list[Frame] = []
        while len(found) < count:
            frame = await self.frame()
            assert frame is not None, f"the stream ended after {len(found)} updates"
            if not frame.comment:
                assert frame.event == "", frame
                found.append(frame)
        return found

    async def rest(self) -> list[Frame]:
        """Everything until the end of the stream."""
        found: list[Frame] = []
        while (frame := await self.frame()) is not None:
            found.append(frame)
        return found


@asynccontextmanager
async def streaming(
    reader: Client, session_id: str, headers: Mapping[str, str] | None = None, **query: Any
) -> AsyncIterator[Feed]:
    """Updates as they come."""
    accepts = {"accept": "text/event-stream", **(headers or {})}
    path = f"/v1/sessions/{session_id}/updates"
    async with reader.http.stream("GET", path, headers=accepts, params=query) as response:
        yield Feed(response)
