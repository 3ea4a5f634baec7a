"""The sidecar of one peer: reads its outbox and has each offer carried, a bounded number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from typing import Any, Final

from settlement_svc.carrier import Carrier, Missed
from settlement_svc.handler import Endpoint, Handler
from settlement_svc.leases import Leases
from settlement_svc.settle import Settler
from shared import telemetry
from shared.domain.errors import LockgateError
from shared.store.outbox import Outbox, Request
from shared.store.runtime import Runtime, TenantHandle

BLOCK_MS: Final = 10_000
"""How long one read waits: an idle peer costs a store command each time."""
_RELEASE_S: Final = 2.0
_ALL: Final = 10_000
_log = telemetry.logger("lockgate.sidecar")
_Key = tuple[str, int]


class Sidecar:
    """Works for ``peer`` with the handler at ``endpoint``, up to ``concurrency`` assignments at a time.

    Its identity is made anew with every start: a process that comes back is never taken for the one that
    held a lease before it.
    """

    def __init__(
        self,
        runtime: Runtime,
        handle: TenantHandle,
        settler: Settler,
        *,
        peer: str,
        endpoint: Endpoint,
        concurrency: int,
    ) -> None:
        self.holder: Final = secrets.token_hex(16)
        self.peer: Final = peer
        self.handler: Final = Handler(endpoint)
        self._tenant = handle.tenant
        self._snapshots = handle.snapshots
        self._outbox = Outbox(runtime.connection, runtime.address, handle.tenant, peer, self.holder, BLOCK_MS)
        self._leases = Leases(runtime, handle)
        self._carrier = Carrier(
            runtime, handle, settler, self._outbox, self.handler, self._leases, peer, self.holder
        )
        self._concurrency = concurrency
        self._work: dict[_Key, asyncio.Task[None]] = {}
        self._following: dict[_Key, Request] = {}
        self._freed = asyncio.Event()
        self._unseen = False
        self._backlog: list[Request] = []
        self._told = ""

    async def run(self, stop: asyncio.Event, drain_s: float) -> None:
        """Work until ``stop`` is set, then drain: take nothing more, let work end for ``drain_s`` seconds,
        give back the rest, forget this reader.
        """
        _log.info("working", tenant=self._tenant, peer=self.peer, holder=self.holder)
        renewing = asyncio.create_task(self._leases.keep())
        reading = asyncio.create_task(self._read())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((renewing, reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            await _end(reading)
            await self._drain(drain_s)
        finally:
            await _end(*self._work.values(), reading, stopping, renewing)
            await self._outbox.stop()
        for loop in (reading, renewing):
            if not loop.cancelled():
                loop.result()

    async def unready(self) -> str | None:
        """Why no work is taken, None while it is."""
        if not await self._outbox.registered():
            return f"peer {self.peer} is not registered"
        return None if self.handler.reachable else "the handler cannot be reached"

    # Reading

    async def _read(self) -> None:
        tidied = False
        while True:
            await self._free_slot()
            await self.handler.wait_reachable()
            try:
                # Taking an entry is a write: none is taken from a store that is not the tenant's own.
                await self._snapshots.get()
                if not tidied:
                    await self._outbox.tidy()
                    tidied = True
                await self._take()
                self._told = ""
            except (LockgateError, OSError) as error:
                # Entries handed out with a lost reply are only found by asking for them.
                self._unseen = True
                if str(error) != self._told:
                    self._told = str(error)
                    _log.warning("reading waits", tenant=self._tenant, peer=self.peer, reason=self._told)
                await asyncio.sleep(random.uniform(0.05, 0.5))  # noqa: S311

    async def _take(self) -> None:
        free = self._concurrency - len(self._work)
        if self._unseen and not self._backlog:
            self._unseen = False
            self._backlog = await self._handed_out()
        if not self._backlog:
            requests = await self._outbox.new(free)
        else:
            requests, self._backlog = self._backlog[:free], self._backlog[free:]
        for request in requests:
            self._start(request)

    async def _handed_out(self) -> list[Request]:
        """What this reader was given that nobody works on."""
        return [request for request in await self._outbox.mine(_ALL) if _key(request) not in self._work]

    async def _free_slot(self) -> None:
        while len(self._work) >= self._concurrency:
            self._freed.clear()
            await self._freed.wait()

    def _start(self, request: Request) -> None:
        key = _key(request)
        if key in self._work:
            # Offered again while an earlier lease of ours is not put away yet.
            self._following[key] = request
            return
        task = asyncio.create_task(self._carrier.carry(request))
        self._work[key] = task
        task.add_done_callback(lambda ended: self._ended(key, request, ended))

    def _ended(self, key: _Key, request: Request, task: asyncio.Task[None]) -> None:
        del self._work[key]
        self._freed.set()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Missed):
            self._unseen = True
        elif error is not None:
            _log.error("work failed", tenant=self._tenant, operation=request.operation_id, exc_info=error)
        following = self._following.pop(key, None)
        if following is not None:
            self._start(following)

    # Draining

    async def _drain(self, within_s: float) -> None:
        self.handler.close()
        await self._outbox.stop()
        with contextlib.suppress(LockgateError, OSError):
            await self._snapshots.get()
            # What was handed out while reading stopped is known to nobody else until its claim time has
            # passed.
            for request in (await self._handed_out())[: self._concurrency]:
                self._start(request)
        await self._wait_for_work(within_s)
        self._following.clear()
        self._leases.give_up()
        await self._wait_for_work(_RELEASE_S)
        with contextlib.suppress(LockgateError, OSError):
            await self._snapshots.get()
            await self._outbox.leave()
        _log.info("drained", tenant=self._tenant, peer=self.peer, left=len(self._work))

    async def _wait_for_work(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._work:
                    self._freed.clear()
                    await self._freed.wait()


def _key(request: Request) -> _Key:
    return request.operation_id, request.branch


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
