"""Replies of the store that come later than anybody waits for, and a store that forgets its scripts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from shared.store.link import Limits
from tests.faults.audit import Audit
from tests.faults.client import Client, Command, Reply
from tests.faults.contracts import CONCURRENT
from tests.faults.load import Load
from tests.faults.system import System
from tests.faults.worker import Worker
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy

ADMITS = 1_000
CLIENTS = 24


async def _submit(client: Client, commands: Iterator[Command]) -> None:
    for command in commands:
        reply = await client.submit(command)
        assert reply.acknowledged, reply


@pytest.mark.requirement("DASP-CORE-004d", "DASP-CORE-005b", "RT-STORE-16")
@pytest.mark.case(92)
async def test_replies_later_than_every_timeout_admit_nothing_twice(system: System) -> None:
    too_late_s = Limits().timeout_s + 0.4
    async with FaultProxy(system.store.url) as proxy:
        await system.door(proxy.url)
        # The client gives up long before the door does, and sends the command again.
        async with system.client(timeout_s=1.0) as client:
            await client.open("s1", CONCURRENT)
            commands = [Command(f"c{i}", "s1", "pay") for i in range(ADMITS)]
            source = iter(commands)
            running = [asyncio.create_task(_submit(client, source)) for _ in range(CLIENTS)]
            await wait_until(lambda: len(system.journal.replies) > ADMITS // 4, 30.0)
            proxy.delay(too_late_s)
            await wait_until(lambda: sum(r.status == 0 for r in system.journal.replies) > CLIENTS, 30.0)
            proxy.pass_on()
            await asyncio.gather(*running)
            updates = await client.updates("s1")
        assert Counter(update["command_id"] for update in updates) == {c.id: 1 for c in commands}
        assert [update["sequence"] for update in updates] == list(range(1, ADMITS + 1))
        placed = {update["command_id"]: update["sequence"] for update in updates}
        told = system.journal.acknowledgements()
        assert told == {command: {sequence} for command, sequence in placed.items()}
        assert Counter(entry["o"] for entry in system.outbox()) == {
            system.operation_id(command.id): 1 for command in commands
        }


@pytest.mark.requirement("RT-STORE-16", "DASP-CORE-007b")
@pytest.mark.case(92)
async def test_replies_later_than_every_timeout_grant_no_fence_twice(system: System) -> None:
    rng = random.Random(92)
    async with FaultProxy(system.store.url) as proxy, system.client() as client:
        await system.door()
        async with Worker(system.ledger) as worker:
            await asyncio.gather(
                system.sidecar(worker.url, proxy.url), system.sidecar(worker.url), system.central()
            )
            load = Load(client, rng)
            await load.open()
            running = asyncio.create_task(load.submit(100, 6))
            await wait_until(lambda: len(system.ledger.of("called")) > 30, 30.0)
            connections = proxy.connections
            proxy.delay(Limits().timeout_s + 0.4)
            # Only a connection that was given up is made anew.
            await wait_until(lambda: proxy.connections > connections, 30.0)
            proxy.pass_on()
            await running
            await load.submit(50, 6)
            audit = await Audit.of(system, client)
    assert len(audit.outcomes) == 150


@pytest.mark.requirement("DASP-CORE-009a")
@pytest.mark.case(96)
async def test_a_store_that_forgets_its_scripts_fails_no_admission(system: System) -> None:
    rng = random.Random(96)
    await asyncio.gather(system.door(), system.central())
    flushed = 0

    async def flush() -> None:
        nonlocal flushed
        while True:
            await asyncio.to_thread(system.raw.script_flush)
            flushed += 1
            await asyncio.sleep(0.1)

    async with Worker(system.ledger) as worker, system.client() as client:
        await system.sidecar(worker.url)
        load = Load(client, rng)
        await load.open()
        flushing = asyncio.create_task(flush())
        await load.submit(150, 6)
        await wait_until(lambda: flushed >= 10)
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)
        assert [reply for reply in system.journal.replies if not reply.acknowledged] == []
        # Beyond the outage of a restart, which forgets scripts too, none fails either.
        await system.restart_store()
        async with asyncio.timeout(20):
            while not (await client.once(load.command())).acknowledged:
                await asyncio.sleep(0.05)
        before = len(system.journal.replies)
        await load.submit(40, 6)
        after: list[Reply] = system.journal.replies[before:]
        assert [reply for reply in after if not reply.acknowledged] == []
        # A command that found the outage is asked about until it is answered.
        for command in list(system.journal.commands.values()):
            await client.submit(command)
        await Audit.of(system, client)
