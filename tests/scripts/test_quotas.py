"""Quotas: exact under races, counted where the work is kept, never in the way of what was promised."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from shared.domain.limits import TenantLimits, TenantUsage
from shared.domain.records import Answer, NamedData
from shared.store.codes import Code
from shared.store.connection import Connection
from shared.store.replies import NewOperation, Reply
from tests.scripts.scenes import meta, unchanged
from tests.support.world import TENANT, World

RESERVE = 500
RESULT = Answer(
    result=msgspec.Raw(b'{"value":3}'),
    updates=(NamedData("counter.changed", msgspec.Raw(b'{"by":3}')),),
    state=msgspec.Raw(b'{"value":30000}'),
    state_revision="0",
)


async def limit(world: World, **changes: int) -> None:
    await meta(world, limits=TenantLimits(**changes).words())


async def usage(world: World) -> TenantUsage:
    return TenantUsage.parse((await world.connection.call("HGET", world.keys.meta, "usage")).decode())


def command(world: World, command_id: str, **changes: Any) -> NewOperation:
    return msgspec.structs.replace(world.command(command_id, kind="concurrent", **changes), reserve=RESERVE)


def refused(reply: Reply) -> str:
    assert reply.code is Code.CAPACITY, reply
    return reply.text(0)


async def finish(world: World, new: NewOperation, answer: Answer = RESULT) -> None:
    grant = await world.granted(new)
    assert (await world.answer(grant.lease, answer)).code is Code.OK
    settled = await world.decide(new, grant.granted_ms)
    assert settled is not None
    assert settled.code is Code.OK


async def fields(world: World, key: bytes) -> dict[bytes, bytes]:
    flat = await world.connection.call("HGETALL", key)
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def recount(world: World) -> TenantUsage:
    """What the store really keeps, counted from its keys."""
    operations = size = unsettled = sessions = 0
    for key in await world.connection.call("KEYS", f"lg:{{{TENANT}}}:op:*"):
        op = await fields(world, key)
        if b"tombstone" in op:
            continue
        operations += 1
        size += len(op[b"admission"]) + len(op[b"input"])
        if op[b"phase"] != b"settled":
            unsettled += 1
            size += int(op[b"at"].split()[3])
    for key in await world.connection.call("KEYS", f"lg:{{{TENANT}}}:session:*"):
        session = await fields(world, key)
        if session[b"phase"] == b"closed":
            continue
        sessions += 1
        size += sum(len(session[f]) for f in (b"actor", b"profile", b"profile_version", b"owner", b"state"))
    for key in await world.connection.call("KEYS", f"lg:{{{TENANT}}}:updates:*"):
        for _, entry in await world.connection.call("XRANGE", key, "-", "+"):
            size += len(entry[entry.index(b"p") + 1])
    return TenantUsage(operations, size, unsettled, sessions)


@pytest.mark.requirement("DASP-CORE-012b")
@pytest.mark.parametrize(
    ("limits", "which"),
    [
        ({"operations": 3}, "operations"),
        ({"open_operations": 3}, "open"),
        ({"outbox_depth": 3}, "outbox"),
        ({"burst": 4, "admissions_per_second": 1}, "rate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_limit_itself_is_admitted_and_one_more_is_not(
    world: World, limits: dict[str, int], which: str
) -> None:
    await world.start()
    await limit(world, **limits)
    await world.open()
    for n in range(3):
        assert (await world.admit(command(world, f"c{n}"))).code is Code.OK
    async with unchanged(world):
        reply = await world.admit(command(world, "more"))
        assert refused(reply) == which
        assert reply.number(1) == (1000 if which == "rate" else 0)
        assert (await world.admit(command(world, "c1"))).code is Code.DUPLICATE
        assert (await world.admit(command(world, "c1", input_bytes=b'{"amount":4}'))).code is Code.CONFLICT


async def test_bytes_are_counted_with_what_the_outcome_may_need(world: World) -> None:
    await world.open()
    new = command(world, "c1")
    kept = len(new.admission) + len(new.input) + len(new.accepted) + RESERVE
    before = (await usage(world)).bytes
    await limit(world, bytes=before + kept - 1)
    assert refused(await world.admit(new)) == "bytes"
    await limit(world, bytes=before + kept)
    assert (await world.admit(new)).code is Code.OK
    assert (await usage(world)).bytes == before + kept


async def test_a_record_has_a_size_of_its_own(world: World) -> None:
    await world.open()
    new = command(world, "c1")
    record = len(new.admission) + len(new.input)
    await limit(world, record_bytes=record - 1)
    assert refused(await world.admit(new)) == "record"
    await limit(world, record_bytes=record)
    assert (await world.admit(new)).code is Code.OK


@pytest.mark.parametrize("field", ["sessions", "bytes", "rate"])
async def test_sessions_are_counted_too(world: World, field: str) -> None:
    await world.start()
    assert (await world.open("s1")).code is Code.OK
    one = (await usage(world)).bytes
    changes = {
        "sessions": {"sessions": 1},
        "bytes": {"bytes": 2 * one - 1},
        "rate": {"burst": 1, "admissions_per_second": 1},
    }
    await limit(world, **changes[field])
    async with unchanged(world):
        assert refused(await world.open("s2")) == field
        assert (await world.open("s1")).code is Code.DUPLICATE


async def test_a_limit_refuses_only_what_adds_to_it(world: World) -> None:
    await world.open()
    await world.admit(command(world, "c1"))
    await limit(world, sessions=0)
    assert (await world.admit(command(world, "c2"))).code is Code.OK
    await limit(world, operations=0, open_operations=0)
    assert (await world.open("s2")).code is Code.OK


async def test_the_rate_comes_back_with_time_and_never_more_than_a_burst(world: World) -> None:
    start = await world.start()
    await world.open()
    await limit(world, burst=2, admissions_per_second=10)
    await meta(world, usage="0 0 0 1 0")
    assert [(await world.admit(command(world, f"a{n}"))).code for n in range(3)] == [
        Code.OK,
        Code.OK,
        Code.CAPACITY,
    ]
    await world.at(start + 99)
    early = await world.admit(command(world, "b"))
    assert (refused(early), early.number(1)) == ("rate", 1)
    await world.at(start + 100)
    assert (await world.admit(command(world, "b"))).code is Code.OK
    await world.at(start + 1_000_000)
    codes = [(await world.admit(command(world, f"d{n}"))).code for n in range(3)]
    assert codes == [Code.OK, Code.OK, Code.CAPACITY]


async def test_a_clock_that_was_set_back_leaves_no_debt(world: World) -> None:
    start = await world.start()
    await world.open()
    await limit(world, burst=5, admissions_per_second=10)
    for ahead_ms, code in ((400, Code.OK), (401, Code.CAPACITY), (500, Code.CAPACITY), (501, Code.OK)):
        await meta(world, usage=f"0 0 0 1 {(start + ahead_ms) * 1000}")
        assert (await world.admit(command(world, f"c{ahead_ms}"))).code is code


@pytest.mark.parametrize("field", ["limits", "usage"])
@pytest.mark.parametrize("words", ["", "1 2 3", "a b c d e", "-1 0 0 0 0"])
async def test_limits_or_counts_that_cannot_be_read_take_no_new_work_but_finish_the_old(
    world: World, field: str, words: str
) -> None:
    now = await world.start()
    await world.open()
    new = command(world, "c1")
    await world.admit(new)
    await meta(world, **{field: words})
    assert (await world.admit(command(world, "c2"))).code is Code.CORRUPT
    assert (await world.open("s2")).code is Code.CORRUPT
    assert (await world.admit(new)).code is Code.DUPLICATE
    grant = await world.granted(new)
    assert (await world.answer(grant.lease, RESULT)).code is Code.OK
    await world.at(now + 7)
    settled = await world.decide(new, now + 7)
    assert settled is not None
    assert settled.code is Code.OK
    last, usage = await world.connection.call("HMGET", world.keys.meta, "last_ms", "usage")
    assert int(last) == now + 7, "a count that cannot be read is no reason to forget the clock"
    assert field != "usage" or usage == words.encode()


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({"operations": 20}, 20),
        ({"open_operations": 20}, 20),
        ({"outbox_depth": 20}, 20),
        ({"burst": 21}, 20),
    ],
    ids=["operations", "open", "outbox", "rate"],
)
async def test_racing_admissions_fill_a_limit_exactly(
    world: World, redis_url: str, limits: dict[str, int], fits: int
) -> None:
    await world.start()
    await limit(world, **limits)
    await world.open()
    async with Connection(redis_url) as second, Connection(redis_url) as third:
        worlds = [world, *(World(c, world.revisions.authority) for c in (second, third))]
        calls = [worlds[n % 3].admit(command(world, f"c{n // 2}")) for n in range(120)]
        random.shuffle(calls)
        codes = Counter(reply.code for reply in await asyncio.gather(*calls))
    assert codes[Code.OK] == fits
    assert codes[Code.OK] + codes[Code.DUPLICATE] + codes[Code.CAPACITY] == 120
    assert (await usage(world)) == await recount(world)


async def test_racing_sessions_fill_a_limit_exactly(world: World) -> None:
    await limit(world, sessions=7)
    replies = await asyncio.gather(*(world.open(f"s{n // 2}") for n in range(40)))
    codes = Counter(reply.code for reply in replies)
    assert codes[Code.OK] == 7
    assert (await usage(world)).sessions == 7


async def test_settling_frees_what_it_does_not_need_and_goes_on_beyond_every_limit(world: World) -> None:
    await world.open()
    new = command(world, "c1")
    await world.admit(new)
    await limit(
        world, operations=0, bytes=0, open_operations=0, sessions=0, outbox_depth=0, record_bytes=0, burst=1
    )
    await finish(world, new)
    assert await usage(world) == await recount(world)
    assert (await usage(world)).open_operations == 0


async def test_a_failed_attempt_keeps_its_reservation_until_the_end(world: World) -> None:
    await world.open()
    new = command(world, "c1")
    await world.admit(new)
    grant = await world.granted(new)
    await world.answer(grant.lease, Answer(result=msgspec.Raw(b'{"again":true}')))
    retried = await world.decide(new, grant.granted_ms)
    assert retried is not None
    assert retried.code is Code.OK
    assert await usage(world) == await recount(world)
    assert (await usage(world)).open_operations == 1


async def test_a_deleted_session_gives_everything_back_but_its_tombstones(world: World) -> None:
    await world.open("other")
    before = await usage(world)
    await world.open()
    ids = []
    for n in range(5):
        new = command(world, f"c{n}")
        await world.admit(new)
        await finish(world, new, Answer(result=msgspec.Raw(b'{"value":3}')))
        ids.append(new.operation_id)
    await world.store.close_session("s1", world.revisions)
    assert (await world.store.purge("s1", ids[:3], False, world.revisions)).code is Code.OK
    assert (await usage(world)).operations == 2
    assert (await world.store.purge("s1", ids[:3], False, world.revisions)).code is Code.OK
    assert (await usage(world)).operations == 2
    assert (await world.store.purge("s1", ids[3:], True, world.revisions)).code is Code.OK
    assert await usage(world) == before == await recount(world)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_what_is_counted_is_what_is_kept(world: World, seed: int) -> None:
    chance = random.Random(seed)
    await limit(world, open_operations=6, operations=30, sessions=4)
    running: list[NewOperation] = []
    ended: dict[str, list[str]] = {}
    for n in range(120):
        session = f"s{chance.randrange(6)}"
        step = chance.choice(["open", "admit", "admit", "admit", "finish", "finish", "close"])
        if step == "open" and (await world.open(session)).code is Code.OK:
            ended.setdefault(session, [])
        elif step == "admit":
            new = command(world, f"c{chance.randrange(n + 1)}", session_id=session)
            if (await world.admit(new)).code is Code.OK:
                running.append(new)
        elif step == "finish" and running:
            new = running.pop(chance.randrange(len(running)))
            await finish(world, new, Answer(result=msgspec.Raw(b'{"value":%d}' % n)))
            ended[new.session_id].append(new.operation_id)
        elif step == "close" and session in ended and all(new.session_id != session for new in running):
            await world.store.close_session(session, world.revisions)
            assert (
                await world.store.purge(session, ended.pop(session), True, world.revisions)
            ).code is Code.OK
        assert await usage(world) == await recount(world)


def test_the_stored_form_of_limits_is_what_the_scripts_read() -> None:
    limits = TenantLimits()
    assert TenantLimits.parse(limits.words()) == limits
    for damaged in ("", "1 2", limits.words() + " 1", limits.words().replace("10000000", "-1")):
        assert TenantLimits.parse(damaged) is None
