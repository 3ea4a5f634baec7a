"""One process's view of the store: its connections, its clock, its tenants, and how durable the server is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakSet

import msgspec

from shared.domain.errors import Unavailable
from shared.domain.guard import TimeGuard
from shared.store.address import Address
from shared.store.clock import StoreClock
from shared.store.codes import Code
from shared.store.connection import Connection, Limits, ReplyError, ReplyLost
from shared.store.continuity import STANDING_FIELDS, Continuity, Standing, read_standing
from shared.store.contracts import Contracts
from shared.store.inspection import Boundary, Durability, inspect, refusal
from shared.store.keys import TENANTS, Keys
from shared.store.link import Link, pack
from shared.store.reads import TenantReads
from shared.store.registry import store_now_ms
from shared.store.replies import NewOperation, Reply, Revisions, StoreRefusal, TenantLost
from shared.store.scripts import Arg, TenantStore, missing_guard
from shared.store.snapshot import SnapshotSource, registered_as
from shared.store.wake import Wake

_INSPECT_EVERY_S: Final = 5.0
_ACCEPT_ROUNDS: Final = 3
_KEEPS_DATA: Final = frozenset({"process-restart", "power-loss"})
_COMMITTING: Final = frozenset({"admit", "session_open", "replace", "open", "answer", "release", "close"})
"""Scripts, and verbs of scripts, that never answer OK without having committed something."""
_LOOK_AT_ONCE: Final = 200
_ASK_EVERY_S: Final = 1.0
AWAY: Final = "the store cannot be reached"
OLDER: Final = "the store was put back to an older copy of what it had acknowledged"
PROMOTED: Final = "the store was promoted without proof that it holds every acknowledged write"
REPLICA: Final = "the store is a replica; it must be the primary"
logger: Final = logging.getLogger("lockgate.store.runtime")
_BULK_LIMITS: Final = Limits(timeout_s=15.0)


def _keeps_data(boundary: str, durability: Durability) -> bool:
    """Whether a restart keeps what was acknowledged; the operator's word counts where none can look."""
    return boundary in _KEEPS_DATA or (boundary == "unknown" and durability.declared in _KEEPS_DATA)


def lost_by_restart(stored: str, boundary: str, durability: Durability) -> str | None:
    """Why a server with another replication id than the ``stored`` one lost what it had acknowledged, None
    where it kept everything. ``boundary`` is what the store proved when that id was recorded.
    """
    if stored == durability.replid:
        return None
    if durability.replid2 == stored:
        return PROMOTED
    if not _keeps_data(boundary, durability) or not _keeps_data(durability.boundary, durability):
        return "the store was restarted without keeping every acknowledged write"
    return None


