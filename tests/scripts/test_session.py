"""Sessions: opened once, closed for good, their ids never used again; cursors that only move forward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared.domain.guard import TimeGuard
from shared.store.codes import Code
from shared.store.connection import ReplyError
from shared.store.keys import turn_member
from shared.store.replies import NewOperation, NewSession
from shared.store.scripts import CLIENTS_PER_SESSION
from tests.scripts.scenes import (
    CALLS,
    RESULT,
    held,
    offered,
    outcomes,
    patch,
    session_of,
    settled,
    terminal_change,
    unchanged,
)
from tests.support.world import DIGEST, World

TURN = turn_member("s1")


async def purge(world: World, *ops: NewOperation, last: bool = True) -> Any:
    return await world.store.purge("s1", [new.operation_id for new in ops], last, world.revisions)


async def closed_session(world: World) -> NewOperation:
    """A session with one settled command, closed for good."""
    new, _ = await settled(world)
    assert (await world.store.close_session("s1", world.revisions)).code is Code.OK
    reply = await purge(world, new)
    assert (reply.code, reply.text(0)) == (Code.OK, "closed")
    return new


# Opening


@pytest.mark.requirement("DASP-CORE-011a", "DASP-CORE-009a")
async def test_opening_creates_once_and_consumes_no_sequence(world: World) -> None:
    reply = await world.open()
    assert (reply.code, reply.text(0), reply.text(1)) == (Code.OK, "alice", "0")
    session = await session_of(world)
    assert (session.phase, session.actor, session.profile, session.profile_version) == (
        "open",
        "a1",
        "urn:x:p",
        "1",
    )
    assert (session.owner, session.contract, session.head, session.state) == (
        "alice",
        DIGEST,
        0,
        b'{"value":0}',
    )
    assert (session.busy, session.halted, session.pending, session.commands) == ("", "", 0, 0)
    async with unchanged(world):
        again = await world.open()
    assert (again.code, again.text(0), again.text(1)) == (Code.DUPLICATE, "alice", "0")


@pytest.mark.requirement("DASP-CORE-011a")
async def test_reopening_keeps_the_history(world: World) -> None:
    await offered(world)
    async with unchanged(world):
        again = await world.open(state=b'{"value":9}', digest="sha256:" + "1" * 64)
    assert (again.code, again.text(1)) == (Code.DUPLICATE, "1")


@pytest.mark.requirement("DASP-CORE-011a")
@pytest.mark.parametrize("changed", ["actor_id", "profile_id", "profile_version"])
async def test_another_tuple_conflicts_and_changes_nothing(world: World, changed: str) -> None:
    await world.open()
    async with unchanged(world):
        other: dict[str, Any] = {changed: "other"}
        reply = await world.open(**other)
    assert (reply.code, reply.values) == (Code.CONFLICT, (b"alice",))


@pytest.mark.requirement("DASP-CORE-003a")
async def test_racing_opens_create_one_session(world: World) -> None:
    same = [world.open() for _ in range(10)]
    other = [world.open(actor_id="a2") for _ in range(10)]
    codes = [reply.code for reply in await asyncio.gather(*same, *other)]
    assert codes.count(Code.OK) == 1
    assert codes.count(Code.DUPLICATE) == 9
    assert codes.count(Code.CONFLICT) == 10


@pytest.mark.requirement("RT-GUARD-02", "RT-GUARD-04", "RT-GUARD-05", "RT-GUARD-08")
@pytest.mark.parametrize(
    ("offset", "code"), [(-1, Code.OUTSIDE_WINDOW), (0, Code.OK), (9, Code.OK), (10, Code.OUTSIDE_WINDOW)]
)
async def test_opening_has_its_window(world: World, offset: int, code: Code) -> None:
    now = await world.start()
    await world.at(now + 100 + offset)
    new = NewSession("s1", "a1", "p", "1", DIGEST, "alice")
    before = await world.dump()
    reply = await world.store.open_session(new, world.revisions, TimeGuard(now + 100, now + 110))
    assert reply.code is code
    assert (await world.dump() == before) is (code is not Code.OK)


async def test_an_equal_open_is_answered_whatever_the_time(world: World) -> None:
    await world.open()
    new = NewSession("s1", "a1", "urn:x:p", "1", DIGEST, "alice")
    reply = await world.store.open_session(new, world.revisions, TimeGuard(0, 1))
    assert reply.code is Code.DUPLICATE


async def test_a_damaged_session_is_not_a_missing_one(world: World) -> None:
    await world.connection.call("HSET", world.keys.session("s1"), "head", 7)
    async with unchanged(world):
        assert (await world.open()).code is Code.CORRUPT


# Closing


@pytest.mark.requirement("DASP-CORE-012f")
async def test_a_closing_session_declines_new_work_and_still_answers(world: World) -> None:
    now = await world.start()
    new, grant = await held(world)
    reply = await world.store.close_session("s1", world.revisions)
    assert (reply.code, reply.text(0)) == (Code.OK, "closing")
    assert dict(await world.reads.due(now, 9))[TURN] == now
    assert (await world.store.close_session("s1", world.revisions)).text(0) == "closing"
    async with unchanged(world):
        assert (await world.admit(world.command("c2"))).code is Code.SESSION_CLOSING
        assert (await world.admit(new)).code is Code.DUPLICATE
        assert (await world.open()).code is Code.DUPLICATE
        assert (await purge(world, new)).code is Code.CONFLICT
    assert (await world.answer(grant.lease, RESULT)).code is Code.OK
    await world.decide(new, now)
    assert len(await outcomes(world)) == 1


@pytest.mark.requirement("DASP-CORE-012f", "RT-RET-04")
async def test_a_closed_session_leaves_tombstones_that_keep_its_ids(world: World) -> None:
    now = await world.start()
    new = await closed_session(world)
    k = world.keys
    kept = await world.connection.call("HGETALL", k.op(new.operation_id))
    assert dict(zip(kept[::2], kept[1::2], strict=True)) == {
        b"v": b"1",
        b"intent": new.intent,
        b"tombstone": b"s1",
    }
    assert await world.connection.call("OBJECT", "ENCODING", k.op(new.operation_id)) == b"listpack"
    assert await world.connection.call("EXISTS", k.updates("s1"), k.queue("s1"), k.cursors("s1")) == 0
    assert TURN not in dict(await world.reads.due(now * 2, 99))
    session = await session_of(world)
    assert (session.phase, session.actor, session.profile, session.profile_version) == (
        "closed",
        "a1",
        "urn:x:p",
        "1",
    )
    assert (session.owner, session.state) == ("alice", b"")
    await world.open("s2")
    async with unchanged(world):
        assert (await world.open()).code is Code.NOT_FOUND
        assert (await world.open(actor_id="a2")).code is Code.NOT_FOUND
        assert (await world.admit(new)).code is Code.NOT_FOUND
        assert (await world.admit(world.command("c2"))).code is Code.NOT_FOUND
        assert (await world.admit(world.command(session_id="s2"))).code is Code.CONFLICT
        look = await world.store.lookup(new.operation_id, new.intent, "s1", world.revisions)
        assert look.code is Code.NOT_FOUND
        look = await world.store.lookup(new.operation_id, new.intent, "s2", world.revisions)
        assert look.code is Code.CONFLICT


@pytest.mark.requirement("DASP-CORE-012f", "RT-STORE-15")
async def test_a_closed_session_never_gets_anything_again(world: World) -> None:
    new, _ = await settled(world)
    op = await world.load(new)
    await world.store.close_session("s1", world.revisions)
    await purge(world, new)
    async with unchanged(world):
        assert (await world.commit(op, terminal_change(op))).code is Code.ABSENT
        assert (await world.store.close_session("s1", world.revisions)).code is Code.NOT_FOUND
        assert (await purge(world)).code is Code.NOT_FOUND
        assert (await world.store.put_cursor("s1", "alice/x", 0, world.revisions)).code is Code.NOT_FOUND
        turn = await world.store.turn("s1", world.revisions, busy="", following=None, claim_timeout_ms=1)
        assert turn.code is Code.NOT_FOUND
    assert await world.reads.page("s1", 0, 9, world.revisions) is None


VERBS: dict[str, Callable[[World], Awaitable[Any]]] = {
    "close": lambda world: world.store.close_session("s1", world.revisions),
    "turn": lambda world: world.store.turn(
        "s1", world.revisions, busy="", following=None, claim_timeout_ms=1
    ),
    "purge": purge,
    "cursor": lambda world: world.store.put_cursor("s1", "alice/x", 0, world.revisions),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_session_that_never_was_is_not_found(world: World, verb: str) -> None:
    async with unchanged(world):
        assert (await VERBS[verb](world)).code is Code.NOT_FOUND


# Purging


async def _three_settled(world: World) -> list[NewOperation]:
    await world.open()
    news = [world.command(f"c{n}", kind="concurrent") for n in range(3)]
    for new in news:
        await world.admit(new)
        await world.commit(op := await world.load(new), terminal_change(op))
    return news


@pytest.mark.requirement("DASP-CORE-012f", "DASP-CORE-012a")
async def test_a_session_is_purged_in_chunks_and_closes_with_the_last(world: World) -> None:
    news = await _three_settled(world)
    await world.store.close_session("s1", world.revisions)
    reply = await purge(world, *news[:2], last=False)
    assert (reply.code, reply.text(0)) == (Code.OK, "closing")
    assert (await session_of(world)).phase == "closing"
    page = await world.reads.page("s1", 0, 99, world.revisions)
    assert page is not None
    assert len(page.facts) == 6
    assert (await world.admit(news[0])).code is Code.CONFLICT
    again = await purge(world, *news[:2], last=False)
    assert again.code is Code.OK
    async with unchanged(world):
        assert (await purge(world, *news[:2])).code is Code.CONFLICT
    assert (await purge(world, *news)).text(0) == "closed"


async def test_a_session_does_not_close_while_a_command_is_kept(world: World) -> None:
    news = await _three_settled(world)
    await world.store.close_session("s1", world.revisions)
    async with unchanged(world):
        assert (await purge(world, *news[:2])).code is Code.CONFLICT


async def test_an_open_session_is_not_purged(world: World) -> None:
    news = await _three_settled(world)
    async with unchanged(world):
        assert (await purge(world, *news)).code is Code.CONFLICT


@pytest.mark.parametrize("phase", ["admitted", "active", "closed"])
async def test_only_settled_operations_become_tombstones(world: World, phase: str) -> None:
    """Also where the session's own count says that nothing is pending."""
    news = await _three_settled(world)
    await world.store.close_session("s1", world.revisions)
    await patch(world, news[2], phase=phase)
    async with unchanged(world):
        assert (await purge(world, *news)).code is Code.CONFLICT


