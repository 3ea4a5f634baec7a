"""Hints that something moved, from one subscriber per process to everyone here who waits.

A hint says *read again*, never what is true: hints get lost with a connection, so everybody is woken when a
subscription is made or made again, and every wait is bounded by its caller. A watcher costs a few objects, no
connection: one socket serves every stream, wait, claim and settling loop of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from shared.domain.errors import Unavailable
from shared.store.address import Address
from shared.store.connection import handshake
from shared.store.keys import Keys
from shared.store.link import Limits, Link, Reply, ReplyError, StoreUnavailable, pack

EVERYTHING: Final = "*"
"""The topic of whoever wants to hear of any move of the tenant."""
EVERYBODY: Final = "!"
"""In a hint: it is for every watcher of the tenant, whatever its topics; what it may do has changed."""
GIVEN_UP: Final = "lost"
"""In a hint: nobody may be served any more from what is known of the tenant."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
logger = logging.getLogger("lockgate.store.wake")


def session_topic(session_id: str) -> str:
    """A session has new facts or another phase."""
    return "s:" + session_id


def operation_topic(operation_id: str) -> str:
    """An operation moved."""
    return "o:" + operation_id


def peer_topic(peer: str) -> str:
    """A peer has something new in its outbox."""
    return "p:" + peer


class Watcher:
    """One waiting party. However many hints come while it does not wait, they are one flag."""

    def __init__(self, wake: Wake, channel: bytes, topics: frozenset[bytes]) -> None:
        self._wake = wake
        self._event = asyncio.Event()
        self.channel = channel
        self.topics = topics

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a hint since the last wait; False when none came within ``timeout_s`` seconds.

        Read what is watched *after* entering the watch and after every wait, whatever it returns.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def hint(self) -> None:
        """Let the present or next wait return."""
        self._event.set()

    async def __aenter__(self) -> Self:
        self._wake.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wake.leave(self)


class _Channel:
    """The watchers of one tenant by topic, and since when there are none (loop time)."""

    def __init__(self) -> None:
        self.topics: dict[bytes, set[Watcher]] = {}
        self.watchers: set[Watcher] = set()
        self.empty_since = 0.0


class _Subscriber(Link):
    """A link on which hints come between the replies."""

    def __init__(
        self, limits: Limits, on_lost: Callable[[Link], None], on_hint: Callable[[bytes, bytes], None]
    ) -> None:
        super().__init__(limits, on_lost)
        self._on_hint = on_hint

    def deliver(self, reply: Reply) -> None:
        """Tell a hint from a reply: only hints are lists that begin with ``message``."""
        if isinstance(reply, list) and reply and reply[0] == b"message":
            self._on_hint(reply[1], reply[2])
        else:
            super().deliver(reply)


