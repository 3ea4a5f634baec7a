"""Waiting: for an outcome, for the next page, for updates as they come.

Whoever waits holds a few objects and one watch on the process's single subscription, never a connection to
the store. A hint only says *read again*; what is true is read from the keys, also every few seconds without
a hint. A stream reads each page at its own pace, so a slow client holds up nobody and overflows nothing. What
it has read is released only while the client has room for it and the permission still holds.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Generic, Literal, Self, TypeVar

from admission_svc.auth import Desk, Visit
from admission_svc.http import Disconnected, Header, Receive, Send
from admission_svc.sessions import Replay, Sessions, Settled
from shared.domain.errors import Expired, InvalidInput, LockgateError, Unavailable
from shared.domain.ids import command_operation_id, safe_integer
from shared.domain.limits import Exceeded
from shared.store.runtime import Runtime
from shared.store.wake import Watcher, operation_topic, session_topic
from shared.telemetry import LIMITED, STREAMS

HEARTBEAT_S: Final = 15.0
RECHECK_S: Final = 5.0
"""How often a waiting party looks without a hint: hints get lost with a connection."""
STREAM_PAGE: Final = 32
"""Updates read at a time for a stream; bounds what a slow client holds in memory."""
_CHUNK_BYTES: Final = 65_536
_EVENT_ID: Final = re.compile(r"(?:([0-9a-f]{8})-)?(0|[1-9][0-9]{0,15})")
_COMMENT: Final = b":\n\n"
STREAM_HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
T = TypeVar("T")
Kind = Literal["streams", "waiters"]


@dataclass(frozen=True, slots=True)
class Waited(Generic[T]):
    """What was found, and the seconds of waiting that were offered for it; None where there was none."""

    found: T
    wait_s: int | None


class Waits:
    """Everybody who waits in this process, so that a drain can let them go."""

    def __init__(self, runtime: Runtime) -> None:
        self.draining = False
        self._runtime = runtime
        self._watchers: set[Watcher] = set()
        self._live: Counter[tuple[str, Kind]] = Counter()

    def drain(self) -> None:
        """Let every present wait end with what it has, and every later one at once."""
        self.draining = True
        for watcher in self._watchers:
            watcher.hint()

    def watch(self, visit: Visit, kind: Kind, topic: str, receive: Receive) -> Wait:
        """A wait of one request; it also ends when the client leaves. It counts from when it is entered."""
        return Wait(self, self._runtime.wake.watch(visit.tenant, (topic,)), (visit.tenant, kind), receive)

    def full(self, visit: Visit, kind: Kind) -> bool:
        """Whether the tenant has as many of a kind in this process as its limits allow."""
        limits = visit.snapshot.limits
        if limits is not None and self._live[visit.tenant, kind] < getattr(limits, kind):
            return False
        LIMITED.labels(kind).inc()
        return True

    def add(self, watcher: Watcher, counted: tuple[str, Kind]) -> None:
        self._watchers.add(watcher)
        self._live[counted] += 1

    def discard(self, watcher: Watcher, counted: tuple[str, Kind]) -> None:
        self._watchers.discard(watcher)
        self._live[counted] -= 1
        if not self._live[counted]:
            del self._live[counted]


class Wait:
    """One request that waits. The listener for its client's leaving is the only reader of ``receive``."""

    def __init__(self, waits: Waits, watcher: Watcher, counted: tuple[str, Kind], receive: Receive) -> None:
        self._waits = waits
        self._watcher = watcher
        self._counted = counted
        self._receive = receive
        self._listener: asyncio.Task[None] | None = None
        self.gone = False

    def over(self) -> bool:
        """Whether nobody waits any more."""
        return self.gone or self._waits.draining

    async def next(self, timeout_s: float) -> bool:
        """Wait for a hint, a drain or the client's leaving; False when ``timeout_s`` passed without any."""
        return await self._watcher.wait(min(timeout_s, RECHECK_S))

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._watcher.hint()

    async def __aenter__(self) -> Self:
        await self._watcher.__aenter__()
        self._waits.add(self._watcher, self._counted)
        self._listener = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waits.discard(self._watcher, self._counted)
        await self._watcher.__aexit__(kind, error, trace)
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)


