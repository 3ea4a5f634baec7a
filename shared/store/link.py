"""One socket to the store: requests leave in order, replies come back in order, and nothing is sent twice.

RESP2 only: it is what every server speaks without being asked, and its replies have one shape whatever the
server's version. A link lives as long as its socket; :class:`shared.store.connection.Connection` makes new
ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import hiredis

from shared.domain.errors import Unavailable

Arg: TypeAlias = bytes | str | int | float
Reply: TypeAlias = Any
"""``bytes`` (bulk and status replies), ``int``, ``None``, or a list of these; in a list also ReplyError."""


class StoreUnavailable(Unavailable):
    """The command was never sent: the store is away or overloaded. Safe to repeat (RT-STORE-15)."""


class ReplyLost(Unavailable):
    """The command was sent and no reply came: it may have run or not, or may run yet.

    Whoever sent it finds out by identity before acting on either (RT-STORE-16); it is never sent again from
    here.
    """


class ReplyError(Unavailable):
    """The store answered this one command with an error; others on the same link are not touched.

    ``code`` is its first word (``NOSCRIPT``, ``OOM``, ``WRONGTYPE``, ``READONLY``, ``LOADING``, ``NOPERM``,
    ``BUSY``, ``ERR``, ...). ``message`` is for logs only: it may quote what was sent.
    """

    def __init__(self, text: str) -> None:
        code, _, message = text.partition(" ")
        super().__init__(f"the store refused a command ({code})")
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Limits:
    """What one link carries at a time; beyond it calls are refused at once, never queued."""

    timeout_s: float = 5.0
    """How long a reply may take; after that it counts as lost and so does the socket."""
    max_calls: int = 10_000
    max_bytes: int = 64 * 1024 * 1024
    """Bytes of commands without a reply yet."""


class _Waiter:
    """A command, or several written together, whose replies are due."""

    __slots__ = ("due", "expires", "future", "replies", "size")

    def __init__(
        self, future: asyncio.Future[Reply], due: int, several: bool, size: int, expires: float
    ) -> None:
        self.future = future
        self.due = due
        self.replies: list[Reply] | None = [] if several else None
        self.size = size
        self.expires = expires


def pack(args: tuple[Arg, ...]) -> bytes:
    """One command as the store reads it. Raises TypeError for an argument of another type."""
    # The library's own annotation names a tuple of exactly one element.
    packed: bytes = hiredis.pack_command(cast("tuple[Any]", args))
    return packed


_NOTHING: Final = object()
_SECOND_LOOK_S: Final = 0.02


class Link(asyncio.Protocol):
    """The in-flight commands of one socket.

    Everything sent within one turn of the event loop leaves in one write. A waiter that is cancelled keeps
    its place: its reply is read and dropped. One timer serves all calls, because replies come in the order of
    the calls.
    """

    def __init__(self, limits: Limits, on_lost: Callable[[Link], None]) -> None:
        self._limits = limits
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=ReplyError, notEnoughData=_NOTHING)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Waiter] = deque()
        self._unsent: list[bytes] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._overdue: _Waiter | None = None
        self._reason = "the connection to the store was lost"
        self._gone = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # What the owner calls

    def send(self, packed: bytes, due: int, several: bool = False) -> asyncio.Future[Reply]:
        """Queue packed commands whose ``due`` replies become one result: the reply, or a list where
        ``several``.

        Raises StoreUnavailable, with nothing queued, where the socket is gone or a limit is reached.
        """
        if self._gone:
            raise StoreUnavailable(self._reason)
        size = len(packed)
        limits = self._limits
        if len(self._waiting) >= limits.max_calls or self._bytes + size > limits.max_bytes:
            raise StoreUnavailable("too many store commands are under way")
        expires = self._loop.time() + limits.timeout_s
        waiter = _Waiter(self._loop.create_future(), due, several, size, expires)
        self._waiting.append(waiter)
        self._bytes += size
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)
        if self._timer is None:
            self._timer = self._loop.call_at(expires, self._check_overdue)
        return waiter.future

    def drop(self, reason: str) -> None:
        """Give the socket up. What was written is unknown from here on, the rest was never sent."""
        if not self._gone:
            self._fail(reason)
            if self._transport is not None:
                self._transport.abort()

    @property
    def gone(self) -> bool:
        """Whether the socket was given up; nothing can be sent any more."""
        return self._gone

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._gone:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                self.deliver(reply)
        except hiredis.ProtocolError:
            self.drop("the store sent something that is no reply")

    def deliver(self, reply: Reply) -> None:
        """Hand a reply to the oldest command without one."""
        if not self._waiting:
            self.drop("the store sent a reply that nobody asked for")
            return
        waiter = self._waiting[0]
        if waiter.replies is None:
            self._finished(waiter)
            if not waiter.future.done():
                if isinstance(reply, ReplyError):
                    waiter.future.set_exception(reply)
                else:
                    waiter.future.set_result(reply)
            return
        waiter.replies.append(reply)
        if len(waiter.replies) == waiter.due:
            self._finished(waiter)
            if not waiter.future.done():
                waiter.future.set_result(waiter.replies)

    def connection_lost(self, _error: Exception | None) -> None:
        self._fail("the connection to the store was lost")
        if not self.closed.done():
            self.closed.set_result(None)

    # Inside

    def _finished(self, waiter: _Waiter) -> None:
        self._waiting.popleft()
        self._bytes -= waiter.size

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._gone:
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def _check_overdue(self) -> None:
        """Lose the link if its oldest reply is overdue.

        An overdue reply gets a second look: after the process itself was stopped for a while, timers are due
        before the socket has been read.
        """
        self._timer = None
        if self._gone or not self._waiting:
            return
        oldest, now = self._waiting[0], self._loop.time()
        if oldest.expires > now:
            self._timer = self._loop.call_at(oldest.expires, self._check_overdue)
        elif self._overdue is oldest:
            self.drop("the store did not answer in time")
        else:
            self._overdue = oldest
            self._timer = self._loop.call_at(now + _SECOND_LOOK_S, self._check_overdue)

    def _fail(self, reason: str) -> None:
        if self._gone:
            return
        self._gone = True
        self._reason = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, deque()
        written = len(waiting) - len(self._unsent)
        self._unsent = []
        for index, waiter in enumerate(waiting):
            if not waiter.future.done():
                error = ReplyLost if index < written else StoreUnavailable
                waiter.future.set_exception(error(reason))
        self._on_lost(self)
