"""Processes that were only slow: stopped past their lease, holding a list or a decision that is old."""

from __future__ import annotations

import asyncio

import pytest

from shared.domain.records import Branch
from tests.faults.audit import Audit
from tests.faults.client import Client, Command
from tests.faults.contracts import CONCURRENT
from tests.faults.system import System
from tests.faults.worker import Worker
from tests.support.breakpoints import BreakpointProxy
from tests.support.polling import wait_until


def branch(system: System, command: Command) -> Branch:
    """A command's one branch as stored."""
    return Branch.parse(system.record(command.id)["b:0"])


async def submitted(client: Client, kind: str) -> Command:
    """One command in a session of its own."""
    command = Command(f"{kind}-1", f"s-{kind}", kind)
    await client.open(command.session, CONCURRENT)
    await client.submit(command)
    return command


@pytest.mark.requirement("DASP-CORE-006b", "DASP-CORE-006a")
@pytest.mark.case(40, 54)
async def test_a_worker_that_was_stopped_past_its_lease_replaces_nothing(system: System) -> None:
    async with Worker(system.ledger) as slow, Worker(system.ledger) as quick, system.client() as client:
        _, stopped = await asyncio.gather(system.door(), system.sidecar(slow.url))
        hold = slow.hold("after the effect")
        command = await submitted(client, "safe")
        await hold.wait()
        stopped.pause()
        await system.sidecar(quick.url)
        outcome = await client.settled(command)
        assert outcome.status == "completed"
        settled = system.record(command.id)
        assert branch(system, command).fence > 1
        # The late answer is there when the stopped process comes back.
        hold.released.set()
        stopped.resume()
        await wait_until(lambda: "answer refused" in stopped.output or "lease lost" in stopped.output)
        assert system.record(command.id) == settled
        assert await client.outcome(command) == outcome
        assert len(system.ledger.of("effect", command.id)) == 2
        await Audit.of(system, client)


@pytest.mark.requirement("DASP-CORE-006b", "DASP-CORE-007b", "DASP-CORE-007c")
@pytest.mark.case(62)
async def test_a_late_answer_does_not_rewrite_an_uncertain_outcome(system: System) -> None:
    async with Worker(system.ledger) as worker, system.client() as client:
        _, stopped, _ = await asyncio.gather(system.door(), system.sidecar(worker.url), system.central())
        hold = worker.hold("after the effect")
        command = await submitted(client, "pay")
        await hold.wait()
        stopped.pause()
        outcome = await client.settled(command)
        assert outcome.status == "uncertain"
        settled = system.record(command.id)
        hold.released.set()
        stopped.resume()
        await wait_until(lambda: "answer refused" in stopped.output or "lease lost" in stopped.output)
        assert system.record(command.id) == settled
        assert await client.outcome(command) == outcome
        assert [entry.attempt for entry in system.ledger.of("effect")] == [1]
        await Audit.of(system, client)


@pytest.mark.requirement("DASP-CORE-004c")
@pytest.mark.case(27)
async def test_a_recoverer_with_an_old_list_is_refused(system: System) -> None:
    async with (
        BreakpointProxy(system.store.url) as proxy,
        Worker(system.ledger) as worker,
        system.client() as client,
    ):
        await asyncio.gather(system.door(), system.sidecar(worker.url, proxy.url))
        stop = proxy.stop_before("lease claim")
        command = await submitted(client, "pay")
        await stop.reached()
        # Its offer runs out; the other sidecar gets the next one and does the work.
        await system.sidecar(worker.url)
        outcome = await client.settled(command)
        assert outcome.status == "completed"
        stop.release()
        assert (await stop.reply())[0] == b"TERMINAL"
        assert await client.outcome(command) == outcome
        assert len(system.ledger.of("called")) == len(system.ledger.of("effect")) == 1
        await Audit.of(system, client)


@pytest.mark.requirement("DASP-CORE-006b")
@pytest.mark.case(31)
async def test_a_recoverer_that_decided_long_ago_overwrites_nothing(system: System) -> None:
    async with (
        BreakpointProxy(system.store.url) as proxy,
        Worker(system.ledger) as worker,
        system.client() as client,
    ):
        _, owner, _ = await asyncio.gather(
            system.door(), system.sidecar(worker.url), system.central(proxy.url)
        )
        hold = worker.hold("before the effect")
        command = await submitted(client, "safe")
        await hold.wait()
        lost = branch(system, command).fence
        operation = system.operation_id(command.id).encode()
        stop = proxy.stop_before("replace", operation, b"same")
        owner.kill()
        hold.lose_answer = True
        hold.released.set()
        # The central process decided to take over and stands still; another one does it and the work ends.
        await stop.reached()
        await system.sidecar(worker.url)
        outcome = await client.settled(command)
        assert outcome.status == "completed"
        assert branch(system, command).fence > lost
        settled = system.record(command.id)
        stop.release()
        assert (await stop.reply())[0] == b"TERMINAL"
        assert system.record(command.id) == settled
        assert await client.outcome(command) == outcome
        await Audit.of(system, client)


@pytest.mark.requirement("DASP-CORE-006b")
async def test_a_settler_that_was_stopped_before_its_commit_commits_nothing_late(system: System) -> None:
    async with (
        BreakpointProxy(system.store.url) as proxy,
        Worker(system.ledger) as worker,
        system.client() as client,
    ):
        await asyncio.gather(system.door(), system.sidecar(worker.url, proxy.url))
        operation = system.operation_id("pay-1").encode()
        stop = proxy.stop_before("replace", operation, b"outcome")
        command = await submitted(client, "pay")
        await stop.reached()
        await system.central()
        outcome = await client.settled(command)
        assert outcome.status == "completed"
        settled = system.record(command.id)
        stop.release()
        assert (await stop.reply())[0] == b"TERMINAL"
        assert system.record(command.id) == settled
        await Audit.of(system, client)