class Live:
    """Waiting over the session functions. ``desk`` authenticates anew for every look, so that a token that
    expires or is revoked while its request waits discloses nothing more (DASPX-09).
    """

    def __init__(self, runtime: Runtime, desk: Desk, sessions: Sessions) -> None:
        self.waits = Waits(runtime)
        self._desk = desk
        self._sessions = sessions

    async def outcome(
        self, header: bytes | None, session_id: str, command_id: str, wait_s: int | None, receive: Receive
    ) -> Waited[Settled | None]:
        """A command's outcome, waited for up to ``wait_s`` seconds; None where it is pending still."""

        async def look(visit: Visit) -> Settled | None:
            return await self._sessions.outcome(visit, session_id, command_id)

        visit = await self._desk.visit(header)
        topic = operation_topic(command_operation_id(visit.revisions.authority, command_id))
        return await self._until(header, look, lambda found: found is not None, visit, topic, wait_s, receive)

    async def page(
        self,
        header: bytes | None,
        session_id: str,
        after: int,
        limit: int,
        wait_s: int | None,
        receive: Receive,
    ) -> Waited[Replay]:
        """A page of updates, waited for up to ``wait_s`` seconds while there are none."""

        async def look(visit: Visit) -> Replay:
            return await self._sessions.replay(visit, session_id, after, limit)

        visit = await self._desk.visit(header)
        topic = session_topic(session_id)
        return await self._until(
            header, look, lambda found: bool(found.events), visit, topic, wait_s, receive
        )

    async def _until(
        self,
        header: bytes | None,
        look: Callable[[Visit], Awaitable[T]],
        enough: Callable[[T], bool],
        visit: Visit,
        topic: str,
        wait_s: int | None,
        receive: Receive,
    ) -> Waited[T]:
        found = await self._desk.serve(header, look)
        if enough(found) or not wait_s or self.waits.draining:
            return Waited(found, wait_s)
        if self.waits.full(visit, "waiters"):
            # A preference may be left alone: reads go on at a limit, they only do not wait.
            return Waited(found, None)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        async with self.waits.watch(visit, "waiters", topic, receive) as wait:
            while True:
                found = await self._desk.serve(header, look)
                left = deadline - loop.time()
                if enough(found) or left <= 0 or self.waits.draining:
                    return Waited(found, wait_s)
                await wait.next(left)
                if wait.gone:
                    raise Disconnected

    async def stream(
        self, header: bytes | None, session_id: str, after: int, receive: Receive
    ) -> UpdateStream:
        """A stream of updates after a cursor. Raises whatever refuses it, before its first byte."""
        visit = await self._desk.visit(header)

        async def read(cursor: int) -> Replay:
            return await self._desk.serve(
                header, lambda now: self._sessions.replay(now, session_id, cursor, STREAM_PAGE)
            )

        async def recheck() -> None:
            await self._desk.serve(header, lambda now: self._sessions.view(now, session_id))

        first = await read(after)
        if self.waits.full(visit, "streams"):
            raise Exceeded.of("streams", 0).unavailable()
        wait = self.waits.watch(visit, "streams", session_topic(session_id), receive)
        prefix = visit.revisions.authority[:8] + "-"
        return UpdateStream(session_id, prefix, first, read, recheck, wait)

    async def resume_at(self, header: bytes | None, last_event_id: bytes) -> int:
        """The cursor in a ``Last-Event-ID``: ``<authority8>-<sequence>`` or a plain integer.

        Raises InvalidInput where it is neither, Expired where it is of another authority: what it counted is
        gone, and the numbers of this one say nothing about it.
        """
        match = _EVENT_ID.fullmatch(last_event_id.decode("latin-1"))
        if match is None:
            raise InvalidInput("Last-Event-ID", "must be the id of an update of this stream, or a cursor")
        cursor = safe_integer(int(match[2]), "Last-Event-ID", 0)
        visit = await self._desk.visit(header)
        if match[1] is not None and match[1] != visit.revisions.authority[:8]:
            raise Expired("the cursor belongs to another authority; begin anew")
        return cursor


