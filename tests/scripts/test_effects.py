"""The effects of replace: facts, wake-ups, the seat in the session, the view state; one commit or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.domain.decide import BranchChange, Change, apply
from shared.domain.decide.change import Words
from shared.domain.guard import MAX_SAFE_INTEGER
from shared.domain.records import Fact
from shared.store.codes import Code
from shared.store.keys import turn_member
from shared.store.replies import NEXT_TURN, Lease, NewOperation
from tests.scripts.scenes import (
    RESULT,
    answered,
    held,
    meta,
    offered,
    outcomes,
    patch,
    session_of,
    terminal_change,
    unchanged,
)
from tests.support.world import World, anyone, terms

TURN = turn_member("s1")


async def due(world: World) -> dict[str, int]:
    return dict(await world.reads.due(2**53, 100))


async def end(world: World, new: NewOperation, **changes: Any) -> None:
    op = await world.load(new)
    reply = await world.commit(op, terminal_change(op, **changes))
    assert reply.code is Code.OK, reply


# One transition


@pytest.mark.requirement("RT-STORE-13", "DASP-CORE-006c", "DASP-CORE-009a", "RT-OUT-01", "RT-SET-01")
async def test_closing_is_one_transition(world: World) -> None:
    """Facts, outcome, view state, reservation, seat and wake-up move together, at one instant."""
    now = await world.start()
    new, _ = await answered(world)
    op = await world.load(new)
    change = apply(op, terms(), anyone, "due", now)
    assert change is not None
    facts = (Fact("application", "c1", b'{"name":"counter.changed","data":{}}'), *change.facts)
    await world.at(now + 9)
    reply = await world.commit(op, msgspec.structs.replace(change, facts=facts, state=b'{"value":3}'))
    assert (reply.code, reply.text(0), reply.text(1)) == (Code.OK, "2", "3")
    after = await world.load(new)
    assert (after.phase, after.outcome_sequence, dict(after.answers)) == ("settled", 3, {})
    assert after.decision is not None
    assert (after.decision.outcome, after.decision.at_ms) == ("success", now + 9)
    page = await world.reads.page("s1", 0, 100, world.revisions)
    assert page is not None
    assert [(f.sequence, f.kind, f.command_id, f.at_ms) for f in page.facts] == [
        (1, "accepted", "c1", now),
        (2, "application", "c1", now + 9),
        (3, "outcome", "c1", now + 9),
    ]
    session = page.session
    assert (session.head, session.state, session.state_revision) == (3, b'{"value":3}', "1")
    assert (session.busy, session.pending, session.halted, session.commands) == ("", 0, "", 1)
    assert await due(world) == {}


async def test_facts_alone_move_the_revision(world: World) -> None:
    new, _ = await held(world)
    op = await world.load(new)
    reply = await world.commit(op, Change(facts=(Fact("application", "c1", b"{}"),)))
    assert (reply.text(0), reply.text(1)) == ("2", "")
    assert (await session_of(world)).head == 2
    assert (await session_of(world)).pending == 1


@pytest.mark.requirement("DASPX-10")
@pytest.mark.parametrize("left", [2, 1])
async def test_facts_go_up_to_the_last_sequence_and_not_beyond(world: World, left: int) -> None:
    new, _ = await held(world)
    last = MAX_SAFE_INTEGER
    await world.connection.call("HSET", world.keys.session("s1"), "head", last - left)
    facts = (Fact("application", "c1", b'{"n":1}'), Fact("application", "c1", b'{"n":2}'))
    op, before = await world.load(new), await world.dump()
    reply = await world.commit(op, Change(facts=facts))
    if left == 2:
        assert reply.code is Code.OK
        page = await world.reads.page("s1", last - 2, 10, world.revisions)
        assert page is not None
        assert [fact.sequence for fact in page.facts] == [last - 1, last]
    else:
        assert (reply.code, reply.text(0)) == (Code.INVALID, "sequence")
        assert await world.dump() == before


async def test_a_change_without_facts_or_decision_leaves_the_session_alone(world: World) -> None:
    await world.start()
    new, grant = await held(world)
    await world.at(grant.until_ms)
    before = await session_of(world)
    await world.decide(new, grant.until_ms, effects="idempotent")
    assert await session_of(world) == before


async def test_tallies_are_kept_until_they_change(world: World) -> None:
    await world.start()
    new, grant = await held(world)
    await world.at(grant.until_ms)
    await world.decide(new, grant.until_ms, effects="idempotent")
    assert (await world.load(new)).tallies.lost
    await world.at(grant.until_ms + 200)
    await world.decide(new, grant.until_ms + 200, effects="idempotent")
    op = await world.load(new)
    assert (op.tallies.lost, op.phase, op.branches[0].outbox is not None) == (True, "active", True)


# Wake-ups


@pytest.mark.requirement("RT-STORE-06")
async def test_a_change_of_the_wake_up_alone_asserts_the_revision_and_keeps_it(world: World) -> None:
    now = await world.start()
    new = await offered(world)
    op = await world.load(new)
    reply = await world.commit(op, Change(wake_at_ms=now + 77))
    assert (reply.code, reply.text(0)) == (Code.OK, "1")
    assert await due(world) == {new.operation_id: now + 77}
    await patch(world, new, rev="2")
    async with unchanged(world):
        assert (await world.commit(op, Change(wake_at_ms=now + 5))).code is Code.CONFLICT


@pytest.mark.parametrize(
    ("stored", "seen", "wanted", "kept"),
    [
        pytest.param(1000, 1000, 5000, 5000, id="a later one replaces the one that was seen"),
        pytest.param(1000, 1000, 500, 500, id="an earlier one replaces the one that was seen"),
        pytest.param(700, 1000, 5000, 700, id="an earlier one that was not seen stays"),
        pytest.param(700, None, 5000, 700, id="one that appeared since stays"),
        pytest.param(700, 1000, 500, 500, id="an earlier one comes before one that was not seen"),
        pytest.param(None, 1000, 5000, 5000, id="one that disappeared is armed again"),
        pytest.param(None, None, 5000, 5000, id="none is armed"),
    ],
)
async def test_a_wake_up_that_was_not_seen_is_never_delayed(
    world: World, stored: int | None, seen: int | None, wanted: int, kept: int
) -> None:
    now = await world.start()
    new = await offered(world)
    op = await world.load(new)
    await world.connection.call("ZREM", world.keys.due, new.operation_id)
    if stored is not None:
        await world.connection.call("ZADD", world.keys.due, now + stored, new.operation_id)
    op = msgspec.structs.replace(op, wake_ms=None if seen is None else now + seen)
    assert (await world.commit(op, Change(wake_at_ms=now + wanted))).code is Code.OK
    assert await due(world) == {new.operation_id: now + kept}


@pytest.mark.parametrize(
    ("at", "after", "expected"), [(900, 1000, 900), (1100, 1000, 1000), (None, 1000, 1000), (900, None, 900)]
)
async def test_of_an_instant_and_a_duration_the_earlier_wakes(
    world: World, at: int | None, after: int | None, expected: int
) -> None:
    now = await world.start()
    op = await world.load(await offered(world))
    await world.commit(op, Change(wake_at_ms=None if at is None else now + at, wake_in_ms=after))
    assert await due(world) == {op.id: now + expected}


@pytest.mark.parametrize("since", ["answered", "released", "claimed", "opened"])
async def test_a_wake_up_is_not_put_off_by_who_did_not_see_what_happened(world: World, since: str) -> None:
    """The wake-up that was seen is in place still, but the reason for it has changed."""
    now = await world.start()
    new = await offered(world) if since == "claimed" else (await held(world, open_gate=since != "opened"))[0]
    await world.connection.call("ZADD", world.keys.due, now - 1, new.operation_id)
    op = await world.load(new)
    await world.at(now + 1)
    lease = Lease(new.operation_id, 0, "alfa", "1", "1", "h1")
    events: dict[str, Callable[[], Awaitable[object]]] = {
        "answered": lambda: world.answer(lease, RESULT),
        "released": lambda: world.store.release(lease, world.revisions),
        "claimed": lambda: world.claim(new),
        "opened": lambda: world.store.open_gate(lease, world.revisions),
    }
    await events[since]()
    async with unchanged(world):
        reply = await world.commit(op, Change(wake_at_ms=now + 5000))
    assert (reply.code, reply.text(0)) == (Code.ASSERTION, "same")
    assert (await due(world))[new.operation_id] == now - 1


async def test_a_change_without_a_wake_up_keeps_the_one_there_is(world: World) -> None:
    now = await world.start()
    new = await offered(world)
    op = await world.load(new)
    await world.commit(op, Change(sets=(("o:0", b"x"),)))
    assert await due(world) == {new.operation_id: now + 1000}


async def test_settled_work_never_wakes_again(world: World) -> None:
    now = await world.start()
    new = await offered(world)
    op = await world.load(new)
    await world.connection.call("ZADD", world.keys.due, now - 5, new.operation_id)
    await world.commit(op, terminal_change(op, wake_at_ms=now + 50))
    assert await due(world) == {}


# The seat


async def queue_of(world: World, *commands: str, **changes: Any) -> list[NewOperation]:
    await world.open()
    news = [world.command(command, **changes) for command in commands]
    for new in news:
        await world.admit(new)
    return news


@pytest.mark.requirement("DASP-CORE-006b")
async def test_the_end_of_the_busy_command_frees_the_seat_for_whoever_waits(world: World) -> None:
    now = await world.start()
    first, second = await queue_of(world, "c1", "c2")
    await end(world, first)
    session = await session_of(world)
    assert (session.busy, session.pending) == (NEXT_TURN, 1)
    assert (await due(world))[TURN] == now
    assert await world.reads.queued("s1", 9) == [second.operation_id]


async def test_the_end_of_the_last_command_frees_the_seat_for_anybody(world: World) -> None:
    (first,) = await queue_of(world, "c1")
    await end(world, first)
    assert (await session_of(world)).busy == ""
    assert TURN not in await due(world)


async def test_the_end_of_a_queued_command_leaves_the_busy_one_its_seat(world: World) -> None:
    first, second, third = await queue_of(world, "c1", "c2", "c3")
    await end(world, second)
    session = await session_of(world)
    assert (session.busy, session.pending) == (first.operation_id, 2)
    assert await world.reads.queued("s1", 9) == [third.operation_id]
    assert TURN not in await due(world)


async def test_the_end_of_a_concurrent_command_touches_no_seat(world: World) -> None:
    first, second = await queue_of(world, "c1", "c2")
    other = world.command("c3", kind="concurrent")
    await world.admit(other)
    await end(world, other)
    session = await session_of(world)
    assert (session.busy, session.pending) == (first.operation_id, 2)
    assert await world.reads.queued("s1", 9) == [second.operation_id]


@pytest.mark.requirement("DASP-CORE-007b")
@pytest.mark.parametrize(("offset", "kept"), [(-1, True), (0, False)])
async def test_a_seat_behind_an_open_gate_is_kept_until_its_lease_ran_out(
    world: World, offset: int, kept: bool
) -> None:
    await world.start()
    first, grant = await held(world)
    await world.admit(world.command("c2"))
    await world.at(grant.until_ms + offset)
    await end(world, first, reservation="quarantined")
    session = await session_of(world)
    wakes = await due(world)
    assert session.busy == (first.operation_id if kept else NEXT_TURN)
    assert wakes[TURN] == (grant.until_ms if kept else grant.until_ms + offset)


async def test_a_decision_without_facts_ends_the_command_in_its_session(world: World) -> None:
    (first,) = await queue_of(world, "c1")
    await end(world, first, facts=())
    session = await session_of(world)
    assert (session.busy, session.pending, session.head) == ("", 0, 1)


async def test_a_closed_gate_frees_the_seat_at_once(world: World) -> None:
    first, _ = await held(world, open_gate=False)
    await end(world, first)
    assert (await session_of(world)).busy == ""


async def test_the_wake_up_of_a_turn_is_only_lowered(world: World) -> None:
    now = await world.start()
    first, _ = await queue_of(world, "c1", "c2")
    await world.connection.call("ZADD", world.keys.due, now - 3, TURN)
    await end(world, first)
    assert (await due(world))[TURN] == now - 3


@pytest.mark.parametrize("pending", ["last", "not the last"])
async def test_the_last_end_wakes_a_closing_session(world: World, pending: str) -> None:
    now = await world.start()
    commands = ["c1"] if pending == "last" else ["c1", "c2"]
    news = await queue_of(world, *commands, kind="concurrent")
    await world.store.close_session("s1", world.revisions)
    await world.connection.call("ZREM", world.keys.due, TURN)
    await end(world, news[0])
    assert (TURN in await due(world)) == (pending == "last")
    if pending == "last":
        assert (await due(world))[TURN] == now


async def test_a_closing_session_wakes_when_the_open_lease_has_run_out(world: World) -> None:
    await world.start()
    new, grant = await held(world)
    await world.store.close_session("s1", world.revisions)
    await world.connection.call("ZREM", world.keys.due, TURN)
    await end(world, new)
    assert (await due(world))[TURN] == grant.until_ms


@pytest.mark.requirement("DASP-CORE-007b")
@pytest.mark.parametrize("halt", [True, False])
async def test_a_halt_is_set_with_the_decision_and_stays(world: World, halt: bool) -> None:
    first, second = await queue_of(world, "c1", "c2")
    await end(world, first, halt=halt)
    assert (await session_of(world)).halted == (first.operation_id if halt else "")
    await end(world, second)
    assert (await session_of(world)).halted == (first.operation_id if halt else "")
    assert (await world.admit(world.command("c3"))).code is (Code.HALTED if halt else Code.OK)


async def test_a_halt_without_a_decision_is_no_halt(world: World) -> None:
    new, _ = await held(world)
    op = await world.load(new)
    await world.commit(op, Change(halt=True, facts=(Fact("application", "c1", b"{}"),)))
    assert (await session_of(world)).halted == ""


# Coordination


@pytest.mark.requirement("RT-STORE-05", "RT-STORE-11")
async def test_of_many_replacements_at_one_revision_one_commits(world: World) -> None:
    new, _ = await answered(world)
    op = await world.load(new)
    changes = [terminal_change(op, status) for status in ("success", "failure") * 5]
    codes = [reply.code for reply in await asyncio.gather(*(world.commit(op, c) for c in changes))]
    assert codes.count(Code.OK) == 1
    assert codes.count(Code.TERMINAL) == 9
    assert len(await outcomes(world)) == 1


@pytest.mark.requirement("RT-STORE-11")
async def test_compare_and_set_alone_coordinates(world: World) -> None:
    """No key but the records themselves appears while two executors contend."""
    new, _ = await answered(world)
    op = await world.load(new)
    known = set(await world.dump())
    await asyncio.gather(*(world.commit(op, terminal_change(op)) for _ in range(4)))
    assert set(await world.dump()) <= known


@pytest.mark.requirement("RT-STORE-14", "DASP-CORE-009d")
async def test_one_contended_operation_holds_up_no_other(world: World) -> None:
    (busy,) = await queue_of(world, "c1", kind="concurrent")
    calm = world.command("c2", kind="concurrent")
    await world.admit(calm)
    loaded = await world.load(calm)
    for _ in range(5):
        op = await world.load(busy)
        words = Words(op.branches[0]).offered(
            peer="alfa", attempt=1, fence=op.branches[0].fence + 1, claims=0, claim_timeout_ms=10
        )
        change = Change(phase="active", branches=(BranchChange(0, "same", words, send_to="alfa"),))
        assert (await world.commit(op, change)).code is Code.OK
        assert (await world.commit(op, change)).code is Code.CONFLICT
    assert (await world.commit(loaded, terminal_change(loaded))).code is Code.OK


@pytest.mark.requirement("RT-STORE-15")
async def test_every_kind_of_no_has_its_own_code(world: World) -> None:
    now = await world.start()
    new, _ = await answered(world)
    op = await world.load(new)
    seen = set()
    stale = msgspec.structs.replace(op, revision="9")
    seen.add((await world.commit(stale, terminal_change(op))).code)
    seen.add((await world.commit(op, terminal_change(op, not_before_ms=now + 1))).code)
    gone = msgspec.structs.replace(op, id="op" + "0" * 64)
    seen.add((await world.commit(gone, terminal_change(op))).code)
    await meta(world, policy_rev="2")
    seen.add((await world.commit(op, terminal_change(op))).code)
    assert seen == {Code.CONFLICT, Code.OUTSIDE_WINDOW, Code.ABSENT, Code.STALE_SNAPSHOT}


@pytest.mark.requirement("RT-STORE-01")
async def test_get_gives_the_whole_record_or_nothing(world: World) -> None:
    new, _ = await answered(world, RESULT)
    op = await world.load(new)
    assert (op.id, op.revision, op.phase, op.reservation) == (new.operation_id, "1", "admitted", "pending")
    assert (op.admission.command_id, op.admission.principal, op.sequence) == ("c1", "alice", 1)
    assert op.words == (op.branches[0].words(),)
    assert await world.reads.operation("op" + "0" * 64) is None