class _Server:
    """The calls of an inspection on a socket that serves nobody yet."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def call(self, *args: bytes | str | int) -> Any:
        return await self._link.send(pack(args), 1)


class _Witness(TenantStore):
    """Remembers what it saw committed."""

    def __init__(self, tenant: str, runtime: Runtime, continuity: Continuity) -> None:
        super().__init__(tenant, runtime.connection, runtime.clock, runtime.accept_server)
        self._continuity = continuity

    async def _once(self, name: str, keys: Sequence[bytes], args: Sequence[Arg]) -> Reply:
        reply = await super()._once(name, keys, args)
        if reply.code is Code.OK and (name in _COMMITTING or args[0] in _COMMITTING):
            # Only an admission tells its epoch.
            self._continuity.committed(reply.now_ms, reply.number(3) if name == "admit" else None)
        return reply

    async def admit_many(
        self, news: Sequence[NewOperation], revisions: Revisions, guard: TimeGuard
    ) -> list[Reply | None]:
        """See :meth:`TenantStore.admit_many`."""
        replies = await super().admit_many(news, revisions, guard)
        for reply in replies:
            if reply is not None and reply.code is Code.OK:
                self._continuity.committed(reply.now_ms, reply.number(3))
        return replies

    async def condemn(self, found: Standing, reason: str) -> Reply:
        """Have everybody refused, as long as the store still stands as it was found."""
        at = found.progress
        judged = f"{found.epoch} {at.clocks} {at.policy} {at.directory}"
        overdue = self._continuity.overdue_ms(found)
        args = ["condemn", found.authority, judged, "" if overdue is None else overdue, reason]
        return await self._once("epoch", [self.keys.meta], args)


class TenantHandle:
    """Everything a service uses of one tenant."""

    def __init__(self, runtime: Runtime, tenant: str) -> None:
        self._runtime = runtime
        self.tenant = tenant
        self.keys = Keys(tenant)
        self.continuity = Continuity()
        self.store = _Witness(tenant, runtime, self.continuity)
        self.reads = TenantReads(tenant, runtime.connection, runtime.bulk)
        self.snapshots = SnapshotSource(tenant, runtime.connection, self.judge)
        self.contracts = Contracts(tenant, runtime.bulk)

    def reason_against(self, found: Standing) -> str | None:
        """Why nobody may be served from ``found``; None where it is this tenant's store as it was, which is
        remembered.
        """
        durability = self._runtime.durability
        if durability is not None and durability.role == "slave":
            return REPLICA
        if self.continuity.is_older(found):
            return OLDER
        if durability is not None and found.replid != (durability.replid or ""):
            reason = lost_by_restart(found.replid, found.boundary, durability)
            if reason is not None:
                return reason
        self.continuity.saw(found)
        return None

    async def judge(self, found: Standing) -> None:
        """Let a reading be used only where it is of this tenant's store as it was.

        What is proven is noted in the store, so that a process that knows nothing is refused as well, and
        after a further restart too. Raises TenantLost, or StoreRefusal on a replica.
        """
        reason = self.reason_against(found)
        if reason is None:
            return
        if reason == REPLICA:
            raise StoreRefusal(reason)
        if reason in (OLDER, PROMOTED):
            logger.error("tenant %s is lost: %s", self.tenant, reason)
            with contextlib.suppress(Unavailable):
                await self.store.condemn(found, reason)
        raise TenantLost(reason)


class Runtime:
    """Open once per process. ``declared`` is the operator's word on the durability boundary; ``look_every_s``
    is how long, at most, a store that was replaced under an open connection goes unnoticed; None never looks.
    """

    def __init__(self, url: str, declared: Boundary | None = None, look_every_s: float | None = 5.0) -> None:
        self._look_every_s = math.inf if look_every_s is None else look_every_s
        self.address = Address.parse(url)
        self.connection = Connection(self.address, on_open=self._meet, on_lost=self._doubt)
        self.bulk = Connection(self.address, _BULK_LIMITS, on_lost=self._doubt)
        self.wake = Wake(self.address, on_given_up=self._doubt)
        self.clock = StoreClock()
        self.declared = declared
        self.durability: Durability | None = None
        self._tenants: dict[str, TenantHandle] = {}
        self._handles: WeakSet[TenantHandle] = WeakSet()
        self._watcher: asyncio.Task[None] | None = None
        self._doubts = asyncio.Event()
        self._asking = asyncio.Lock()
        self._asked_at = -_ASK_EVERY_S
        self._unreadable: str | None = None

    async def __aenter__(self) -> Self:
        """Start watching the server; a store that is away now is not an error, it is not ready."""
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self.wake.close()
        await self.connection.close()
        await self.bulk.close()

    async def tenant(self, name: str) -> TenantHandle:
        """The handle of a tenant whose store is there; TenantLost otherwise, remembering nothing."""
        handle = self._tenants.get(name)
        if handle is None:
            handle = TenantHandle(self, name)
            self._handles.add(handle)
            await handle.snapshots.get()
            handle = self._tenants.setdefault(name, handle)
        return handle

    async def refresh(self) -> Durability:
        """Inspect the server now and take a clock sample."""
        sent = self.clock.monotonic_ms()
        now = await store_now_ms(self.connection)
        self.clock.observe(now, sent, self.clock.monotonic_ms())
        self.durability = await inspect(self.connection, self.declared)
        return self.durability

    async def unready(self) -> str | None:
        """Why this process may not serve now, None when it may (DESIGN section 6, case 98)."""
        try:
            durability = self.durability or await self.refresh()
            unguarded = await missing_guard(self.connection)
        except (ReplyLost, OSError):
            return AWAY
        except Unavailable as refused:
            return refused.description
        if not self.connection.connected:
            return AWAY
        return unguarded or refusal(durability)

    async def check_readable(self) -> None:
        """Raise Unavailable where the store cannot be read: whoever is asked for a token then would learn
        that it is bad, which nobody knows. The store is asked once a second at most.
        """
        loop = asyncio.get_running_loop()
        async with self._asking:
            if loop.time() - self._asked_at >= _ASK_EVERY_S or not self.connection.connected:
                self._unreadable = await self._why_unreadable()
                self._asked_at = loop.time()
        if self._unreadable is not None:
            raise StoreRefusal(self._unreadable)

    async def _why_unreadable(self) -> str | None:
        try:
            return await missing_guard(self.connection)
        except (Unavailable, OSError) as error:
            return AWAY if isinstance(error, (ReplyLost, OSError)) else error.description

    async def accept_server(self, store: TenantStore, authority: str) -> None:
        """Judge a server that came back with another replication id (DESIGN section 6).

        The same primary restarted with everything on disk is a new epoch; a promotion, or a restart of a
        store that does not keep every acknowledged write, has lost the tenant.
        """
        durability = self.durability = await inspect(self.connection, self.declared)
        for _ in range(_ACCEPT_ROUNDS):
            found = read_standing(await self.connection.call("HMGET", store.keys.meta, *STANDING_FIELDS))
            if found is None or found.authority != authority:
                raise TenantLost("the tenant's store is not the one its authority was recorded in")
            handle = self._tenants.get(store.tenant) or TenantHandle(self, store.tenant)
            await handle.judge(found)
            inspected = durability.replid or ""
            if found.replid == inspected:
                return
            reply = await store.raise_epoch(authority, found.replid, inspected, durability.boundary)
            if reply.code is Code.AUTHORITY_LOST:
                raise TenantLost("the tenant's store is not the one its authority was recorded in")
            if reply.code is Code.OK:
                handle.continuity.saw(msgspec.structs.replace(found, epoch=reply.number(0)))
                return

    async def _meet(self, link: Link) -> None:
        """Look at the server behind a new socket: it may be another one, or another life of the same."""
        self.durability = await inspect(_Server(link), self.declared)

    def _doubt(self, channel: bytes | None = None) -> None:
        """What is known of a tenant, of all where none is named, is read again before it is used."""
        for handle in self._handles:
            if channel in (None, handle.keys.wake):
                handle.snapshots.doubt()
        self._doubts.set()

    async def _watch(self) -> None:
        """Keep durability and clock current, and see that every tenant's store is still the one it was, also
        where nobody asks; while the clock is suspect, look for an operator's word.
        """
        loop = asyncio.get_running_loop()
        look_at = loop.time() + self._look_every_s
        while True:
            # Also a reply that was lost or an error while the store loads its data: it comes back.
            with contextlib.suppress(Unavailable, OSError):
                await self.refresh()
                self._doubts.clear()
                if loop.time() >= look_at:
                    await self._look()
                    look_at = loop.time() + self._look_every_s
                await self._resolve()
                if self.clock.suspect:
                    await self._look_for_accepted_clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0 if self.clock.suspect else _INSPECT_EVERY_S):
                    await self._doubts.wait()
            # The store may be away for longer.
            await asyncio.sleep(random.uniform(0.05, 0.2))  # noqa: S311

    async def _look(self) -> None:
        """Doubt what is known of every tenant whose store reads otherwise."""
        handles = [handle for handle in self._tenants.values() if handle.snapshots.held is not None]
        for start in range(0, len(handles), _LOOK_AT_ONCE):
            some = handles[start : start + _LOOK_AT_ONCE]
            registered, *rows = await self.connection.pipeline(
                ("HMGET", TENANTS, *(handle.tenant for handle in some)),
                *(("HMGET", handle.keys.meta, *STANDING_FIELDS) for handle in some),
            )
            # One error stands for all: whether it may be read is one question.
            named = registered if isinstance(registered, list) else [registered] * len(some)
            for handle, name, row in zip(some, named, rows, strict=True):
                if not _stands(handle, name, row):
                    handle.snapshots.doubt()

    async def _resolve(self) -> None:
        """Read what is in doubt or could not be read, so that what is wrong is noted at once."""
        for handle in list(self._tenants.values()):
            if handle.snapshots.held is None:
                with contextlib.suppress(Unavailable):
                    await handle.snapshots.get()

    async def _look_for_accepted_clock(self) -> None:
        for handle in list(self._tenants.values()):
            value = await self.connection.call("HGET", handle.keys.meta, "clock_accepted")
            if value is not None:
                self.clock.accept(int(value.split()[0]))


def _stands(handle: TenantHandle, registered: Any, row: Any) -> bool:
    """Whether what was read of a tenant is the store that its snapshot is of."""
    held = handle.snapshots.held
    if held is None or isinstance(row, ReplyError):
        return False
    try:
        found = read_standing(row)
        return (
            found is not None
            and found.authority == held.revisions.authority == registered_as(registered, found.authority)
            and handle.reason_against(found) is None
        )
    except Unavailable:
        return False
