"""One process's view of the store: its connections, its clock, its tenants, and how durable the server is."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Final, Self

from shared.domain.errors import Unavailable
from shared.store.address import Address
from shared.store.clock import StoreClock
from shared.store.codes import Code
from shared.store.connection import Connection, Limits
from shared.store.contracts import Contracts
from shared.store.inspection import Boundary, Durability, inspect, refusal
from shared.store.keys import Keys
from shared.store.reads import TenantReads
from shared.store.registry import store_now_ms
from shared.store.replies import StoreRefusal, TenantLost
from shared.store.scripts import TenantStore, missing_guard
from shared.store.snapshot import SnapshotSource
from shared.store.wake import Wake

_INSPECT_EVERY_S: Final = 5.0
_KEEPS_DATA: Final = frozenset({"process-restart", "power-loss"})
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
        return "the store was promoted without proof that it holds every acknowledged write"
    if not _keeps_data(boundary, durability) or not _keeps_data(durability.boundary, durability):
        return "the store was restarted without keeping every acknowledged write"
    return None


class TenantHandle:
    """Everything a service uses of one tenant."""

    def __init__(self, runtime: Runtime, tenant: str) -> None:
        self.tenant = tenant
        self.keys = Keys(tenant)
        self.store = TenantStore(tenant, runtime.connection, runtime.clock, runtime.accept_server)
        self.reads = TenantReads(tenant, runtime.connection, runtime.bulk)
        self.snapshots = SnapshotSource(tenant, runtime.connection)
        self.contracts = Contracts(tenant, runtime.bulk)


class Runtime:
    """Open once per process. ``declared`` is the operator's word on the durability boundary."""

    def __init__(self, url: str, declared: Boundary | None = None) -> None:
        self.address = Address.parse(url)
        self.connection = Connection(self.address)
        self.bulk = Connection(self.address, _BULK_LIMITS)
        self.wake = Wake(self.address)
        self.clock = StoreClock()
        self.declared = declared
        self.durability: Durability | None = None
        self._tenants: dict[str, TenantHandle] = {}
        self._watcher: asyncio.Task[None] | None = None

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
        except StoreRefusal as refused:
            return refused.description
        except (Unavailable, OSError):
            return "the store cannot be reached"
        if not self.connection.connected:
            return "the store cannot be reached"
        return unguarded or refusal(durability)

    async def accept_server(self, store: TenantStore, authority: str) -> None:
        """Judge a server that came back with another replication id (DESIGN section 6).

        The same primary restarted with everything on disk is a new epoch; a promotion, or a restart of a
        store that does not keep every acknowledged write, has lost the tenant.
        """
        durability = await inspect(self.connection, self.declared)
        self.durability = durability
        row = await self.connection.call("HMGET", store.keys.meta, "replid", "boundary")
        stored, boundary = (value.decode() if value is not None else "" for value in row)
        if stored == durability.replid:
            return
        if durability.role == "slave":
            raise StoreRefusal("the store is a replica; it must be the primary")
        reason = lost_by_restart(stored, boundary, durability)
        if reason is not None:
            raise TenantLost(reason)
        reply = await store.raise_epoch(authority, stored, durability.replid or "", durability.boundary)
        if reply.code is Code.AUTHORITY_LOST:
            raise TenantLost("the tenant's store is not the one its authority was recorded in")

    async def _watch(self) -> None:
        """Keep durability and clock current; while the clock is suspect, look for an operator's word."""
        while True:
            # Also a reply that was lost or an error while the store loads its data: it comes back.
            with contextlib.suppress(Unavailable, OSError):
                await self.refresh()
                if self.clock.suspect:
                    await self._look_for_accepted_clock()
            await asyncio.sleep(1.0 if self.clock.suspect else _INSPECT_EVERY_S)

    async def _look_for_accepted_clock(self) -> None:
        for handle in list(self._tenants.values()):
            value = await self.connection.call("HGET", handle.keys.meta, "clock_accepted")
            if value is not None:
                self.clock.accept(int(value.split()[0]))
