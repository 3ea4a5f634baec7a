"""The HTTP server around the door: uvicorn with its limits drawn and an orderly end.

The server itself bounds neither the head of a request nor the time that one may take to arrive; both are
bounded here, so that no connection holds more than a little memory, or holds it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from admission_svc.problems import problem
from shared.config import AdmissionSettings
from shared.domain.errors import ErrorKind
from shared.telemetry import logger

MAX_HEAD_BYTES: Final = 32_768
"""The request line and headers of one request."""
WHOLE_WITHIN_S: Final = 60.0
"""How long a request may take to arrive whole."""
_SWEEP_EVERY_S: Final = 5.0
_log: Final = logger("lockgate.admission")


def _refusal(status: bytes, description: str) -> bytes:
    body = problem(ErrorKind.INVALID_INPUT, description)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, len(body)) + body


_HEAD_TOO_LARGE: Final = _refusal(
    b"431 Request Header Fields Too Large",
    f"request line and headers: must not exceed {MAX_HEAD_BYTES} bytes",
)
_NOT_HTTP: Final = _refusal(b"400 Bad Request", "request: is not HTTP/1.1")


class BoundedProtocol(HttpToolsProtocol):
    """One connection whose request heads are bounded, and whose unreadable requests get a body like all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self.arriving_since: float | None = self.loop.time()
        """Loop time since when a request should be arriving that is not whole yet."""

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        in_head = self._in_head
        super().data_received(data)
        # Bytes of a body that came along with the head's end do not count against the head.
        if (
            in_head
            and self._in_head
            and self._head_bytes > MAX_HEAD_BYTES
            and not self.transport.is_closing()
        ):
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self.arriving_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self.arriving_since = None
        super().on_message_complete()

    def send_400_response(self, _msg: str) -> None:
        # The text names a library's view of the fault; the body is ours, as everywhere.
        self.transport.write(_NOT_HTTP)
        self.transport.close()


class DoorServer(uvicorn.Server):
    """Serves the door until a signal, then lets what is under way end: waits and streams at once, requests
    within the drain time.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Callable[[], None], told: Callable[[int], None]
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._told = told

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._told(self.servers[0].sockets[0].getsockname()[1])

    async def main_loop(self) -> None:
        async with _sweeping(self.server_state.connections):
            await super().main_loop()
        self._drain()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal ends the main loop; it is not raised again afterwards, an orderly end is status 0."""
        super().handle_exit(sig, frame)
        self._captured_signals.clear()


@contextlib.asynccontextmanager
async def _sweeping(connections: set[Any]) -> AsyncIterator[None]:
    """Close connections whose request does not arrive whole in time."""

    async def sweep() -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            too_old = loop.time() - WHOLE_WITHIN_S
            for connection in list(connections):
                since = getattr(connection, "arriving_since", None)
                if since is not None and since < too_old:
                    connection.transport.close()

    task = asyncio.get_running_loop().create_task(sweep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def configuration(app: Any, settings: AdmissionSettings) -> uvicorn.Config:
    """How the door is served."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_seconds,
    )
