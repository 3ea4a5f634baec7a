"""A proxy in front of the store that reads the commands passing through it and stops exactly at one of them.

Where :class:`tests.support.proxy.FaultProxy` loses whatever happens to pass, this one is aimed: a process
behind it can be killed when its claim has run and its answer has not, and at no other place.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self

import hiredis

import lua
from shared.store.address import Address

_CHUNK: Final = 65_536
_SCRIPTS: Final = {lua.load(name).sha.encode(): name for name in lua.NAMES}
_WITH_VERBS: Final = frozenset({"lease", "session"})
_PUSHES: Final = frozenset({"SUBSCRIBE", "SSUBSCRIBE", "PSUBSCRIBE"})


def label(command: list[bytes]) -> str:
    """A command by what it does: a script's name with its verb (``lease claim``, ``replace``), else its own
    name.
    """
    name = command[0].decode().upper()
    if name != "EVALSHA":
        return name
    script = _SCRIPTS.get(command[1], "another script")
    if script not in _WITH_VERBS:
        return script
    return f"{script} {command[3 + int(command[2])].decode()}"


def frame_end(data: bytes | bytearray, at: int = 0) -> int | None:
    """Where the request or reply that begins at ``at`` ends; None while the rest of it has not come."""
    line = data.find(b"\r\n", at)
    if line < 0:
        return None
    kind, size, end = data[at : at + 1], data[at + 1 : line], line + 2
    if kind in (b"+", b"-", b":"):
        return end
    if kind == b"$":
        end += max(0, int(size) + 2) if int(size) >= 0 else 0
        return end if len(data) >= end else None
    for _ in range(int(size)):
        inner = frame_end(data, end)
        if inner is None:
            return None
        end = inner
    return end


def _parsed(raw: bytes) -> Any:
    parser = hiredis.Reader()
    parser.feed(raw)
    return parser.gets()


class _Place(Enum):
    BEFORE = "before"
    AFTER = "after"
    CUT = "cut"


class Stop:
    """One place where the traffic of one connection stops, the first time it gets there."""

    def __init__(self, name: str, containing: tuple[bytes, ...], place: _Place, calls: list[str]) -> None:
        self._calls = calls
        self.name = name
        self.containing = containing
        self.place = place
        self._reached = asyncio.Event()
        self._released = asyncio.Event()
        self._answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def reached(self, within_s: float = 15.0) -> None:
        """Wait until the traffic got there; AssertionError where it does not."""
        try:
            async with asyncio.timeout(within_s):
                await self._reached.wait()
        except TimeoutError:
            where = f"{self.place.value} {self.name}: not reached within {within_s} s"
            raise AssertionError(f"{where}; lately: {', '.join(self._calls[-40:])}") from None

    def release(self) -> None:
        """Let the traffic go on."""
        self._released.set()

    async def reply(self, within_s: float = 15.0) -> Any:
        """What the store answered to the command, whether or not that was passed on."""
        async with asyncio.timeout(within_s):
            return await asyncio.shield(self._answered)

    def applies(self, name: str, command: list[bytes]) -> bool:
        wanted = all(argument in command for argument in self.containing)
        return name == self.name and wanted and not self._reached.is_set()

    async def hold(self) -> None:
        self._reached.set()
        await self._released.wait()

    def mark(self) -> None:
        self._reached.set()

    def answered(self, raw: bytes) -> None:
        if not self._answered.done():
            self._answered.set_result(_parsed(raw))


class _Traffic:
    """What one connection has under way: the stop that each due reply runs into, if any."""

    def __init__(self) -> None:
        self.due: deque[Stop | None] = deque()
        self.pushes = False


class BreakpointProxy:
    """Stands between processes and the store at ``upstream``; they use :attr:`url`. Speaks plain TCP.

    Runs in the test's event loop. Whatever no stop was set for passes unchanged.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = Address.parse(upstream)
        self._stops: list[Stop] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0
        self.calls: list[str] = []
        """Labels of all commands so far, in the order they were sent."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}"

    def stop_before(self, name: str, *containing: bytes) -> Stop:
        """Stop the next such command before the store sees it. ``containing`` are among its arguments."""
        return self._add(Stop(name, containing, _Place.BEFORE, self.calls))

    def stop_after(self, name: str, *containing: bytes) -> Stop:
        """Let the next such command run and stop its reply."""
        return self._add(Stop(name, containing, _Place.AFTER, self.calls))

    def cut_after(self, name: str, *containing: bytes) -> Stop:
        """Let the next such command run and cut its connection instead of passing the reply on."""
        return self._add(Stop(name, containing, _Place.CUT, self.calls))

    def _add(self, stop: Stop) -> Stop:
        self._stops.append(stop)
        return stop

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        # Aborted sockets are closed in the loop's next turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step would leave the socket open.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            address = self._upstream
            if address.path is not None:
                store_reader, store_writer = await asyncio.open_unix_connection(address.path)
            else:
                store_reader, store_writer = await asyncio.open_connection(address.host, address.port)
            traffic = _Traffic()
            pumps = [
                asyncio.create_task(self._pump_requests(reader, store_writer, traffic)),
                asyncio.create_task(self._pump_replies(store_reader, writer, traffic)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                store_writer.transport.abort()
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: _Traffic
    ) -> None:
        received = bytearray()
        while chunk := await reader.read(_CHUNK):
            received += chunk
            while (end := frame_end(received)) is not None:
                raw = bytes(received[:end])
                del received[:end]
                await self._request(raw, writer, traffic)

    async def _request(self, raw: bytes, writer: asyncio.StreamWriter, traffic: _Traffic) -> None:
        command: list[bytes] = _parsed(raw)
        name = label(command)
        self.calls.append(name)
        traffic.pushes = traffic.pushes or name in _PUSHES
        stop = next((stop for stop in self._stops if stop.applies(name, command)), None)
        if stop is not None and stop.place is _Place.BEFORE:
            await stop.hold()
        traffic.due.append(stop)
        writer.write(raw)
        await writer.drain()

    async def _pump_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: _Traffic
    ) -> None:
        """Pass replies on; ends, and so cuts the connection, where a stop says so."""
        received = bytearray()
        while chunk := await reader.read(_CHUNK):
            received += chunk
            while (end := frame_end(received)) is not None:
                raw = bytes(received[:end])
                del received[:end]
                # Pushed messages answer no request.
                stop = traffic.due.popleft() if traffic.due and not traffic.pushes else None
                if stop is not None:
                    stop.answered(raw)
                if stop is not None and stop.place is _Place.CUT:
                    stop.mark()
                    return
                if stop is not None and stop.place is _Place.AFTER:
                    await stop.hold()
                writer.write(raw)
            await writer.drain()
