"""The way to the store: pipelined connections that many calls share, by purpose, and nothing that repeats a
write.

A call ends in exactly one of four ways: its reply; :class:`ReplyError` (the store refused this command);
:class:`StoreUnavailable` (never sent, safe to repeat); :class:`ReplyLost` (sent, outcome unknown: look it up
by identity, never send it again blindly; RT-STORE-15, RT-STORE-16). Nothing here retries a command on its
own, except that a script the store did not know is loaded and then run: it had not run.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

from shared.domain.errors import Unavailable
from shared.store.address import Address
from shared.store.link import Arg, Limits, Link, Reply, ReplyError, ReplyLost, StoreUnavailable, pack

__all__ = [
    "Address",
    "Arg",
    "Connection",
    "Limits",
    "Reply",
    "ReplyError",
    "ReplyLost",
    "Script",
    "StoreUnavailable",
    "evalsha",
    "evalsha_many",
    "handshake",
]

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5
_REST_S: Final = 0.25
_AWAY: Final = "the store cannot be reached"
_REFUSALS: Final = {
    "LOADING": "the store is loading its data",
    "BUSY": "the store is busy with a script",
    "MASTERDOWN": "the store is a replica without its primary",
    "WRONGPASS": "the store refuses the user name or password (WRONGPASS)",
    "NOAUTH": "the store asks for a password (NOAUTH)",
}
_NOT_READY: Final = frozenset({"LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"})


def _why(error: Exception) -> str:
    """Why no connection could be made, in words that tell nothing of the address or the password."""
    if isinstance(error, ReplyError):
        return _REFUSALS.get(error.code, str(error))
    if isinstance(error, ssl.SSLError):
        return "the store cannot be reached: its certificate or TLS does not fit"
    return _AWAY


async def handshake(address: Address, link: Link) -> None:
    """Log in, choose the database and see that the store serves. Raises ReplyError where it refuses any of
    it.
    """
    commands: list[tuple[Arg, ...]] = []
    if address.password is not None:
        commands.append(("AUTH", address.username or "default", address.password))
    if address.db:
        commands.append(("SELECT", address.db))
    commands.append(("PING",))
    packed = b"".join(map(pack, commands))
    *opening, alive = await link.send(packed, len(commands), several=True)
    for reply in opening:
        # Whoever may not choose the database would be served from another one.
        if isinstance(reply, ReplyError):
            raise reply
    # A user that may not PING is served all the same, and so is who only reads while it cannot write.
    if isinstance(alive, ReplyError) and alive.code not in ("NOPERM", "MISCONF"):
        raise alive


class Connection:
    """One shared, pipelined connection that is made on the first call and made anew on the first call after a
    loss.

    All concurrent calls of one event loop share it. ``connect_s`` bounds how long a call waits for the socket
    (ms matter here, so a restart of the store is waited out); after it failed, calls are refused at once
    until a short pause is over.

    ``on_open`` looks at the server behind a new socket before any call goes there, and keeps calls from it by
    raising; ``on_lost`` hears that a socket is gone before a new one is made.
    """

    def __init__(
        self,
        address: Address | str,
        limits: Limits | None = None,
        connect_s: float = 2.0,
        on_open: Callable[[Link], Awaitable[None]] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._on_open = on_open
        self._on_lost = on_lost
        self._address = Address.parse(address) if isinstance(address, str) else address
        self._limits = limits or Limits()
        self._connect_s = connect_s
        self._link: Link | None = None
        self._connecting: asyncio.Task[Link] | None = None
        self._parked = 0
        self._parked_bytes = 0
        self._not_before = 0.0
        self._why_away = _AWAY
        self._closed = False
        self._loads: dict[str, asyncio.Task[Reply]] = {}

    async def call(self, *args: Arg) -> Reply:
        """Send one command and give its reply; raises ReplyError, StoreUnavailable or ReplyLost.

        A cancelled call may still run at the store: whoever must know shields it.
        """
        packed = pack(args)
        link = self._link
        if link is None:
            link = await self._wait_for_link(len(packed))
        return await link.send(packed, 1)

    async def pipeline(self, *commands: Sequence[Arg]) -> list[Reply]:
        """Send commands back to back in one write and give all replies, ReplyError as a value among them.

        The commands are not atomic together; those of other calls never come between them on this connection.
        Raises StoreUnavailable (none was sent) or ReplyLost (any of them may have run).
        """
        if not commands:
            return []
        packed = b"".join([pack(tuple(command)) for command in commands])
        link = self._link
        if link is None:
            link = await self._wait_for_link(len(packed))
        replies: list[Reply] = await link.send(packed, len(commands), several=True)
        return replies

    async def load(self, script: Script) -> None:
        """Make the store know a script. Callers at one time share one load, whoever of them is cancelled.

        Raises StoreUnavailable, also where the reply was lost: what was to run has not run.
        """
        task = self._loads.get(script.sha)
        if task is None:
            task = asyncio.get_running_loop().create_task(self.call("SCRIPT", "LOAD", script.source))
            self._loads[script.sha] = task
            task.add_done_callback(lambda done: self._loaded(script.sha, done))
        try:
            await asyncio.shield(task)
        except ReplyLost as error:
            raise StoreUnavailable("a script could not be loaded") from error

    async def close(self) -> None:
        """Give the socket up and refuse later calls. Calls under way raise ReplyLost, or StoreUnavailable if
        unsent.
        """
        self._closed = True
        ending: list[asyncio.Task[Any]] = list(self._loads.values())
        if self._connecting is not None:
            self._connecting.cancel()
            ending.append(self._connecting)
        if (link := self._link) is not None:
            link.drop("the connection was closed")
            await link.closed
        await asyncio.gather(*ending, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """Whether a socket is up right now."""
        return self._link is not None

    async def _wait_for_link(self, size: int) -> Link:
        if self._parked >= self._limits.max_calls or self._parked_bytes + size > self._limits.max_bytes:
            raise StoreUnavailable("too many store commands are waiting for a connection")
        connecting = self._connecting or self._start_connecting()
        self._parked += 1
        self._parked_bytes += size
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if connecting.cancelled() and waiter is not None and not waiter.cancelling():
                raise StoreUnavailable("the connection was closed") from None
            raise
        finally:
            self._parked -= 1
            self._parked_bytes -= size

    def _start_connecting(self) -> asyncio.Task[Link]:
        if self._closed:
            raise StoreUnavailable("the connection was closed")
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            raise StoreUnavailable(self._why_away)
        self._connecting = loop.create_task(self._connect())
        self._connecting.add_done_callback(self._connecting_ended)
        return self._connecting

    def _connecting_ended(self, task: asyncio.Task[Link]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()

    def _loaded(self, sha: str, task: asyncio.Task[Reply]) -> None:
        del self._loads[sha]
        if not task.cancelled():
            task.exception()

    async def _connect(self) -> Link:
        """Try until ``connect_s`` is over, with growing pauses; a refused login is not tried again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connect_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._open()
            except (OSError, TimeoutError, StoreUnavailable, ReplyLost, ReplyError) as error:
                refused = isinstance(error, ReplyError) and error.code not in _NOT_READY
                wait = pause * random.uniform(0.5, 1.0)  # noqa: S311
                if refused or loop.time() + wait >= deadline:
                    self._not_before = loop.time() + _REST_S * random.uniform(0.5, 1.0)  # noqa: S311
                    self._why_away = _why(error)
                    raise StoreUnavailable(self._why_away) from error
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _open(self) -> Link:
        link = await self._address.open(lambda: Link(self._limits, self._lost))
        try:
            await handshake(self._address, link)
            if self._on_open is not None:
                await self._on_open(link)
            if link.gone:
                raise ConnectionError
        except BaseException:
            link.drop("the store did not accept the connection")
            await link.closed
            raise
        self._link = link
        return link

    def _lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            if self._on_lost is not None:
                self._on_lost()


