"""Cases from the field at store level: locks that should not be, sweeps that adopt, retries that add."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.domain.records import Answer
from shared.store.codes import Code
from shared.store.connection import Connection, ReplyError
from shared.store.replies import Reply
from tests.support.world import World


@pytest.mark.case(9)
async def test_a_thousand_admissions_share_no_lock_key(world: World, redis_url: str) -> None:
    news = [world.invocation(f"k{n}", peers=("alfa",)) for n in range(1000)]
    async with Connection(redis_url) as watcher:
        before = set(await watcher.call("KEYS", "*"))
        replies = await asyncio.gather(*(world.admit(new) for new in news))
        after = set(await watcher.call("KEYS", "*"))
    assert {reply.code for reply in replies} == {Code.OK}
    k = world.keys
    assert after - before == {k.op(new.operation_id) for new in news} | {k.due}


@pytest.mark.case(10)
async def test_a_failure_inside_admission_leaves_the_key_usable(world: World) -> None:
    new = world.invocation(peers=("alfa",))
    outbox = world.keys.outbox("alfa")
    await world.connection.call("RENAME", outbox, "aside")
    await world.connection.call("SET", outbox, "of another type")
    keys = set(await world.connection.call("KEYS", "*"))
    with pytest.raises(ReplyError):
        await world.admit(new)
    assert set(await world.connection.call("KEYS", "*")) == keys
    await world.connection.call("RENAME", "aside", outbox)
    assert (await world.admit(new)).code is Code.OK


@pytest.mark.case(28)
async def test_work_of_the_same_millisecond_is_not_adopted_by_a_sweep(world: World) -> None:
    now = await world.start()
    await world.open()
    new = world.command()
    await world.admit(new)
    grant = await world.granted(new)
    assert (grant.granted_ms, await world.reads.due(now, 10)) == (now, [])
    before = await world.dump()
    assert await world.decide(new, now) is None
    assert await world.dump() == before
    refused = await world.claim(new, "another")
    assert isinstance(refused, Reply)
    assert refused.code is Code.HELD


@pytest.mark.case(43)
async def test_the_same_command_while_it_runs_is_a_replay_and_adds_nothing(world: World) -> None:
    await world.open()
    new = world.command()
    first = await world.admit(new)
    grant = await world.granted(new)
    before = await world.dump()
    again = await world.admit(new)
    assert (again.code, again.text(0).split(" ")[2]) == (Code.DUPLICATE, first.text(0))
    assert await world.dump() == before
    answer = Answer(result=msgspec.Raw(b'{"value":3}'))
    assert (await world.answer(grant.lease, answer)).code is Code.OK


@pytest.mark.case(46)
async def test_a_retry_later_than_three_leases_is_offered_once(world: World) -> None:
    await world.start()
    await world.open()
    new = world.command(timeout_ms=60_000)
    await world.admit(new)
    grant = await world.granted(new)
    lost_at = grant.until_ms
    await world.at(lost_at)
    wait = 3 * 1000
    reply = await world.decide(new, lost_at, backoff_ms=wait)
    assert reply is not None
    assert reply.code is Code.OK
    outbox = world.keys.outbox("alfa")
    for step in range(0, wait, 500):
        await world.at(lost_at + step)
        await world.decide(new, lost_at + step, backoff_ms=wait)
        assert await world.connection.call("XLEN", outbox) == 0, f"offered {wait - step} ms early"
    await world.at(lost_at + wait)
    for _ in range(3):
        await world.decide(new, lost_at + wait, backoff_ms=wait)
    assert await world.connection.call("XLEN", outbox) == 1
    assert (await world.load(new)).branches[0].attempt == 2


@pytest.mark.case(20)
async def test_an_id_stays_taken_after_its_session_and_data_are_gone(world: World) -> None:
    await world.open()
    await world.open("s2")
    new = world.command()
    await world.admit(new)
    grant = await world.granted(new)
    await world.answer(grant.lease, Answer(result=msgspec.Raw(b'{"value":3}')))
    await world.decide(new, grant.granted_ms)
    await world.store.close_session("s1", world.revisions)
    closed = await world.store.purge("s1", [new.operation_id], True, world.revisions)
    assert (closed.code, closed.text(0)) == (Code.OK, "closed")
    kept = await world.connection.call("HKEYS", world.keys.op(new.operation_id))
    assert sorted(kept) == [b"intent", b"tombstone", b"v"]
    assert (await world.admit(new)).code is Code.NOT_FOUND
    elsewhere = await world.admit(world.command(session_id="s2"))
    assert (elsewhere.code, elsewhere.values) == (Code.CONFLICT, ())