async def test_nothing_is_purged_while_a_command_is_pending(world: World) -> None:
    news = await _three_settled(world)
    await world.store.close_session("s1", world.revisions)
    await world.connection.call("HSET", world.keys.session("s1"), "pending", 1)
    async with unchanged(world):
        assert (await purge(world, *news, last=False)).code is Code.CONFLICT


async def test_an_operation_named_twice_is_counted_once(world: World) -> None:
    news = await _three_settled(world)
    await world.store.close_session("s1", world.revisions)
    async with unchanged(world):
        assert (await purge(world, news[0], news[1], news[1])).code is Code.CONFLICT


async def test_an_empty_session_closes_at_once(world: World) -> None:
    await world.open()
    await world.store.close_session("s1", world.revisions)
    assert (await purge(world)).text(0) == "closed"


@pytest.mark.parametrize("verb", ["close", "turn", "purge"])
async def test_due_of_another_type_refuses_the_whole_step(world: World, verb: str) -> None:
    call = await CALLS[verb](world)
    await world.connection.call("DEL", world.keys.due)
    await world.connection.call("SET", world.keys.due, "junk")
    async with unchanged(world):
        with pytest.raises(ReplyError):
            await call()


# Cursors


async def put(world: World, cursor: int, client: str = "alice/laptop") -> Any:
    return await world.store.put_cursor("s1", client, cursor, world.revisions)