class Script(Protocol):
    """What :func:`evalsha` needs of a script; ``lua.Script`` is one."""

    @property
    def source(self) -> bytes:
        """The whole text."""

    @property
    def sha(self) -> str:
        """Its SHA-1 in hex, by which the store knows it."""


_LOADS: Final = 3


async def evalsha(
    conn: Connection, script: Script, keys: Sequence[Arg], args: Sequence[Arg], *, reads: bool = False
) -> Reply:
    """Run a script, loading it first where the store does not know it (after a restart or SCRIPT FLUSH).

    ``reads`` asks for no more than permission to read its keys; the script then may not write. Raises as
    :meth:`Connection.call` does. NOSCRIPT proves that the script has not run: running it then repeats
    nothing. Where the store forgets it again and again, its text goes along, which needs no cache.
    """
    kind = "_RO" if reads else ""
    for _ in range(_LOADS):
        try:
            return await conn.call("EVALSHA" + kind, script.sha, len(keys), *keys, *args)
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
        await conn.load(script)
    return await conn.call("EVAL" + kind, script.source, len(keys), *keys, *args)


_TOGETHER: Final = 25
"""Calls that the store runs without serving anybody else in between."""


async def evalsha_many(
    conn: Connection, script: Script, calls: Iterable[tuple[Sequence[Arg], Sequence[Arg]]]
) -> list[Reply]:
    """Run a script once per (keys, args), strictly in that order; every member ends on its own, refusals as
    values: ReplyError, ReplyLost (it may have run) or StoreUnavailable (it has not).

    After members of which it is not known that they ran, no later one is sent. Raises the latter two where
    not even the first ones are known to have run.
    """
    rests: list[tuple[Arg, ...]] = [(len(keys), *keys, *args) for keys, args in calls]
    ends: list[Reply] = []
    for at in range(0, len(rests), _TOGETHER):
        group = rests[at : at + _TOGETHER]
        try:
            ends += await _evalsha_group(conn, script, group)
        except Unavailable as error:
            if not ends:
                raise
            ends += [error] * len(group)
            return ends + [StoreUnavailable("what came before it has no reply")] * (len(rests) - len(ends))
    return ends


async def _evalsha_group(conn: Connection, script: Script, rests: Sequence[tuple[Arg, ...]]) -> list[Reply]:
    """Run a few as one transaction. A store that forgets the script meanwhile, and is taught it again by
    somebody else, would else run a later member before an earlier one; so either all meet NOSCRIPT or none.
    """
    for _ in range(_LOADS):
        ends = await _together(conn, [("EVALSHA", script.sha, *rest) for rest in rests])
        if not any(isinstance(end, ReplyError) and end.code == "NOSCRIPT" for end in ends):
            return ends
        await conn.load(script)
    return await _together(conn, [("EVAL", script.source, *rest) for rest in rests])


async def _together(conn: Connection, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
    """Run commands one after another with nothing in between; the replies, refusals as values."""
    begun, *_, ends = await conn.pipeline(("MULTI",), *commands, ("EXEC",))
    if isinstance(begun, ReplyError):
        raise ReplyLost(f"the store ran no transaction ({begun.code}); each command may have run alone")
    if isinstance(ends, ReplyError):
        raise StoreUnavailable(f"the store refused a transaction ({ends.code})")
    ran: list[Reply] = ends
    return ran
