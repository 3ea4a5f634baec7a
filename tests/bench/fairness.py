"""What a tenant's settling costs beside another tenant's backlog, in one settlement process for both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from statistics import median

from shared.domain.limits import TenantLimits
from shared.store.embedded import EmbeddedStore
from shared.store.registry import set_limits
from shared.store.runtime import Runtime
from shared.store.wake import operation_topic
from tests.bench.load import percentile
from tests.bench.table import Row
from tests.settlement.host import Host, contract
from tests.support.polling import wait_until
from tests.support.processes import Process, Processes

BACKLOG = 100_000
COMMANDS = 300
AIM = 3.0
_AT_ONCE = 500
_FAST = TenantLimits(admissions_per_second=1_000_000, burst=1_000_000)


def rows(store: EmbeddedStore, processes: Processes) -> list[Row]:
    """From a stored answer to its outcome, which the settlement process has to notice by itself: with
    nothing else to do, and while 100,000 overdue commands of another tenant are being settled.
    """
    return asyncio.run(_measure(store, processes))


async def _measure(store: EmbeddedStore, processes: Processes) -> list[Row]:
    async with Runtime(store.url) as runtime:
        await runtime.refresh()
        terms = contract(execution="concurrent", timeout_ms=600_000)
        light = await Host.furnish(store.url, runtime, "light", terms)
        heavy = await Host.furnish(store.url, runtime, "heavy", terms)
        await set_limits(runtime.connection, "heavy", _FAST)
        heavy.handle.snapshots.forget()
        await light.open()
        await heavy.open()
        with _central(store, processes):
            await _settle_one(light, "warm")
            alone = [await _settle_one(light, f"alone-{number}") for number in range(COMMANDS)]
        await _fill(heavy)
        with _central(store, processes):
            await wait_until(lambda: _begun(heavy), 60.0)
            before, began = await _left(heavy), time.perf_counter()
            beside = [await _settle_one(light, f"beside-{number}") for number in range(COMMANDS)]
            left, took = await _left(heavy), time.perf_counter() - began
    assert left > 0, "the backlog was over before the measurement was"
    return _table(alone, beside, (before - left) / took, left)


@contextlib.contextmanager
def _central(store: EmbeddedStore, processes: Processes) -> Iterator[Process]:
    """A central settlement process of all tenants, ready when the block begins."""
    env = {"REDIS_URL": store.url, "PORT": "0", "METRICS_PORT": "off"}
    started = processes.python(
        "-m", "settlement_svc", env={f"LOCKGATE_{name}": value for name, value in env.items()}
    )
    for tenant in ("light", "heavy"):
        started.wait_for(f'"tenant": ?"{tenant}".*"settling"|"settling".*"tenant": ?"{tenant}"')
    yield started
    started.terminate()
    started.wait()


async def _fill(heavy: Host) -> None:
    """Admit the backlog; every command of it is overdue at once."""
    for start in range(0, BACKLOG, _AT_ONCE):
        names = [f"c{number}" for number in range(start, start + _AT_ONCE)]
        await asyncio.gather(*(heavy.submit(name, timeout_ms=1) for name in names))


async def _left(heavy: Host) -> int:
    return await heavy.handle.reads.count_due(heavy.runtime.clock.lower_ms())


async def _begun(heavy: Host) -> bool:
    return await _left(heavy) < BACKLOG


async def _settle_one(light: Host, command: str) -> float:
    """Milliseconds from an answer that is stored to the outcome that the process made of it."""
    operation = await light.submit(command)
    granted = await light.grant(operation)
    async with light.runtime.wake.watch(light.handle.tenant, (operation_topic(operation),)) as watcher:
        await light.store_answer(granted)
        began = time.perf_counter()
        while (await light.operation(command)).phase != "settled":
            await watcher.wait(1.0)
        return (time.perf_counter() - began) * 1000


def _table(alone: list[float], beside: list[float], rate: float, left: int) -> list[Row]:
    p50, p99 = (tuple(of(values) for values in (alone, beside)) for of in (median, _p99))
    return [
        Row("a light tenant, alone", f"p50 {p50[0]:.1f} ms, p99 {p99[0]:.1f} ms"),
        Row(
            f"beside {BACKLOG:,} due items of another",
            f"p50 {p50[1]:.1f} ms, p99 {p99[1]:.1f} ms",
            f"p50 {p50[1] / p50[0]:.2f} x, p99 {p99[1] / p99[0]:.2f} x alone",
            f"p50 ≤ {AIM:.0f} x alone",
            p50[1] <= AIM * p50[0],
        ),
        Row("the other one meanwhile", f"{rate:,.0f} settled/s, {left:,} left"),
    ]


def _p99(values: list[float]) -> float:
    return percentile(values, 0.99)
