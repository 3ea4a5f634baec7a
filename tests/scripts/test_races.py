"""What happens between load and commit: in a known order, and with jitter over several connections."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from shared.domain.decide import Change, Event, apply
from shared.domain.records import Operation
from shared.store.codes import Code
from shared.store.connection import Connection
from shared.store.replies import Grant, NewOperation, OutOfMemory
from tests.scripts.scenes import (
    OTHER_RESULT,
    RESULT,
    answered,
    branch_of,
    held,
    offered,
    outcomes,
    session_of,
    terminal_change,
    unchanged,
)
from tests.support.world import World, anyone, terms

DEADLINE_MS = 10_000


async def decided(
    world: World, new: NewOperation, when: int, event: Event = "due", **more: Any
) -> tuple[Operation, Change]:
    """Loaded and decided, not yet committed."""
    op = await world.load(new)
    change = apply(op, terms(**more), anyone, event, when)
    assert change is not None
    return op, change


async def refused(world: World, op: Operation, change: Change, code: Code, what: str = "") -> None:
    async with unchanged(world):
        reply = await world.commit(op, change)
    assert (reply.code, reply.text(0)) == (code, what or reply.text(0))


# The gate opens between load and commit


@pytest.mark.requirement("RT-OWN-03", "RT-STORE-04", "DASP-CORE-007a")
@pytest.mark.case(27)
async def test_a_take_over_decided_before_the_gate_opened_is_refused(world: World) -> None:
    """Case 27: whoever decided from the old list would send work out that may be running."""
    await world.start()
    new, grant = await held(world, open_gate=False)
    op, change = await decided(world, new, grant.until_ms)
    await world.store.open_gate(grant.lease, world.revisions)
    await world.at(grant.until_ms)
    await refused(world, op, change, Code.ASSERTION, "same")
    await world.decide(new, grant.until_ms, effects="unsafe")
    (outcome,) = await outcomes(world)
    assert b'"uncertain"' in outcome


@pytest.mark.requirement("RT-GUARD-12", "DASP-CORE-007b")
async def test_a_deadline_decided_before_the_gate_opened_is_refused(world: World) -> None:
    now = await world.start()
    new, grant = await held(world, open_gate=False)
    await world.store.renew([grant.lease], 60_000, world.revisions)
    op, change = await decided(world, new, now + DEADLINE_MS, effects="unsafe")
    await world.store.open_gate(grant.lease, world.revisions)
    await world.at(now + DEADLINE_MS)
    await refused(world, op, change, Code.ASSERTION, "same")
    await world.decide(new, now + DEADLINE_MS, effects="unsafe")
    (outcome,) = await outcomes(world)
    assert b'"uncertain"' in outcome


@pytest.mark.requirement("DASP-CORE-007b")
@pytest.mark.parametrize("open_gate", [True, False])
async def test_a_closure_decided_before_the_work_was_taken_is_refused(world: World, open_gate: bool) -> None:
    """``session-closed`` says that the work never began: not of work that somebody took meanwhile."""
    now = await world.start()
    new = await offered(world)
    await world.store.close_session("s1", world.revisions)
    op, change = await decided(world, new, now, "session-closing")
    await world.granted(new, open_gate=open_gate)
    await refused(world, op, change, Code.ASSERTION, "same")


@pytest.mark.requirement("DASP-CORE-007b")
async def test_a_closure_decided_before_the_turn_is_refused(world: World) -> None:
    now = await world.start()
    first, _ = await answered(world)
    second = world.command("c2")
    await world.admit(second)
    op, change = await decided(world, second, now, "session-closing")
    await world.decide(first, now)
    session = await session_of(world)
    await world.store.turn("s1", world.revisions, busy=session.busy, following=op, claim_timeout_ms=1000)
    await refused(world, op, change, Code.ASSERTION, "seat")


@pytest.mark.requirement("DASP-CORE-012f")
async def test_a_purge_decided_while_work_was_taken_is_refused(world: World) -> None:
    """Delete: what is still worked on is no tombstone, whoever read the session before."""
    await world.start()
    new = await offered(world)
    await world.store.close_session("s1", world.revisions)
    await world.granted(new)
    async with unchanged(world):
        reply = await world.store.purge("s1", [new.operation_id], True, world.revisions)
    assert reply.code is Code.CONFLICT


@pytest.mark.requirement("RT-RES-09", "RT-GUARD-14")
async def test_a_deadline_decided_before_the_answer_came_is_refused(world: World) -> None:
    now = await world.start()
    new, grant = await held(world)
    await world.store.renew([grant.lease], 60_000, world.revisions)
    op, change = await decided(world, new, now + DEADLINE_MS, effects="unsafe")
    await world.answer(grant.lease, RESULT)
    await world.at(now + DEADLINE_MS)
    await refused(world, op, change, Code.ASSERTION, "same")


@pytest.mark.requirement("DASP-CORE-012f", "DASP-CORE-006b")
async def test_a_result_folded_after_the_session_was_deleted_is_nowhere(world: World) -> None:
    now = await world.start()
    new, grant = await answered(world)
    op, change = await decided(world, new, now)
    await world.decide(new, now)
    await world.store.close_session("s1", world.revisions)
    await world.store.purge("s1", [new.operation_id], True, world.revisions)
    await refused(world, op, change, Code.ABSENT)
    async with unchanged(world):
        assert (await world.answer(grant.lease, RESULT)).code is Code.ABSENT


@pytest.mark.case(31)
@pytest.mark.requirement("RT-STORE-04", "RT-STORE-09", "DASP-CORE-006a")
async def test_a_recoverer_that_was_paused_overwrites_nothing(world: World) -> None:
    """Case 31: it decided, slept, and the owner completed meanwhile."""
    await world.start()
    new, grant = await held(world)
    op, change = await decided(world, new, grant.until_ms, effects="unsafe")
    await world.answer(grant.lease, RESULT)
    await world.decide(new, grant.granted_ms)
    await world.at(grant.until_ms)
    await refused(world, op, change, Code.TERMINAL)
    (outcome,) = await outcomes(world)
    assert b'"completed"' in outcome


@pytest.mark.case(28)
async def test_a_sweep_adopts_nothing_of_the_same_millisecond(world: World) -> None:
    """Case 28: an offer made in the very instant of the sweep is left alone; so is a lease."""
    now = await world.start()
    new = await offered(world)
    assert await world.decide(new, now) is None
    await world.granted(new)
    assert await world.decide(new, now) is None


@pytest.mark.case(48)
async def test_a_thousand_sweeps_take_nothing_from_a_healthy_owner(world: World) -> None:
    """Case 48: looking does not even write."""
    now = await world.start()
    new, grant = await held(world)
    async with unchanged(world):
        op = await world.load(new)
        for n in range(1000):
            assert apply(op, terms(), anyone, "due", now + n % 1000) is None
        for _ in range(50):
            assert await world.decide(new, now) is None
    assert (await world.answer(grant.lease, RESULT)).code is Code.OK


@pytest.mark.case(46)
async def test_work_that_waits_longer_than_a_lease_is_dispatched_once(world: World) -> None:
    """Case 46: a retry after three leases is offered once, however often somebody looks."""
    now = await world.start()
    new, grant = await held(world)
    await world.at(grant.until_ms)
    for _ in range(3):
        await world.decide(new, grant.until_ms, effects="idempotent", backoff_ms=3000)
    assert await world.connection.call("XLEN", world.keys.outbox("alfa")) == 0
    for when in range(now + 1000, now + 5000, 500):
        await world.at(when)
        await world.decide(new, when, effects="idempotent", backoff_ms=3000, claim_timeout_ms=9000)
    branch = await branch_of(world, new)
    assert (branch.attempt, branch.fence) == (2, 3)
    assert await world.connection.call("XLEN", world.keys.outbox("alfa")) == 1


# At maxmemory


@pytest.mark.requirement("DASP-CORE-012b", "RT-STORE-15")
async def test_when_memory_is_out_everything_but_new_work_goes_on(world: World) -> None:
    await world.open("s2")
    new, grant = await held(world)
    queued = world.command("c2")
    await world.admit(queued)
    done = world.command("c9", kind="concurrent")
    await world.admit(done)
    await world.commit(op := await world.load(done), terminal_change(op))
    await world.connection.call("CONFIG", "SET", "maxmemory", "1")
    try:
        async with unchanged(world):
            with pytest.raises(OutOfMemory):
                await world.admit(world.command("c3"))
            with pytest.raises(OutOfMemory):
                await world.open("s3")
            look = await world.store.lookup(new.operation_id, new.intent, "s1", world.revisions)
            assert look.code is Code.DUPLICATE
        assert (await world.store.renew([grant.lease], 5000, world.revisions))[0][0] is Code.RENEWED
        assert (await world.answer(grant.lease, RESULT)).code is Code.OK
        assert (await world.answer(grant.lease, RESULT)).code is Code.DUPLICATE
        assert (await world.answer(grant.lease, OTHER_RESULT)).code is Code.PROTOCOL_CONFLICT
        reply = await world.decide(new, grant.granted_ms)
        assert reply is not None
        assert reply.code is Code.OK
        session = await session_of(world)
        following = await world.load(queued)
        turn = await world.store.turn(
            "s1", world.revisions, busy=session.busy, following=following, claim_timeout_ms=1000
        )
        assert turn.text(0) == "dispatched"
        second = await world.granted(queued)
        assert (await world.store.release(second.lease, world.revisions)).code is Code.OK
        assert (await world.store.close_session("s2", world.revisions)).code is Code.OK
        assert (await world.store.purge("s2", [], True, world.revisions)).code is Code.OK
        assert (await world.store.put_cursor("s1", "alice/x", 1, world.revisions)).code is Code.OK
    finally:
        await world.connection.call("CONFIG", "SET", "maxmemory", "0")


# With jitter, over several connections


@asynccontextmanager
async def executors(world: World, url: str, count: int = 4) -> AsyncIterator[list[World]]:
    """The same tenant from several connections, as several processes would see it."""
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(Connection(url)) for _ in range(count)]
        yield [World(connection, world.revisions.authority) for connection in connections]


async def jitter() -> None:
    """Somewhere between load and commit."""
    await asyncio.sleep(random.choice([0, 0, 0.0005, 0.001, 0.002]))


async def settle(world: World, new: NewOperation, when: int, **more: Any) -> Code | None:
    op = await world.load(new)
    change = apply(op, terms(**more), anyone, "due", when)
    if change is None:
        return None
    await jitter()
    return (await world.commit(op, change)).code


async def end(world: World, new: NewOperation, when: int) -> bool:
    """Whether this decided the end of the operation."""
    op = await world.load(new)
    change = apply(op, terms(), anyone, "due", when)
    await jitter()
    return (
        change is not None
        and change.decision is not None
        and (await world.commit(op, change)).code is Code.OK
    )


async def racing(*jobs: Callable[[], Awaitable[object]]) -> None:
    async def late(job: Callable[[], Awaitable[object]]) -> None:
        await jitter()
        await job()

    shuffled = random.sample(jobs, len(jobs))
    await asyncio.gather(*(late(job) for job in shuffled))


@pytest.mark.requirement("RT-OWN-10", "RT-OWN-02")
async def test_of_two_holders_of_one_peer_one_gets_the_work(world: World, redis_url: str) -> None:
    await world.start()
    await world.open()
    async with executors(world, redis_url) as several:
        for n in range(25):
            new = world.command(f"c{n}", kind="concurrent")
            await world.admit(new)
            got: list[Grant] = []

            async def holder(each: World, new: NewOperation = new, got: list[Grant] = got) -> None:
                reply = await each.claim(new, open_gate=random.random() < 0.5)
                if isinstance(reply, Grant):
                    got.append(reply)
                else:
                    assert reply.code is Code.HELD

            await racing(*(lambda each=each: holder(each) for each in several))
            assert len(got) == 1


@pytest.mark.requirement("RT-GUARD-14", "RT-GUARD-13", "RT-DEC-16", "DASP-CORE-006b")
async def test_answer_against_deadline_has_one_winner(world: World, redis_url: str) -> None:
    """The clock stands just before or at the deadline; who commits agrees with the instant it tells."""
    async with executors(world, redis_url) as several:
        seen: Counter[str] = Counter()
        now = await world.start()
        await world.open()
        for n in range(40):
            new = world.command(f"c{n}", kind="concurrent", timeout_ms=1000)
            await world.admit(new)
            grant = await world.granted(new, lease_ms=60_000)
            deadline = now + 1000
            await world.at(deadline - 1)

            async def answer(lease: Any = grant.lease, deadline: int = deadline) -> None:
                reply = await several[0].answer(lease, RESULT)
                assert (reply.code is Code.OK) <= (reply.now_ms < deadline)

            async def fold(new: NewOperation = new, deadline: int = deadline) -> None:
                for _ in range(4):
                    await settle(several[1], new, deadline - 1, effects="unsafe")

            async def expire(new: NewOperation = new, deadline: int = deadline) -> None:
                await world.at(deadline)
                for _ in range(4):
                    await settle(several[2], new, deadline, effects="unsafe")

            await racing(answer, fold, expire)
            op = await world.load(new)
            assert op.decision is not None
            assert (op.decision.outcome == "success") == (op.decision.at_ms < deadline)
            seen[op.decision.outcome] += 1
            now = deadline
        assert len(await outcomes(world)) == 40
        assert sum(seen.values()) == 40


@pytest.mark.case(53)
@pytest.mark.requirement("RT-GUARD-14", "RT-DEC-16", "DASP-CORE-006a", "DASP-CORE-006b")
async def test_ending_against_completing_leaves_one_end_that_stays(world: World, redis_url: str) -> None:
    """Case 53, bounded: a session closes while its command is claimed, answered and settled."""
    async with executors(world, redis_url) as several:
        for n in range(40):
            session = f"race-{n}"
            await world.open(session)
            new = world.command(f"c{n}", session_id=session)
            await world.admit(new)
            told: list[bool] = []

            async def complete(new: NewOperation = new, told: list[bool] = told) -> None:
                reply = await several[0].claim(new)
                if isinstance(reply, Grant):
                    await jitter()
                    await several[0].answer(reply.lease, RESULT)
                    told.append(await end(several[0], new, reply.granted_ms))

            async def close(new: NewOperation = new, session: str = session, told: list[bool] = told) -> None:
                reply = await several[1].store.close_session(session, world.revisions)
                told.append(await end(several[1], new, reply.now_ms))

            await racing(complete, close)
            when = (await several[2].store.close_session(session, world.revisions)).now_ms
            told.append(await end(several[2], new, when))
            (first,) = await outcomes(world, session)
            assert sum(told) == 1
            for each in several:
                assert await settle(each, new, when + DEADLINE_MS) is None
            assert await outcomes(world, session) == [first]


@pytest.mark.requirement("RT-OWN-03", "RT-STORE-05", "DASP-CORE-007a")
@pytest.mark.case(27)
async def test_take_over_against_opening_never_gives_work_out_twice(world: World, redis_url: str) -> None:
    """Case 27: the holder opens its gate in the last millisecond while others take the work over."""
    now = await world.start()
    await world.open()
    async with executors(world, redis_url) as several:
        for n in range(40):
            new = world.command(f"c{n}", kind="concurrent", timeout_ms=600_000)
            await world.admit(new)
            grant = await world.granted(new, open_gate=False)
            await world.at(grant.until_ms - 1)
            opened: list[str] = []

            async def holder(lease: Any = grant.lease, opened: list[str] = opened) -> None:
                reply = await several[0].store.open_gate(lease, world.revisions)
                if reply.code is Code.OK:
                    opened.append(lease.fence)

            async def recoverer(
                each: World, new: NewOperation = new, when: int = grant.until_ms, opened: list[str] = opened
            ) -> None:
                await each.at(when)
                await settle(each, new, when, effects="unsafe")
                reply = await each.claim(new)
                if isinstance(reply, Grant):
                    opened.append(reply.lease.fence)

            await racing(holder, *(lambda each=each: recoverer(each) for each in several[1:]))
            assert len(opened) <= 1, "unsafe work was begun twice"
            now = grant.until_ms
        assert (await session_of(world)).head == 40 + len(await outcomes(world))
    assert now > 0


@pytest.mark.requirement("RT-STORE-05", "RT-RES-13", "DASP-CORE-009a")
async def test_many_settle_loops_fold_each_answer_once(world: World, redis_url: str) -> None:
    await world.start()
    await world.open()
    ops = [world.command(f"c{n}", kind="concurrent") for n in range(30)]
    for new in ops:
        await world.admit(new)
        grant = await world.granted(new)
        await world.answer(grant.lease, RESULT)
    when = grant.granted_ms
    async with executors(world, redis_url) as several:

        async def loop(each: World) -> list[Code | None]:
            return [await settle(each, new, when) for new in random.sample(ops, len(ops))]

        codes = Counter(code for codes in await asyncio.gather(*map(loop, several)) for code in codes)
    assert codes[Code.OK] == 30
    assert len(await outcomes(world)) == 30
    assert (await session_of(world)).pending == 0


@pytest.mark.requirement("RT-STORE-05")
async def test_a_wake_up_is_never_lost_to_a_race(world: World, redis_url: str) -> None:
    """Answers arrive while others re-arm by what they saw: every answered operation stays due."""
    now = await world.start()
    await world.open()
    async with executors(world, redis_url) as several:
        for n in range(30):
            new = world.command(f"c{n}", kind="concurrent")
            await world.admit(new)
            grant = await world.granted(new)
            await world.connection.call("ZADD", world.keys.due, now - 1, new.operation_id)

            async def answer(lease: Any = grant.lease) -> None:
                assert (await several[0].answer(lease, RESULT)).code is Code.OK

            await racing(answer, *(lambda each=each, new=new: settle(each, new, now) for each in several[1:]))
            op = await world.load(new)
            assert op.phase == "settled" or (op.wake_ms is not None and op.wake_ms <= now)
