"""A handler whose answers the test writes, down to the bytes on its connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

Document = dict[str, Any]
Script = Callable[[Document], Awaitable[bytes | None]]


def response(body: bytes, status: str = "200 OK") -> bytes:
    """A whole HTTP answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answer(**members: Any) -> bytes:
    """A 200 with these members as its JSON object."""
    return response(json.dumps(members).encode())


def done(document: Document, **result: Any) -> bytes:
    """A success that counts the state up and says so in an update."""
    state = {"n": document["session"]["state"]["n"] + 1}
    return answer(result={"ok": True, **result}, updates=[{"name": "work.done", "data": state}], state=state)


async def succeed(document: Document) -> bytes:
    """The script of a handler that always succeeds."""
    return done(document)


class ScriptedHandler:
    """Listens on loopback and answers with what ``script`` gives for each document; None drops the
    connection.
    """

    def __init__(self, script: Script = succeed) -> None:
        self.script = script
        self.calls: list[Document] = []
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/work"

    @property
    def open_connections(self) -> int:
        """How many are being served."""
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more and drop every connection."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._serve(reader, writer)
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        document = json.loads(await reader.readexactly(length))
        self.calls.append(document)
        said = await self._unless_left(reader, document)
        if said is not None:
            writer.write(said)
            await writer.drain()
            writer.write_eof()
            await reader.read()

    async def _unless_left(self, reader: asyncio.StreamReader, document: Document) -> bytes | None:
        """What the script says, None when the caller hangs up before."""
        saying = asyncio.ensure_future(self.script(document))
        leaving = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait((saying, leaving), return_when=asyncio.FIRST_COMPLETED)
            return saying.result() if saying.done() else None
        finally:
            saying.cancel()
            leaving.cancel()
            await asyncio.gather(saying, leaving, return_exceptions=True)
