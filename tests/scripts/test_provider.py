"""Our scripts pass a provider's checks, faulty ones do not, and no process serves a store without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shared.domain.decide import Change
from shared.domain.guard import TimeGuard
from shared.domain.records import Operation
from shared.store.address import Address
from shared.store.codes import Code
from shared.store.connection import Connection, ReplyError
from shared.store.embedded import EmbeddedStore
from shared.store.link import ReplyLost, StoreUnavailable
from shared.store.replies import NewOperation, Reply, Revisions
from shared.store.runtime import Runtime
from shared.store.scripts import missing_guard
from tests.scripts.provider import faults
from tests.scripts.scenes import answered, offered, outcomes, terminal_change
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy
from tests.support.world import World, moved_scripts

WRITES_WHATEVER_THE_TIME = """
--@include enter
local function outside(meta, now, not_before, not_after)
  return nil
end
"""
JUDGES_AFTER_WRITING = """
--@include enter
local function outside(meta, now, not_before, not_after)
  redis.call('HSET', KEYS[1], 'touched', now)
  if now < not_before or now >= not_after then
    return { 'OUTSIDE_WINDOW', now, 'guard' }
  end
end
"""


async def scripted(connection: Connection, parts: Mapping[str, str] | None = None) -> World:
    await connection.call("FLUSHALL")
    return await World.create(connection, moved_scripts(parts))


@pytest.mark.requirement("RT-GUARD-16", "RT-STORE-17", "RT-GUARD-02", "RT-GUARD-03")
async def test_our_scripts_pass_the_checks_of_a_provider(world: World) -> None:
    assert await faults(lambda: scripted(world.connection)) == []


@pytest.mark.requirement("RT-GUARD-16")
@pytest.mark.parametrize(
    ("window", "first"),
    [
        (WRITES_WHATEVER_THE_TIME, "guarded_create: at -1: written"),
        (JUDGES_AFTER_WRITING, "guarded_create: at -1: written"),
    ],
    ids=["no guard", "guard after a write"],
)
async def test_a_timestamp_after_an_unguarded_write_fails_the_checks(
    world: World, window: str, first: str
) -> None:
    found = await faults(lambda: scripted(world.connection, {"window": window}))
    assert found[0] == first
    assert "guarded_replace: at -1: written" in found


class ReadThenUpdate:
    """A store of plain reads and writes: it compares, and then it writes."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def admit(self, new: NewOperation, revisions: Revisions, guard: TimeGuard) -> Reply:
        return await self.world.scripts.admit(new, revisions, guard)  # type: ignore[attr-defined,no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world.scripts, name)  # type: ignore[attr-defined]

    async def replace(self, op: Operation, change: Change, revisions: Revisions, replay_ms: int) -> Reply:
        connection, key = self.world.connection, self.world.keys.op(op.id)
        if change.decision is not None:
            await connection.call("HSET", key, "phase", "settled")
        for field, value in change.sets:
            await connection.call("HSET", key, field, value)
        await connection.call("HSET", key, "rev", int(op.revision) + 1)
        return Reply(Code.OK, 0)


@pytest.mark.requirement("RT-STORE-17")
async def test_a_store_of_plain_reads_and_writes_fails_the_checks(world: World) -> None:
    async def plain() -> World:
        made = await scripted(world.connection)
        made.scripts = made.store  # type: ignore[attr-defined]
        made.store = ReadThenUpdate(made)  # type: ignore[assignment]
        return made

    found = await faults(plain)
    assert {fault.partition(":")[0] for fault in found} == {"guarded_replace", "lost_update", "same_instant"}


