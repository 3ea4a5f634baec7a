"""A TCP proxy in front of the store that loses, delays and holds what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from enum import Enum
from types import TracebackType
from typing import Self

import hiredis

from shared.store.address import Address

_CHUNK = 65_536


class _Mode(Enum):
    PASS = "pass"
    DROP_REPLIES = "drop-replies"
    CUT = "cut"
    REFUSE = "refuse"


class FaultProxy:
    """Stands between a client and the store at ``upstream`` (a store URL); clients use :attr:`url`.

    It runs in the test's own event loop and starts passing everything on. A mode holds for present and later
    connections until another is set. A connection that lost a reply never passes one again: a client must not
    be able to take one reply for another, as no network would do that either.
    """

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = Address.parse(upstream)
        self._tls = tls
        self._mode = _Mode.PASS
        self._delay_s = 0.0
        self._replies_left = 0
        self._requests = asyncio.Event()
        self._replies = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0
        self.connections = 0
        """How many connections were accepted so far."""

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self._port}"

    # The modes

    def pass_on(self) -> None:
        """Pass everything on, also what was held."""
        self._set(_Mode.PASS)

    def drop_replies(self) -> None:
        """Requests reach the store, its replies vanish; the connection stays open."""
        self._set(_Mode.DROP_REPLIES)

    def delay(self, seconds: float) -> None:
        """Replies come ``seconds`` later, in order."""
        self._set(_Mode.PASS, delay_s=seconds)

    def cut_after(self, replies: int) -> None:
        """Pass so many more replies, cut instead of the next one, then pass everything on.

        Counts over all connections, the reply to a new connection's greeting included.
        """
        self._set(_Mode.CUT)
        self._replies_left = replies

    def hold(self) -> None:
        """Nothing passes in either direction until another mode is set; nothing is lost."""
        self._set(_Mode.PASS, requests=False, replies=False)

    def hold_replies(self) -> None:
        """Requests reach the store, replies wait until another mode is set."""
        self._set(_Mode.PASS, replies=False)

    def refuse(self) -> None:
        """Cut every connection and every one that is made."""
        self._set(_Mode.REFUSE)
        self.cut()

    def cut(self) -> None:
        """Cut all connections now; the mode stays."""
        for task in self._tasks:
            task.cancel()

    def _set(self, mode: _Mode, delay_s: float = 0.0, requests: bool = True, replies: bool = True) -> None:
        self._mode = mode
        self._delay_s = delay_s
        for event, open_now in ((self._requests, requests), (self._replies, replies)):
            (event.set if open_now else event.clear)()

    # Its life

    async def __aenter__(self) -> Self:
        self.pass_on()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        # Aborted sockets are closed in the loop's next turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step would leave the socket open.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode is _Mode.REFUSE:
            return
        with contextlib.suppress(OSError):
            store_reader, store_writer = await self._open_upstream()
            pumps = [
                asyncio.create_task(self._pump_requests(reader, store_writer)),
                asyncio.create_task(self._pump_replies(store_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                store_writer.transport.abort()
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _open_upstream(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._upstream.path is not None:
            return await asyncio.open_unix_connection(self._upstream.path)
        return await asyncio.open_connection(self._upstream.host, self._upstream.port)

    async def _pump_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK):
            await self._requests.wait()
            writer.write(chunk)
            await writer.drain()

    async def _pump_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass replies on as the mode says; ends, and so cuts the connection, where it says so."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._send_when_due(queue, writer))
        loop, counter, dropping = asyncio.get_running_loop(), hiredis.Reader(), False
        try:
            while chunk := await reader.read(_CHUNK):
                await self._replies.wait()
                dropping = dropping or self._mode is _Mode.DROP_REPLIES
                if dropping:
                    continue
                passed, ends = self._until_cut(counter, chunk) if self._mode is _Mode.CUT else (chunk, False)
                if passed:
                    queue.put_nowait((loop.time() + self._delay_s, passed))
                if ends:
                    self.pass_on()
                    break
            # What passed before the end still arrives.
            queue.put_nowait((0.0, b""))
            await sender
        finally:
            sender.cancel()

    def _until_cut(self, counter: hiredis.Reader, chunk: bytes) -> tuple[bytes, bool]:
        """What of ``chunk`` still passes, and whether the connection ends after it."""
        for index in range(len(chunk)):
            if self._replies_left == 0:
                return chunk[:index], True
            counter.feed(chunk[index : index + 1])
            if counter.gets() is not False:
                self._replies_left -= 1
        return chunk, False

    @staticmethod
    async def _send_when_due(queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, chunk = await queue.get()
            if not chunk:
                return
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            writer.write(chunk)
            await writer.drain()
