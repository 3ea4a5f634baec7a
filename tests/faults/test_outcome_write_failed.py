"""An outcome that could not be written is none: nobody is told of it before it is committed."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from tests.faults.audit import Audit
from tests.faults.client import Client, Command
from tests.faults.contracts import SERIAL
from tests.faults.system import System
from tests.faults.worker import Worker
from tests.support.breakpoints import BreakpointProxy
from tests.support.polling import wait_until

_REPLICAS: Final = "min-replicas-to-write"


async def nothing_is_told(client: Client, command: Command) -> None:
    """Neither the outcome nor an update says anything of an end; the answer that is stored stays unseen."""
    assert await client.outcome(command, wait_s=1) is None
    assert [update["kind"] for update in await client.updates(command.session)] == ["command.accepted"]
    assert (await client.view(command.session))["state"] == {"value": 0}


async def first_update_after(client: Client, session: str, cursor: int) -> dict[str, Any]:
    """Follow a session live until an update comes."""
    while True:
        updates = await client.updates(session, after=cursor)
        if updates:
            return updates[0]
        await asyncio.sleep(0.05)


@pytest.mark.requirement("DASPX-12", "DASP-CORE-008a", "DASP-CORE-009b", "RT-DUR-09")
@pytest.mark.case(54)
async def test_a_store_that_refuses_the_outcome_publishes_nothing(system: System) -> None:
    command = Command("c1", "s1", "pay", 3)
    async with BreakpointProxy(system.store.url) as proxy, system.client() as client:
        await system.door()
        async with Worker(system.ledger) as worker:
            await asyncio.gather(system.sidecar(worker.url, proxy.url), system.central(proxy.url))
            await client.open("s1", SERIAL)
            stop = proxy.stop_before("replace", system.operation_id("c1").encode(), b"outcome")
            await client.submit(command)
            await stop.reached()
            # The store takes no writes from here on, as with a full disk.
            system.raw.config_set(_REPLICAS, 1)
            stop.release()
            refused = len(proxy.calls)
            await wait_until(lambda: proxy.calls[refused:].count("replace") >= 2)
            await nothing_is_told(client, command)
            assert system.record("c1")["phase"] == "admitted"
            live = asyncio.create_task(first_update_after(client, "s1", 1))
            system.raw.config_set(_REPLICAS, 0)
            assert (await client.settled(command)).status == "completed"
            assert (await live)["payload"]["data"] == {"id": "c1", "value": 3}
            assert len(system.ledger.of("effect")) == 1
            await Audit.of(system, client)


@pytest.mark.requirement("DASPX-12", "RT-STORE-15")
async def test_a_store_that_is_away_when_the_outcome_is_due_publishes_nothing(system: System) -> None:
    command = Command("c1", "s1", "pay", 3)
    async with BreakpointProxy(system.store.url) as proxy, system.client() as client:
        await system.door()
        async with Worker(system.ledger) as worker:
            await system.sidecar(worker.url, proxy.url)
            await client.open("s1", SERIAL)
            stop = proxy.stop_before("replace", system.operation_id("c1").encode(), b"outcome")
            await client.submit(command)
            await stop.reached()
            await asyncio.to_thread(system.store.kill)
            stop.release()
            assert await client.status("/v1/sessions/s1/commands/c1") == 503
            await asyncio.to_thread(system.store.start)

            async def is_served() -> bool:
                return await client.status("/v1/sessions/s1") == 200

            await wait_until(is_served)
            first = await first_update_after(client, "s1", 1)
            assert (await client.settled(command)).status == "completed"
            assert first["payload"] == {"name": "fault.added", "data": {"id": "c1", "value": 3}}
            await Audit.of(system, client)
        assert len(system.ledger.of("effect")) == 1