@pytest.mark.requirement("RT-GUARD-15", "RT-STORE-17")
@pytest.mark.parametrize("missing", ["-evalsha", "-script|load", "-@scripting"])
async def test_no_process_serves_a_store_that_does_not_run_the_guard(
    own_store: EmbeddedStore, missing: str
) -> None:
    """The capability gate: it is not ready, and the reason is in words."""
    async with Connection(own_store.url) as admin:
        assert await missing_guard(admin) is None
        await admin.call("ACL", "SETUSER", "plain", "on", ">secret", "~*", "&*", "+@all", missing)
        await admin.call("SCRIPT", "FLUSH")
    runtime = Runtime(own_store.url)
    runtime.connection = Connection(
        replace(Address.parse(own_store.url), username="plain", password="secret")
    )
    async with runtime:
        reason = await runtime.unready()
        assert reason is not None
        assert "guard every transition" in reason


async def test_a_store_that_runs_the_guard_is_ready(own_store: EmbeddedStore) -> None:
    async with Runtime(own_store.url) as runtime:
        assert await runtime.unready() is None


# Unavailable, and unknown


@pytest.mark.requirement("RT-STORE-15")
async def test_a_store_that_is_away_is_none_of_the_other_refusals(own_store: EmbeddedStore) -> None:
    async with Connection(own_store.url, connect_s=0.2) as connection:
        world = await World.create(connection)
        new, _ = await answered(world)
        op = await world.load(new)
        own_store.kill()
        await wait_until(lambda: not connection.connected)
        with pytest.raises(StoreUnavailable):
            await world.admit(new)
        with pytest.raises(StoreUnavailable):
            await world.commit(op, terminal_change(op))
        own_store.start()
        reply = await wait_until(lambda: _reached(world, op))
        assert reply is not None
        assert reply.code is Code.OK


async def _reached(world: World, op: Operation) -> Reply | None:
    try:
        return await world.commit(op, terminal_change(op))
    except StoreUnavailable:
        return None


@pytest.mark.requirement("RT-STORE-16", "DASP-CORE-006b", "DASP-CORE-005b")
async def test_after_a_lost_reply_the_record_tells(redis_url: str) -> None:
    """The reply of a commit is lost: read again, the change is there, and repeating it changes nothing."""
    async with (
        FaultProxy(redis_url) as proxy,
        Connection(proxy.url) as connection,
        Connection(redis_url) as direct,
    ):
        world = await World.create(connection)
        new, _ = await answered(world)
        op = await world.load(new)
        proxy.cut_after(0)
        with pytest.raises(ReplyLost):
            await world.commit(op, terminal_change(op))
        again = World(direct, world.revisions.authority)
        assert (await again.load(new)).phase == "settled"
        assert (await again.commit(op, terminal_change(op))).code is Code.TERMINAL
        assert len(await outcomes(again)) == 1


@pytest.mark.requirement("RT-STORE-16", "DASP-CORE-005a", "DASP-CORE-005b", "DASP-CORE-004d")
async def test_after_a_lost_reply_the_identical_admission_is_the_original(redis_url: str) -> None:
    async with FaultProxy(redis_url) as proxy, Connection(proxy.url) as connection:
        world = await World.create(connection)
        await world.open()
        new = world.command()
        proxy.cut_after(0)
        with pytest.raises(ReplyLost):
            await world.admit(new)
        reply = await world.admit(new)
        assert reply.code in (Code.OK, Code.DUPLICATE)
        again = await world.admit(new)
        assert again.code is Code.DUPLICATE
        page = await world.reads.page("s1", 0, 9, world.revisions)
        assert page is not None
        assert len(page.facts) == 1


@pytest.mark.requirement("RT-STORE-18")
async def test_a_stale_read_decides_nothing(world: World) -> None:
    """Whatever was read may be old: every word of it is asserted by the commit."""
    new = await offered(world)
    stale = await world.load(new)
    await world.granted(new)
    reply = await world.commit(stale, terminal_change(stale))
    assert (reply.code, reply.text(0)) == (Code.ASSERTION, "same")
    with pytest.raises(ReplyError):
        await world.connection.call("GET", world.keys.op(new.operation_id))
