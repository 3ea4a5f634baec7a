"""One connection of a server: what it reads is bounded before anything is done about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.serving import bounds
from shared.serving.bounds import Cut, Guard, Refusal

if TYPE_CHECKING:
    from uvicorn._types import (
        ASGI3Application,
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        Scope,
    )
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    from shared.serving.server import Serving

_log: Final = logging.getLogger("lockgate.http")
# Malformed requests are counted: a line for each would let any caller fill the log.
_log.setLevel(logging.ERROR)


class _Refused(Exception):
    """Stops the parser inside a request that is refused."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection is idle, receives a request, or serves one; each state has a bound."""

    def __init__(
        self,
        config: Serving,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _log
        self._guard: Guard = config.guard
        self._in_head = True
        self._received = 0
        self._head_bytes = 0
        self._hosts = 0
        self._codings = 0
        self._chunked = False
        self._declared = 0
        self._refusal = bounds.NOT_HTTP
        self._running: RequestResponseCycle | None = None
        self._discarded = 0
        self.arriving_since: float | None = None
        """Loop time since when a request has been arriving that is not whole yet."""
        self.idle_since: float | None = None
        self.unread_since: float | None = None
        """Loop time since when more is waiting to be sent than the client takes."""
        self.ending_since: float | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=bounds.UNREAD_BYTES)
        if self._guard.has_room(len(self.connections)):
            self._rest()
        elif len(self.connections) <= self._guard.bounds.connections + bounds.SPARE:
            self._refuse(bounds.FULL)
        else:
            self.abort("full")

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.idle.pop(self, None)
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.ending_since is not None:
            self._discarded += len(data)
            if self._discarded > bounds.MAX_REQUEST_BYTES:
                self.transport.abort()
            return
        self._guard.idle.pop(self, None)
        self.idle_since = None
        if self.arriving_since is None:
            self.arriving_since = self.loop.time()
        self._received += len(data)
        in_head = self._in_head
        super().data_received(data)
        if self.ending_since is not None or self.transport.is_closing():
            return
        # Bytes of a body that came along with the head's end do not count against the head.
        if in_head and self._in_head:
            if self._received > bounds.MAX_HEAD_BYTES:
                self._refuse(bounds.HEAD_TOO_LARGE)
        elif self._received > bounds.MAX_REQUEST_BYTES:
            self._refuse(bounds.REQUEST_TOO_LARGE)

    def pause_writing(self) -> None:
        self.unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unread_since = None
        super().resume_writing()

    # The request

    def on_message_begin(self) -> None:
        self.arriving_since = self.loop.time()
        self._head_bytes = self._hosts = self._codings = self._declared = 0
        self._chunked = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            # A trailer: nothing that decided about the request may change behind it.
            return
        if len(self.headers) >= bounds.MAX_HEADERS:
            raise self._stop(bounds.TOO_MANY_HEADERS)
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > bounds.MAX_HEAD_BYTES:
            raise self._stop(bounds.HEAD_TOO_LARGE)
        name = name.lower()
        if name == b"host":
            self._hosts += 1
        elif name == b"content-length":
            self._declared = int(value[:20])
        elif name == b"transfer-encoding":
            self._codings += 1
            self._chunked = value.strip(b" \t").lower() == b"chunked"
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise self._stop(bounds.NOT_HTTP)
        if self._hosts > 1 or (self._hosts == 0 and version == "1.1"):
            raise self._stop(bounds.HOST)
        if self._codings and (self._codings > 1 or not self._chunked or version == "1.0"):
            raise self._stop(bounds.CODING)
        if len(self.pipeline) >= bounds.MAX_PIPELINED:
            raise self._stop(bounds.PIPELINED)
        super().on_headers_complete()
        self._in_head = False

    def on_message_complete(self) -> None:
        self._in_head = True
        self._received = 0
        self.arriving_since = None
        super().on_message_complete()
        if self.cycle.response_complete and not self.pipeline:
            self._rest()

    def _stop(self, refusal: Refusal) -> _Refused:
        self._refusal = refusal
        return _Refused()

    def _unsupported_upgrade_warning(self) -> None:
        # The parser has read past everything that came with it, so nothing may follow on this connection.
        self.cycle.keep_alive = False

    # The answer

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        def answering(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> Awaitable[None]:
            def sending(message: ASGISendEvent) -> Awaitable[None]:
                if cycle.more_body and not cycle.response_started and self._asks_too_much(cycle):
                    cycle.keep_alive = False
                    cycle.transport = _Lingering(self)
                return send(message)

            if self.flow.write_paused:
                return self._once_taken(cycle, app, receive, sending)
            return app(scope, receive, sending)

        self._running = cycle
        super()._start_asgi_task(cycle, answering)

    async def _once_taken(
        self,
        cycle: RequestResponseCycle,
        app: ASGI3Application,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
    ) -> None:
        """Begin when the client has taken the answers ahead: one that was made before and waited behind them
        would tell what may not be told any more when its turn comes (DASPX-09).
        """
        await self.flow.drain()
        if not cycle.disconnected:
            await app(cycle.scope, receive, send)

    def _asks_too_much(self, cycle: RequestResponseCycle) -> bool:
        """Whether what is missing of a request that is being answered is too much to be read past."""
        return self._chunked or self._declared > bounds.UNASKED_BYTES or cycle.waiting_for_100_continue

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self.ending_since is not None:
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.arriving_since is None:
            self._rest()
        elif self._in_head:
            # What came of the next request while this one was served has its own time from here.
            self.arriving_since = self.loop.time()

    def _rest(self) -> None:
        self.idle_since = self.loop.time()
        self._guard.idle[self] = None

    # The end

    def send_400_response(self, _msg: str) -> None:
        # The text names a library's view of the fault; the body is ours, as everywhere.
        self._refuse(self._refusal)

    def _refuse(self, refusal: Refusal) -> None:
        """Say why and end; without a word where it would be a second answer, or one to another request."""
        cycle = self.cycle
        if self._in_head:
            owed = cycle is not None and not cycle.response_complete
        else:
            owed = bool(self.pipeline) or cycle.response_started
        if owed:
            self.end(refusal.cut)
            return
        self._leave()
        self._guard.count(refusal.cut)
        self.transport.write(refusal.response)
        self.linger()

    def linger(self) -> None:
        """End the connection from this side only: closing it while bytes come in would take back what was
        said last before it is read.
        """
        if self.ending_since is None and not self.transport.is_closing():
            self._ending()
            self.flow.resume_reading()
            self.transport.write_eof()

    def end(self, cut: Cut) -> None:
        """Close once what was said is sent."""
        self._guard.count(cut)
        self._ending()
        self.transport.close()

    def abort(self, cut: Cut) -> None:
        """Close at once."""
        self._guard.count(cut)
        self._ending()
        self.transport.abort()

    def _ending(self) -> None:
        self._guard.idle.pop(self, None)
        self._leave()
        self.idle_since = self.arriving_since = None
        self.ending_since = self.loop.time()

    def _leave(self) -> None:
        """Let the request being served, which need not be the one that came last, find its client gone: what
        it would say now could not be sent.
        """
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            self.flow.resume_writing()

    def unread(self) -> int:
        """Bytes that wait for the client."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    def look(self, now: float) -> None:
        """End what is past its time (loop time, s)."""
        if self.ending_since is None and self.transport.is_closing():
            self._ending()
        if self.ending_since is not None:
            longest = self._guard.bounds.unread_s if self.unread_since is not None else bounds.LINGER_S
            if now - self.ending_since > longest:
                self.transport.abort()
        elif _past(self.unread_since, now, self._guard.bounds.unread_s):
            self.abort("unread")
        elif _past(self.arriving_since, now, self._arrival_s()):
            self._refuse(bounds.LATE)
        elif _past(self.idle_since, now, self._guard.bounds.idle_s):
            self.end("idle")

    def _arrival_s(self) -> float:
        arrival_s = self._guard.bounds.arrival_s
        if not self._in_head:
            return arrival_s
        served = self.cycle is not None and not self.cycle.response_complete
        return float("inf") if served else min(bounds.HEAD_WITHIN_S, arrival_s)


def _past(since: float | None, now: float, longest_s: float) -> bool:
    return since is not None and now - since > longest_s


class _Lingering(asyncio.Transport):
    """What an answer is written to that does not wait for the rest of its request."""

    def __init__(self, connection: BoundedProtocol) -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.linger()
