"""turn: serial commands one at a time, in admission order, each before its deadline."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.domain.records import Operation
from shared.store.codes import Code
from shared.store.connection import ReplyError
from shared.store.keys import turn_member
from shared.store.replies import NEXT_TURN, NewOperation, Reply
from tests.scripts.scenes import (
    RESULT,
    branch_of,
    outbox_ids,
    outcomes,
    patch,
    reword,
    session_of,
    terminal_change,
    unchanged,
)
from tests.support.world import World

TURN = turn_member("s1")
CLAIM_MS = 300


async def serial(world: World, count: int = 3, **changes: Any) -> list[NewOperation]:
    await world.open()
    news = [world.command(f"c{n}", **changes) for n in range(1, count + 1)]
    for new in news:
        assert (await world.admit(new)).code is Code.OK
    return news


async def end(world: World, new: NewOperation, **changes: Any) -> None:
    op = await world.load(new)
    assert (await world.commit(op, terminal_change(op, **changes))).code is Code.OK


async def turn(world: World, **changes: Any) -> Reply:
    """The next turn, as loaded now."""
    session = await session_of(world)
    following = changes.pop("following", None)
    if following is None and (queued := await world.reads.queued("s1")):
        following = await world.reads.operation(queued[0], "s1")
    values: dict[str, Any] = {"busy": session.busy, "following": following, "claim_timeout_ms": CLAIM_MS}
    return await world.store.turn("s1", world.revisions, **{**values, **changes})


async def due(world: World) -> dict[str, int]:
    return dict(await world.reads.due(2**53, 100))


@pytest.mark.requirement("RT-TIME-05", "RT-STORE-13", "RT-OUT-01")
async def test_a_turn_dispatches_the_next_command_in_one_step(world: World) -> None:
    now = await world.start()
    first, second, third = await serial(world)
    await end(world, first)
    assert await outbox_ids(world) == []
    await world.at(now + 40)
    reply = await turn(world)
    assert (reply.code, reply.text(0)) == (Code.OK, "dispatched")
    (entry,) = await world.connection.call("XRANGE", world.keys.outbox("alfa"), "-", "+")
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    assert (fields[b"k"], fields[b"b"], fields[b"a"], fields[b"s"]) == (b"request", b"0", b"1", b"s1")
    assert (fields[b"o"].decode(), fields[b"m"].decode()) == (
        second.operation_id,
        second.offers[0].message_id,
    )
    branch = await branch_of(world, second)
    assert (branch.outbox, branch.until_ms) == (entry[0].decode(), now + 40 + CLAIM_MS)
    assert (branch.fence, branch.attempt, branch.gate, branch.claims) == (1, 1, "closed", 0)
    assert (await session_of(world)).busy == second.operation_id
    assert await world.reads.queued("s1", 9) == [third.operation_id]
    assert await due(world) == {
        second.operation_id: now + 40 + CLAIM_MS,
        third.operation_id: now + 10_000,
    }


async def test_commands_run_in_admission_order_one_at_a_time(world: World) -> None:
    await world.start()
    news = await serial(world, 5)
    ran = []
    while (session := await session_of(world)).pending:
        (running,) = [new for new in news if new.operation_id == session.busy]
        assert len(await outbox_ids(world)) == 1
        ran.append(running.command_id)
        grant = await world.granted(running)
        await world.answer(grant.lease, RESULT)
        await world.decide(running, 0)
        await turn(world)
    assert ran == [new.command_id for new in news]
    assert len(await outcomes(world)) == 5
    assert (await session_of(world)).busy == ""


async def test_nobody_overtakes_who_waits_for_the_turn(world: World) -> None:
    """Between the end of one command and the next turn the seat is kept."""
    first, second = await serial(world, 2)
    await end(world, first)
    assert (await world.admit(world.command("c9"))).text(2) == "queued"
    await turn(world)
    assert (await session_of(world)).busy == second.operation_id


async def test_an_offer_ends_with_its_deadline_at_the_latest(world: World) -> None:
    now = await world.start()
    first, second = await serial(world, 2, timeout_ms=1000)
    await end(world, first)
    await world.at(now + 900)
    await turn(world)
    assert (await branch_of(world, second)).until_ms == now + 1000
    assert (await due(world))[second.operation_id] == now + 1000


@pytest.mark.requirement("RT-TIME-05", "RT-GUARD-11", "RT-GUARD-02")
@pytest.mark.parametrize(
    ("offset", "code"), [(-1, Code.OK), (0, Code.OUTSIDE_WINDOW), (1, Code.OUTSIDE_WINDOW)]
)
async def test_a_command_whose_deadline_passed_while_it_waited_is_not_dispatched(
    world: World, offset: int, code: Code
) -> None:
    now = await world.start()
    first, second = await serial(world, 2, timeout_ms=1000)
    await end(world, first)
    await world.at(now + 1000 + offset)
    before = await world.dump()
    reply = await turn(world)
    assert reply.code is code
    if code is Code.OUTSIDE_WINDOW:
        assert reply.text(0) == "deadline"
        assert await world.dump() == before
        await world.decide(second, now + 1000 + offset)
        assert b'"code":"timeout"' in (await outcomes(world))[-1]
        assert (await turn(world)).text(0) == "idle"


# What holds a turn up


async def test_a_running_command_keeps_its_seat(world: World) -> None:
    first, _ = await serial(world, 2)
    await world.connection.call("ZADD", world.keys.due, 1, TURN)
    for phase in ("admitted", "active", "closed"):
        await patch(world, first, phase=phase)
        reply = await turn(world)
        assert (reply.code, reply.text(0)) == (Code.HELD, "")
    assert TURN not in await due(world)
    assert (await session_of(world)).busy == first.operation_id


@pytest.mark.requirement("DASP-CORE-007b", "DASP-CORE-008b")
@pytest.mark.parametrize(("offset", "dispatched"), [(-1, False), (0, True)])
async def test_a_seat_behind_an_open_gate_is_free_when_its_lease_has_run_out(
    world: World, offset: int, dispatched: bool
) -> None:
    await world.start()
    first, second = await serial(world, 2)
    grant = await world.granted(first)
    await end(world, first, reservation="quarantined")
    await world.at(grant.until_ms + offset)
    await world.connection.call("ZREM", world.keys.due, TURN)
    reply = await turn(world)
    if dispatched:
        assert (reply.code, reply.text(0)) == (Code.OK, "dispatched")
        assert (await session_of(world)).busy == second.operation_id
    else:
        assert (reply.code, reply.number(0)) == (Code.HELD, grant.until_ms)
        assert (await due(world))[TURN] == grant.until_ms
        assert (await session_of(world)).busy == first.operation_id


@pytest.mark.parametrize("gate", ["closed", "answered"])
async def test_only_an_open_gate_keeps_the_seat_of_an_ended_command(world: World, gate: Any) -> None:
    await world.start()
    first, second = await serial(world, 2)
    grant = await world.granted(first)
    await end(world, first)
    assert (await session_of(world)).busy == first.operation_id
    await reword(world, first, gate=gate)
    await world.at(grant.until_ms - 1)
    assert (await turn(world)).text(0) == "dispatched"
    assert (await session_of(world)).busy == second.operation_id


async def test_a_turn_without_anybody_waiting_frees_the_seat(world: World) -> None:
    await world.start()
    (first,) = await serial(world, 1)
    grant = await world.granted(first)
    await end(world, first)
    await world.at(grant.until_ms)
    reply = await turn(world)
    assert (reply.code, reply.text(0)) == (Code.OK, "idle")
    assert (await session_of(world)).busy == ""
    assert TURN not in await due(world)
    assert (await world.admit(world.command("c9"))).text(2) == "busy"


async def test_a_turn_of_a_session_that_never_worked_is_idle(world: World) -> None:
    await world.open()
    await world.connection.call("ZADD", world.keys.due, 1, TURN)
    reply = await turn(world)
    assert (reply.code, reply.text(0)) == (Code.OK, "idle")
    assert TURN not in await due(world)


@pytest.mark.requirement("DASP-CORE-007b")
async def test_a_halted_session_gives_no_turn(world: World) -> None:
    first, second = await serial(world, 2)
    await end(world, first, halt=True)
    reply = await turn(world)
    assert (reply.code, reply.text(0)) == (Code.HALTED, "idle")
    assert await outbox_ids(world) == []
    assert await world.reads.queued("s1", 9) == [second.operation_id]
    assert TURN not in await due(world)


@pytest.mark.parametrize("pending", [0, 1])
async def test_a_closing_session_gives_no_turn_and_sleeps_while_work_runs(world: World, pending: int) -> None:
    (first,) = await serial(world, 1)
    if not pending:
        await end(world, first)
    await world.store.close_session("s1", world.revisions)
    assert (await turn(world)).code is Code.SESSION_CLOSING
    assert (TURN in await due(world)) == (not pending)


# What was loaded must still hold


@pytest.mark.requirement("RT-STORE-04")
async def test_another_busy_command_than_loaded_is_a_conflict(world: World) -> None:
    first, _ = await serial(world, 2)
    await end(world, first)
    async with unchanged(world):
        assert (await turn(world, busy="")).code is Code.CONFLICT
        assert (await turn(world, busy=first.operation_id)).code is Code.CONFLICT


@pytest.mark.requirement("RT-STORE-04")
async def test_another_first_in_the_queue_than_loaded_is_a_conflict(world: World) -> None:
    first, second, third = await serial(world)
    await end(world, first)
    later = await world.load(third)
    async with unchanged(world):
        assert (await turn(world, following=later)).code is Code.CONFLICT
        nobody = await world.store.turn(
            "s1", world.revisions, busy=NEXT_TURN, following=None, claim_timeout_ms=1
        )
        assert nobody.code is Code.CONFLICT
    loaded = await world.load(second)
    await end(world, second)
    async with unchanged(world):
        assert (await turn(world, following=loaded)).code is Code.CONFLICT


@pytest.mark.requirement("RT-STORE-05")
async def test_a_turn_repeated_dispatches_nothing_again(world: World) -> None:
    first, second = await serial(world, 2)
    await end(world, first)
    loaded = await world.load(second)
    assert (await turn(world, following=loaded)).text(0) == "dispatched"
    async with unchanged(world):
        again = await turn(world, busy=NEXT_TURN, following=loaded)
    assert again.code is Code.CONFLICT
    assert len(await outbox_ids(world)) == 1


RECORDS: dict[str, dict[str, Any]] = {
    "decided": {"phase": "closed"},
    "settled": {"phase": "settled"},
    "branch ended": {"b:0": "failure alfa 1 1 1 - 0 closed 0 0 - -"},
    "unreadable": {"b:0": "pending"},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
async def test_a_command_that_cannot_run_any_more_gets_no_turn(world: World, record: dict[str, Any]) -> None:
    first, second = await serial(world, 2)
    await end(world, first)
    loaded = await world.load(second)
    await patch(world, second, **record)
    async with unchanged(world):
        assert (await turn(world, following=loaded)).code is Code.TERMINAL


async def test_an_active_command_may_have_its_turn(world: World) -> None:
    first, second = await serial(world, 2)
    await end(world, first)
    await patch(world, second, phase="active")
    assert (await turn(world)).text(0) == "dispatched"


async def test_a_missing_command_gets_no_turn(world: World) -> None:
    first, second = await serial(world, 2)
    await end(world, first)
    loaded: Operation = await world.load(second)
    await world.connection.call("DEL", world.keys.op(second.operation_id))
    async with unchanged(world):
        assert (await turn(world, following=loaded)).code is Code.TERMINAL


async def test_the_outbox_of_another_peer_gets_nothing(world: World) -> None:
    """The command moved to another peer since it was loaded."""
    first, second = await serial(world, 2)
    await end(world, first)
    loaded = await world.load(second)
    await reword(world, second, peer="bravo")
    async with unchanged(world):
        assert (await turn(world, following=loaded)).code is Code.CONFLICT


@pytest.mark.parametrize("broken", ["outbox", "queue"])
async def test_a_key_of_another_type_refuses_the_whole_turn(world: World, broken: str) -> None:
    first, second = await serial(world, 2)
    await end(world, first)
    loaded = await world.load(second)
    key = world.keys.outbox("alfa") if broken == "outbox" else world.keys.queue("s1")
    await world.connection.call("DEL", key)
    await world.connection.call("SET", key, "junk")
    async with unchanged(world):
        with pytest.raises(ReplyError):
            await world.store.turn(
                "s1", world.revisions, busy=NEXT_TURN, following=loaded, claim_timeout_ms=1
            )


@pytest.mark.requirement("DASP-CORE-007d")
async def test_work_that_was_never_dispatched_starts_from_its_admission(world: World) -> None:
    """A queued command was provably never sent: its turn makes the first request, attempt 1 and fence 1."""
    first, second = await serial(world, 2)
    queued = await branch_of(world, second)
    assert (queued.outbox, queued.until_ms, queued.attempt, queued.fence) == (None, 0, 1, 1)
    await end(world, first)
    await turn(world)
    grant = await world.granted(second)
    assert (grant.attempt, grant.lease.fence) == (1, "1")
    assert msgspec.json.decode(grant.input) == {"amount": 3}