class Wake:
    """The subscriber of one process and event loop. It starts with the first watch and lives until closed.

    ``check_s``: how often a silent socket is asked whether it still lives. ``linger_s``: how long a tenant
    that nobody watches stays subscribed, so that short waits do not subscribe anew each time.
    ``on_given_up`` hears the channel of a tenant that was given up, before whoever waits there.
    """

    def __init__(
        self,
        address: Address | str,
        limits: Limits | None = None,
        check_s: float = 5.0,
        linger_s: float = 30.0,
        on_given_up: Callable[[bytes], None] | None = None,
    ) -> None:
        self._on_given_up = on_given_up
        self._address = Address.parse(address) if isinstance(address, str) else address
        self._limits = limits or Limits()
        self._check_s = check_s
        self._linger_s = linger_s
        self._channels: dict[bytes, _Channel] = {}
        self._subscribed: set[bytes] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def watch(self, tenant: str, topics: Iterable[str]) -> Watcher:
        """Watch a tenant for hints that name any of the topics, or for all with :data:`EVERYTHING`.

        Use it with ``async with``. Entering never waits: a watch that begins before the subscription is made
        is woken when it is. Raises StoreUnavailable on entering after :meth:`close`.
        """
        return Watcher(self, Keys(tenant).wake, frozenset(topic.encode() for topic in topics))

    async def close(self) -> None:
        """End the subscription and let everyone who waits go on once."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for channel in self._channels.values():
            _hint_all(channel.watchers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def subscribed(self, tenant: str) -> bool:
        """Whether hints of this tenant come in right now."""
        return Keys(tenant).wake in self._subscribed

    def enter(self, watcher: Watcher) -> None:
        """Count a watcher in; called by the watcher."""
        if self._closed:
            raise StoreUnavailable("the subscription to hints was closed")
        channel = self._channels.setdefault(watcher.channel, _Channel())
        channel.watchers.add(watcher)
        for topic in watcher.topics:
            channel.topics.setdefault(topic, set()).add(watcher)
        if watcher.channel not in self._subscribed:
            self._changed.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self, watcher: Watcher) -> None:
        """Count a watcher out; called by the watcher."""
        channel = self._channels[watcher.channel]
        channel.watchers.discard(watcher)
        for topic in watcher.topics:
            channel.topics[topic].discard(watcher)
            if not channel.topics[topic]:
                del channel.topics[topic]
        if not channel.watchers:
            channel.empty_since = asyncio.get_running_loop().time()

    async def _run(self) -> None:
        """Subscribe, serve, and begin again after whatever went wrong; only :meth:`close` ends it."""
        pause, told = _FIRST_PAUSE_S, False
        while True:
            link: _Subscriber | None = None
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    link = await self._address.open(lambda: _Subscriber(self._limits, self._lost, self._hint))
                    await handshake(self._address, link)
                    await self._follow(link)
                pause, told = _FIRST_PAUSE_S, False
                while True:
                    await self._idle(link)
                    await self._follow(link)
            except (OSError, TimeoutError, Unavailable) as error:
                if not told:
                    logger.warning("hints are interrupted, waits fall back to their own time: %s", error)
                    told = True
            except Exception:
                logger.exception("the subscription to hints failed and is made again")
            finally:
                if link is not None:
                    link.drop("the subscription to hints ended")
                    await link.closed
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _idle(self, link: Link) -> None:
        """Wait until a tenant wants a subscription; every ``check_s`` see whether the socket still lives."""
        try:
            async with asyncio.timeout(self._check_s):
                await self._changed.wait()
        except TimeoutError:
            # Any answer will do: a store that cannot write to its disk refuses this as well.
            with contextlib.suppress(ReplyError):
                await link.send(pack(("PING",)), 1)

    async def _follow(self, link: Link) -> None:
        """Subscribe to what is watched and not subscribed, and leave what nobody has watched for a while."""
        self._changed.clear()
        for gone in self._abandoned():
            # Whoever comes back meanwhile finds it unsubscribed, asks again and is woken then.
            self._subscribed.discard(gone)
            del self._channels[gone]
            await link.send(pack(("UNSUBSCRIBE", gone)), 1)
        wanted = [name for name in self._channels if name not in self._subscribed]
        if not wanted:
            return
        packed = b"".join(pack(("SUBSCRIBE", name)) for name in wanted)
        for name, reply in zip(wanted, await link.send(packed, len(wanted), several=True), strict=True):
            if isinstance(reply, ReplyError):
                logger.warning("no hints on %s, waits fall back to their own time: %s", name.decode(), reply)
            else:
                self._subscribed.add(name)
                _hint_all(self._channels[name].watchers)

    def _abandoned(self) -> list[bytes]:
        since = asyncio.get_running_loop().time() - self._linger_s
        return [
            name
            for name, channel in self._channels.items()
            if not channel.watchers and channel.empty_since < since
        ]

    def _hint(self, name: bytes, message: bytes) -> None:
        channel = self._channels.get(name)
        if channel is None:
            return
        named = message.split()
        if GIVEN_UP.encode() in named and self._on_given_up is not None:
            self._on_given_up(name)
        if EVERYBODY.encode() in named:
            _hint_all(channel.watchers)
            return
        for topic in (*named, EVERYTHING.encode()):
            _hint_all(channel.topics.get(topic, ()))

    def _lost(self, _link: Link) -> None:
        self._subscribed.clear()
        self._changed.set()


def _hint_all(watchers: Iterable[Watcher]) -> None:
    for watcher in watchers:
        watcher.hint()
