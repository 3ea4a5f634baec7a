"""A store whose clock steps back or jumps ahead expires nothing, grants nothing and comes back by itself."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from shared.domain.decide import apply
from shared.domain.guard import TimeGuard
from shared.store.clock import SMALL_ROLLBACK_MS, StoreClock
from shared.store.codes import Code
from shared.store.connection import Connection
from shared.store.registry import accept_clock
from shared.store.replies import Claim, ClockRefusal, Grant, NewOperation, Reply
from shared.store.scripts import TenantStore
from tests.scripts.scenes import RESULT, branch_of, meta, offered, unchanged
from tests.support.world import TENANT, World, anyone, moved_scripts, terms

OFFSET_KEY = "test:offset"
OFFSET_CLOCK = f"""
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000) + (redis.call('GET', '{OFFSET_KEY}') or 0)
end
"""
HOUR_MS = 3_600_000


class Process:
    """One process with an honest clock of its own, over a store whose clock can be set off."""

    def __init__(self, world: World, connection: Connection) -> None:
        self.world = world
        self.connection = connection
        self.waits: list[float] = []
        self.clock = StoreClock(sleep=self._sleep)
        scripts = moved_scripts({"time": OFFSET_CLOCK})
        world.store = TenantStore(TENANT, connection, self.clock, world.epoch_moved, scripts)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(seconds)

    async def off(self, offset_ms: int) -> None:
        await self.connection.call("SET", OFFSET_KEY, offset_ms)

    async def admit(self, new: NewOperation) -> Reply:
        """As the door does it: the guard is read off the estimate."""
        start = self.clock.lower_ms()
        guard = TimeGuard(start, min(start + 10_000, self.clock.not_after()))
        return await self.world.store.admit(new, self.world.revisions, guard)

    async def claim(self, new: NewOperation) -> Grant | Reply:
        holder = secrets.token_hex(8)
        claim = Claim(new.operation_id, 0, "alfa", 1, holder, 60_000, 3, True, new.session_id)
        return await self.world.store.claim(claim, self.world.revisions)

    async def last_ms(self) -> int:
        return int(await self.connection.call("HGET", self.world.keys.meta, "last_ms"))


@pytest.fixture
async def process(world: World) -> Process:
    process = Process(world, world.connection)
    await offered(world, kind="concurrent", timeout_ms=60_000)
    return process


def another(process: Process, name: str = "c2") -> NewOperation:
    return process.world.command(name, kind="concurrent", timeout_ms=60_000)


@pytest.mark.requirement("RT-GUARD-17")
async def test_thirty_milliseconds_back_are_waited_out(process: Process) -> None:
    last = await process.last_ms()
    await process.off(-30)
    reply = await process.admit(another(process))
    assert reply.code is Code.OK
    assert reply.now_ms >= last
    assert process.waits
    assert max(process.waits) <= 0.031


async def test_a_small_step_back_is_waited_out_also_where_nothing_was_committed_lately(
    process: Process,
) -> None:
    """The start of a request is read off the estimate, which such a step leaves ahead of the store."""
    await process.connection.call("HSET", process.world.keys.meta, "last_ms", 0)
    await process.off(-200)
    assert (await process.admit(another(process))).code is Code.OK
    assert process.waits


@pytest.mark.requirement("RT-GUARD-17")
async def test_ten_seconds_back_refuse_until_time_has_caught_up(process: Process) -> None:
    """Reads, duplicates and what is not judged by time go on meanwhile."""
    world, new = process.world, another(process, "c1")
    await process.off(-10_000)
    async with unchanged(world):
        for call in (process.admit(another(process)), process.claim(new)):
            with pytest.raises(ClockRefusal):
                await call
        assert process.waits == []
        assert (await process.admit(new)).code is Code.DUPLICATE
        look = await world.store.lookup(new.operation_id, new.intent, "s1", world.revisions)
        assert look.code is Code.DUPLICATE
        assert (await world.reads.page("s1", 0, 9, world.revisions)) is not None
    await process.off(0)
    assert (await process.admit(new)).code is Code.DUPLICATE
    assert not process.clock.suspect
    assert (await process.admit(another(process))).code is Code.OK
    assert isinstance(await process.claim(new), Grant)


@pytest.mark.requirement("RT-GUARD-17", "RT-GUARD-13")
async def test_an_hour_ahead_and_back_expires_nothing_and_poisons_nothing(process: Process) -> None:
    world, new = process.world, another(process, "c1")
    grant = await process.claim(new)
    assert isinstance(grant, Grant)
    await process.admit(another(process))
    last = await process.last_ms()
    op = await world.load(new)
    await process.off(HOUR_MS)
    async with unchanged(world):
        assert (await process.admit(another(process, "c3"))).code is Code.OUTSIDE_WINDOW
        suspected = process.clock.suspect
        assert suspected
        for moment in (grant.until_ms, op.deadline_ms):
            change = apply(op, terms(effects="unsafe"), anyone, "due", moment)
            assert change is not None
            with pytest.raises(ClockRefusal):
                await world.commit(op, change)
        with pytest.raises(ClockRefusal):
            await process.claim(another(process))
        with pytest.raises(ClockRefusal):
            await world.store.renew([grant.lease], 1000, world.revisions)
        with pytest.raises(ClockRefusal):
            await world.answer(grant.lease, RESULT)
        assert (await process.admit(new)).code is Code.DUPLICATE
        assert (await world.reads.session("s1", world.revisions)) is not None
    assert await process.last_ms() == last
    await process.off(0)
    assert (
        await world.store.lookup(new.operation_id, new.intent, "s1", world.revisions)
    ).code is Code.DUPLICATE
    assert not process.clock.suspect
    assert (await process.admit(another(process, "c3"))).code is Code.OK
    assert (await world.answer(grant.lease, RESULT)).code is Code.OK
    assert (await branch_of(world, new)).status == "pending"


@pytest.mark.requirement("RT-GUARD-17", "RT-GUARD-13")
async def test_a_jump_that_nobody_saw_yet_only_fails_the_window(process: Process) -> None:
    """The very first transition after the jump: its upper bound is near the estimate."""
    world, new = process.world, another(process, "c1")
    grant = await process.claim(new)
    assert isinstance(grant, Grant)
    op = await world.load(new)
    for moment in (grant.until_ms, op.deadline_ms):
        process = Process(world, world.connection)
        await world.store.lookup(new.operation_id, new.intent, "s1", world.revisions)
        await process.off(HOUR_MS)
        change = apply(op, terms(effects="unsafe"), anyone, "due", moment)
        assert change is not None
        async with unchanged(world):
            reply = await world.commit(op, change)
        # The estimate has not reached the transition's own lower bound: such a window is empty.
        assert reply.code in (Code.OUTSIDE_WINDOW, Code.INVALID)
        await process.off(0)


@pytest.mark.requirement("RT-GUARD-17")
async def test_an_operator_accepts_a_clock_that_stays_behind(process: Process) -> None:
    world = process.world
    await meta(world, last_ms=await process.last_ms() + HOUR_MS)
    with pytest.raises(ClockRefusal):
        await process.admit(another(process))
    accepted = await accept_clock(process.connection, TENANT, "olga")
    assert await process.last_ms() == accepted
    assert (await process.admit(another(process))).code is Code.OK
    audit = await process.connection.call("HGET", world.keys.meta, "clock_accepted")
    assert audit.decode() == f"{accepted} olga"


@pytest.mark.requirement("RT-GUARD-17")
async def test_an_operator_accepts_a_clock_that_stays_ahead(process: Process) -> None:
    await process.admit(another(process))
    await process.off(HOUR_MS)
    assert (await process.admit(another(process, "c3"))).code is Code.OUTSIDE_WINDOW
    with pytest.raises(ClockRefusal):
        await process.claim(another(process))
    assert process.clock.accept(await process.last_ms() + HOUR_MS)
    assert (await process.admit(another(process, "c3"))).code is Code.OK


# The line between waiting and refusing, on a clock that only moves when somebody waits


@pytest.mark.requirement("RT-GUARD-17")
@pytest.mark.parametrize(("back", "waited"), [(SMALL_ROLLBACK_MS, True), (SMALL_ROLLBACK_MS + 1, False)])
async def test_small_is_waited_for_and_large_is_not(world: World, back: int, waited: bool) -> None:
    now = await world.start()
    await world.open()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await world.at(now)

    world.clock._sleep = sleep
    await world.at(now - back)
    if waited:
        assert (await world.admit(world.command())).code is Code.OK
        assert waits == [(back + 1) / 1000]
    else:
        with pytest.raises(ClockRefusal):
            await world.admit(world.command())
        assert waits == []


@pytest.mark.requirement("RT-GUARD-17")
async def test_a_clock_that_does_not_catch_up_is_not_waited_for_for_ever(world: World) -> None:
    now = await world.start()
    await world.open()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    world.clock._sleep = sleep
    await world.at(now - 10)
    with pytest.raises(ClockRefusal):
        await world.admit(world.command())
    assert len(waits) == 3


@pytest.mark.requirement("RT-TIME-04", "RT-TIME-06")
async def test_instants_are_the_stores_own_utc_milliseconds(process: Process) -> None:
    async def utc_ms() -> int:
        seconds, micros = await process.connection.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    before = await utc_ms()
    reply = await process.admit(another(process))
    after = await utc_ms()
    assert before <= reply.now_ms <= after
    op = await process.world.load(another(process))
    assert (op.admitted_ms, op.deadline_ms) == (reply.now_ms, reply.now_ms + 60_000)
