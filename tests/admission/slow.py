"""A client that takes what it is sent only when it is told to, over a socket with hardly any room."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from tests.admission.house import House
from tests.admission.looking import PATIENCE_S, plain
from tests.support.polling import wait_until

_ROOM: Final = 4_096


class SlowClient:
    """A connection with requests on it. Nothing of the answers is read before it is asked for here."""

    def __init__(self, taking: socket.socket, connection: Any) -> None:
        self._taking = taking
        self._connection = connection
        self._taken = bytearray()

    async def stuck(self) -> None:
        """Wait until the door holds output back: it sends nothing more before this client reads."""
        await wait_until(lambda: self._connection.flow.write_paused)

    async def until(self, text: bytes) -> None:
        """Read on until ``text`` has come."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self._taken:
                assert await self._take(), f"the stream ended before {text!r}"

    async def rest(self) -> bytes:
        """Read on until the server closes; the body of a stream, the frames of the transfer taken off."""
        return _dechunked((await self.everything()).partition(b"\r\n\r\n")[2])

    async def everything(self) -> bytes:
        """Read on until the server closes; all that came, as it came."""
        async with asyncio.timeout(PATIENCE_S):
            while await self._take():
                pass
        return bytes(self._taken)

    async def _take(self) -> bool:
        chunk = await asyncio.get_running_loop().sock_recv(self._taking, 65_536)
        self._taken += chunk
        return bool(chunk)


def _dechunked(body: bytes) -> bytes:
    """A body without the sizes between its pieces, all of which must be whole."""
    found = bytearray()
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert rest == b"\r\n", rest
            return bytes(found)
        assert rest[length : length + 2] == b"\r\n"
        found += rest[:length]
        body = rest[length + 2 :]


@asynccontextmanager
async def slow_connection(door: House, request: bytes) -> AsyncIterator[SlowClient]:
    """Send a request, or several behind one another, and take nothing of what is answered yet. The last of
    them must make the server close the connection.
    """
    loop = asyncio.get_running_loop()
    with socket.socket() as taking:
        taking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)
        taking.setblocking(False)
        await loop.sock_connect(taking, ("127.0.0.1", door.port))
        ours = taking.getsockname()
        connections: set[Any] = door.listening.state.connections

        def accepted() -> Any:
            return next((each for each in connections if each.client == ours), None)

        connection = await wait_until(accepted)
        with socket.socket(fileno=os.dup(connection.transport.get_extra_info("socket").fileno())) as serving:
            serving.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        await loop.sock_sendall(taking, request)
        yield SlowClient(taking, connection)


def slow_stream(door: House, token: str, target: str) -> AbstractAsyncContextManager[SlowClient]:
    """Ask for an event stream and take nothing of it yet."""
    auth = f"authorization: Bearer {token}".encode()
    return slow_connection(door, plain("GET", target, auth, b"accept: text/event-stream"))