class UpdateStream:
    """Replay, then live, until the client leaves or the session or the process ends.

    Both are one loop over pages, so there is no hand-off between them that could lose a fact
    (DASP-CORE-011e, DASP-CORE-011f). It waits only where a page read under its watch had nothing. Whatever
    waited for a slow client is released only after ``recheck``, which raises where the session may no longer
    be read: what was read under a permission is not told after its revocation (DASPX-09).
    """

    def __init__(
        self,
        session_id: str,
        prefix: str,
        first: Replay,
        read: Callable[[int], Awaitable[Replay]],
        recheck: Callable[[], Awaitable[None]],
        wait: Wait,
    ) -> None:
        self._session_id = session_id
        self._prefix = prefix
        self._page = first
        self._read = read
        self._recheck = recheck
        self._wait = wait
        self._spoken = 0.0
        self._told = first.after

    async def run(self, send: Send) -> None:
        """Send the stream; an answer of its own (``Stream``)."""
        async with self._wait:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            await self._say(send, _COMMENT)
            with STREAMS.track_inprogress():
                try:
                    await self._follow(send)
                except Unavailable:
                    # The store went away: the client resumes from its own cursor when it can.
                    await self._say(send, _resync(self._session_id, self._told))
                except LockgateError:
                    # Closed, or no longer permitted: nothing more is told, not even which (DASPX-09).
                    pass
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        await self._release(send, just_read=False)
        while not self._wait.over():
            self._page = await self._read(self._page.next)
            while not self._page.events:
                silence_s = self._spoken + HEARTBEAT_S - loop.time()
                if silence_s <= 0:
                    await self._say(send, _COMMENT)
                    silence_s = HEARTBEAT_S
                await self._wait.next(silence_s)
                if self._wait.over():
                    return
                self._page = await self._read(self._page.next)
            await self._release(send, just_read=True)

    async def _release(self, send: Send, *, just_read: bool) -> None:
        """Send the page in parts. Nothing lies between a part's last check, which a page that was just read
        has behind it, and the moment at which the connection takes it.
        """
        checked = just_read
        for last, chunk in self._chunks():
            while await _held_up(send) or not checked:
                if self._wait.over():
                    return
                await self._recheck()
                checked = True
            await self._say(send, chunk)
            self._told, checked = last, False

    async def _say(self, send: Send, chunk: bytes) -> None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._spoken = asyncio.get_running_loop().time()

    def _chunks(self) -> Iterable[tuple[int, bytes]]:
        """The page's frames, some at a time, each part with its last sequence. An update is one line: compact
        JSON holds no line break.
        """
        chunk, sequence = bytearray(), self._page.after
        for sequence, event in enumerate(self._page.events, self._page.after + 1):
            chunk += b"id: %b%d\ndata: %b\n\n" % (self._prefix.encode(), sequence, event)
            if len(chunk) >= _CHUNK_BYTES:
                yield sequence, bytes(chunk)
                chunk.clear()
        if chunk:
            yield sequence, bytes(chunk)


async def _held_up(send: Send) -> bool:
    """Wait until the connection has room; True where that took any time. A server waits before it writes,
    also before it writes nothing, and only then does anything else run.
    """
    others_ran = False

    def note() -> None:
        nonlocal others_ran
        others_ran = True

    noting = asyncio.get_running_loop().call_soon(note)
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    noting.cancel()
    return others_ran


def _resync(session_id: str, cursor: int) -> bytes:
    data = f'{{"session_id":"{session_id}","reason":"interrupted","head":{cursor}}}'
    return f"event: resync\ndata: {data}\n\n".encode()