@pytest.mark.requirement("DASP-CORE-012h")
async def test_a_cursor_moves_forward_up_to_the_head(world: World) -> None:
    for n in range(3):
        await offered(world, f"c{n}", kind="concurrent")
    for wanted, held_now in [(2, "2"), (1, "2"), (2, "2"), (3, "3"), (0, "3")]:
        reply = await put(world, wanted)
        assert (reply.code, reply.text(0)) == (Code.OK, held_now)
    async with unchanged(world):
        reply = await put(world, 4)
        assert (reply.code, reply.text(0)) == (Code.INVALID, "head")
        assert (await put(world, 2)).text(0) == "3"


@pytest.mark.requirement("DASP-CORE-012h")
async def test_every_client_keeps_its_own_cursor(world: World) -> None:
    await offered(world)
    await put(world, 1)
    await put(world, 0, "bob/laptop")
    assert await world.reads.cursor("s1", "alice/laptop") == 1
    assert await world.reads.cursor("s1", "bob/laptop") == 0
    assert await world.reads.cursor("s1", "bob/phone") is None


async def test_a_session_holds_a_bounded_number_of_cursors(world: World) -> None:
    await offered(world)
    fields = [word for n in range(CLIENTS_PER_SESSION - 1) for word in (f"alice/{n}", 0)]
    await world.connection.call("HSET", world.keys.cursors("s1"), *fields)
    assert (await put(world, 1)).code is Code.OK
    async with unchanged(world):
        assert (await put(world, 1, "alice/one-too-many")).code is Code.EXHAUSTED
    assert (await put(world, 1, "alice/7")).text(0) == "1"


async def test_a_closing_session_still_takes_cursors(world: World) -> None:
    await offered(world)
    await world.store.close_session("s1", world.revisions)
    assert (await put(world, 1)).code is Code.OK
