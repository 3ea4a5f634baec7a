"""The two roles of a settlement process, and how it stops.

*central* settles every tenant, whoever works for it, and shares them with other central processes. *sidecar*
works for one peer of one tenant and settles that tenant as well: the fewer processes an outcome depends on,
the sooner it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from typing import Final, Protocol

from settlement_svc.division import BEAT_S, Division
from settlement_svc.handler import Endpoint
from settlement_svc.health import serve_health
from settlement_svc.settle import Settler
from settlement_svc.sidecar import Sidecar
from settlement_svc.turns import Turns
from shared import telemetry
from shared.config import OFF, SettingError, SettlementSettings
from shared.domain.errors import LockgateError, Unavailable
from shared.domain.ids import IdKind, check
from shared.store.registry import tenant_names
from shared.store.runtime import Runtime, TenantHandle

LOOK_S: Final = 60.0
"""How often a sidecar looks whether its store is still the tenant's own without being cut off from it. A
central process asks the registry all the time, and what a door notices is noted in the store, for all.
"""
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 4.0
"""The longest pause between two looks for a tenant that is not there: four store commands each."""
_log = telemetry.logger("lockgate.settlement")


class Role(Protocol):
    """What a settlement process is for."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set, then end in order."""

    async def unready(self) -> str | None:
        """Why it cannot do its work now, None while it can."""


class Central:
    """Settles its share of the registered tenants, each in its turn, or the one tenant it is given.

    For a tenant that falls to another process it keeps nothing that costs the store anything. One that is
    given its tenant stands outside of the division: it changes nobody's share.
    """

    def __init__(self, runtime: Runtime, tenant: str = "") -> None:
        self._runtime = runtime
        self._only = tenant
        self._division = None if tenant else Division(runtime.connection)
        self._turns = Turns()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        try:
            while not stop.is_set():
                try:
                    await self._refresh()
                except (LockgateError, OSError) as error:
                    _log.warning("the list of tenants waits", reason=str(error))
                await _pause(stop, BEAT_S)
        finally:
            if self._division is not None:
                await self._division.leave()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def unready(self) -> str | None:
        return await self._runtime.unready()

    async def _refresh(self) -> None:
        names = await self._share()
        for name, task in list(self._tasks.items()):
            if task.done():
                # Settling never ends by itself: begin again, and say what ended it.
                _log.error(
                    "settling ended", tenant=name, exc_info=None if task.cancelled() else task.exception()
                )
            elif name not in names:
                _log.info("left to others", tenant=name)
            if task.done() or name not in names:
                self._tasks.pop(name).cancel()
        for name in names - self._tasks.keys():
            self._tasks[name] = asyncio.create_task(self._settle(name))

    async def _share(self) -> set[str]:
        if self._division is None:
            return {self._only}
        await self._division.beat()
        names = await tenant_names(self._runtime.connection)
        return {name for name in names if self._division.mine(name)}

    async def _settle(self, name: str) -> None:
        handle = await _tenant(self._runtime, name)
        _log.info("settling", tenant=name)
        try:
            await Settler(self._runtime, handle, self._turns).run()
        finally:
            # What is not held is not looked at: the tenant is somebody else's now.
            handle.snapshots.forget()


class PeerSidecar:
    """Works for one peer and settles its tenant."""

    def __init__(self, runtime: Runtime, settings: SettlementSettings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._endpoint = Endpoint.parse(settings.handler_url)
        self._sidecar: Sidecar | None = None

    async def run(self, stop: asyncio.Event) -> None:
        handle = await self._handle(stop)
        if handle is None:
            return
        settler = Settler(self._runtime, handle)
        self._sidecar = Sidecar(
            self._runtime,
            handle,
            settler,
            peer=self._settings.peer,
            endpoint=self._endpoint,
            concurrency=self._settings.concurrency,
        )
        settling = asyncio.create_task(settler.run())
        try:
            await self._sidecar.run(stop, self._settings.drain_seconds)
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)

    async def unready(self) -> str | None:
        reason = await self._runtime.unready()
        if reason is not None:
            return reason
        if self._sidecar is None:
            return f"tenant {self._settings.tenant} is not available"
        try:
            return await self._sidecar.unready()
        except Unavailable as error:
            return error.description

    async def _handle(self, stop: asyncio.Event) -> TenantHandle | None:
        """The tenant's handle; None where the process is to stop before it is there."""
        finding = asyncio.create_task(_tenant(self._runtime, self._settings.tenant))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((finding, stopping), return_when=asyncio.FIRST_COMPLETED)
            return finding.result() if finding.done() else None
        finally:
            stopping.cancel()
            finding.cancel()
            await asyncio.gather(finding, stopping, return_exceptions=True)


async def _tenant(runtime: Runtime, name: str) -> TenantHandle:
    """Wait until a tenant's store is there: it may be created or adopted later, or the store may be away."""
    told, pause = "", _FIRST_PAUSE_S
    while True:
        try:
            return await runtime.tenant(name)
        except (Unavailable, OSError) as error:
            if str(error) != told:
                told = str(error)
                _log.warning("the tenant waits", tenant=name, reason=told)
        await asyncio.sleep(pause * random.uniform(0.75, 1.0))  # noqa: S311
        pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


def check_settings(settings: SettlementSettings) -> None:
    """Refuse settings that do not fit together. Raises SettingError."""
    if settings.peer and not (settings.tenant and settings.handler_url):
        raise SettingError("a sidecar needs LOCKGATE_TENANT, LOCKGATE_PEER and LOCKGATE_HANDLER_URL")
    if settings.handler_url and not settings.peer:
        raise SettingError("LOCKGATE_HANDLER_URL is for a sidecar: set LOCKGATE_PEER too")
    try:
        if settings.tenant:
            check(IdKind.TENANT, settings.tenant, "LOCKGATE_TENANT")
        if settings.peer:
            check(IdKind.PEER, settings.peer, "LOCKGATE_PEER")
            Endpoint.parse(settings.handler_url)
    except (LockgateError, ValueError) as error:
        raise SettingError(str(error)) from None


async def serve(settings: SettlementSettings) -> None:
    """Run one settlement process until SIGTERM or SIGINT. Raises OSError where its port is taken."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with _process(settings) as role:
        await role.run(stop)
    _log.info("stopped")


@contextlib.asynccontextmanager
async def _process(settings: SettlementSettings) -> AsyncIterator[Role]:
    """The role with everything around it: the store, health and metrics."""
    look_s = LOOK_S if settings.peer else None
    async with Runtime(settings.redis_url, settings.declared_durability, look_s) as runtime:
        role: Role = PeerSidecar(runtime, settings) if settings.peer else Central(runtime, settings.tenant)
        apart = OFF if settings.metrics_port == settings.port != 0 else settings.metrics_port
        with telemetry.MetricsServer(settings.host, apart) as metrics:
            async with serve_health(settings, role.unready) as port:
                _log.info(
                    "listening",
                    role="sidecar" if settings.peer else "central",
                    host=settings.host,
                    port=port,
                    metrics_port=metrics.port,
                )
                yield role
