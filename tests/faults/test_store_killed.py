"""The store killed with SIGKILL while clients submit and workers work; relays killed while they relay."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from shared.store.embedded import EmbeddedStore
from tests.faults.audit import Audit
from tests.faults.client import Command
from tests.faults.contracts import CONCURRENT
from tests.faults.load import Load
from tests.faults.system import System
from tests.faults.worker import Worker
from tests.support.polling import wait_until
from tests.support.processes import Processes


@pytest.mark.requirement(
    "DASP-CORE-004b",
    "DASP-CORE-004c",
    "DASP-CORE-005a",
    "DASP-CORE-005b",
    "DASP-CORE-006c",
    "DASP-CORE-009a",
    "DASPX-08",
)
@pytest.mark.case(54, 103)
async def test_a_killed_store_loses_nothing_that_was_acknowledged(system: System) -> None:
    rng = random.Random(20)
    await asyncio.gather(system.door(), system.central())
    async with Worker(system.ledger, lambda: rng.uniform(0.0, 0.02)) as worker, system.client() as client:
        await system.sidecar(worker.url)
        load = Load(client, rng)
        await load.open()
        running = asyncio.create_task(load.submit(150, 6))
        for kill_at in (40, 90):

            def so_many_were_sent(kill_at: int = kill_at) -> bool:
                return len(system.journal.commands) >= kill_at

            await wait_until(so_many_were_sent)
            await system.restart_store()
        replies = await running
        assert all(reply.acknowledged for reply in replies)
        audit = await Audit.of(system, client)
    assert len(audit.outcomes) == len(system.journal.commands) == 150
    assert any(
        reply.status in (0, 503) or reply.disposition == "duplicate" for reply in system.journal.replies
    )


@pytest.mark.requirement("RT-OUT-07", "DASP-CORE-004c")
@pytest.mark.case(64)
async def test_three_relays_of_which_one_is_killed_deliver_every_entry(
    own_store: EmbeddedStore, processes: Processes, tmp_path: Path
) -> None:
    async with System.create(own_store, processes, tmp_path, lease_ms=1_500) as system:
        await system.door()
        async with Worker(system.ledger) as worker, system.client() as client:
            await client.open("s1", CONCURRENT)
            commands = [Command(f"c{i}", "s1", "keyed") for i in range(200)]
            waiting = iter(commands)

            async def submit() -> None:
                for command in waiting:
                    await client.submit(command)

            await asyncio.gather(*(submit() for _ in range(8)))
            messages = {entry["o"]: entry["m"] for entry in system.outbox()}
            assert len(messages) == len(set(messages.values())) == len(commands)
            relays = await asyncio.gather(*(system.sidecar(worker.url, wait=False) for _ in range(3)))
            await wait_until(lambda: len(system.ledger.of("effect")) > 60, 30.0)
            random.Random(64).choice(relays).kill()
            audit = await Audit.of(system, client)
        assert audit.statuses() == {"completed": len(commands)}
        effects = [entry.effect_key for entry in audit.ledger if entry.kind == "effect"]
        assert len(effects) == len(set(effects)) == len(commands)
