"""replace: what a decision may not change, and what must still hold when it commits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.domain.decide import BranchChange, Change
from shared.domain.decide.change import Words
from shared.domain.guard import MAX_SAFE_INTEGER
from shared.domain.records import PHASES, STATUSES, Decision, Fact, Operation, Phase, SessionSeat, Status
from shared.store.codes import Code
from shared.store.connection import ReplyError
from shared.store.replies import NewOperation, Reply
from tests.scripts.scenes import (
    answered,
    held,
    intercepted,
    offered,
    patch,
    reword,
    settled,
    terminal_change,
    unchanged,
)
from tests.support.world import World

DECISION = Decision("failed", "test", "complete")


async def refused(world: World, op: Operation, change: Change, code: Code, *values: str) -> None:
    """The change is refused so, and leaves every byte as it was."""
    async with unchanged(world):
        reply = await world.commit(op, change)
    assert (reply.code, *[reply.text(n) for n in range(len(values))]) == (code, *values)


def words_of(op: Operation, **changes: Any) -> str:
    return msgspec.structs.replace(op.branches[0], **changes).words()


def offer(op: Operation, **changes: Any) -> Change:
    """The same attempt to the same peer under the next fence."""
    branch = op.branches[0]
    values: dict[str, Any] = {
        "peer": "alfa",
        "attempt": branch.attempt,
        "fence": branch.fence + 1,
        "claims": 0,
    }
    words = Words(branch).offered(**{**values, **changes}, claim_timeout_ms=1000)
    return Change(phase="active", branches=(BranchChange(0, "same", words, send_to=values["peer"]),))


# The record


@pytest.mark.requirement("RT-STORE-03", "RT-STORE-04", "RT-STORE-06")
async def test_a_revision_is_spent_by_one_replacement(world: World) -> None:
    new = await offered(world)
    op = await world.load(new)
    reply = await world.commit(op, offer(op))
    assert (reply.code, reply.text(0)) == (Code.OK, "2")
    await refused(world, op, offer(op), Code.CONFLICT, "2")
    moved = await world.load(new)
    assert moved.revision == "2"
    assert (await world.commit(moved, offer(moved))).text(0) == "3"


@pytest.mark.requirement("RT-STORE-06", "RT-STORE-04")
@pytest.mark.parametrize("echoed", ["01", "1.0", " 1", "0", "2", ""])
async def test_a_revision_is_compared_and_never_computed_with(world: World, echoed: str) -> None:
    op = await world.load(await offered(world))
    await refused(world, msgspec.structs.replace(op, revision=echoed), offer(op), Code.CONFLICT, "1")


@pytest.mark.requirement("RT-STORE-06")
async def test_revisions_of_policy_and_directory_are_opaque_text(world: World) -> None:
    await world.connection.call("HSET", world.keys.meta, "policy_rev", "p-x", "dir_rev", "1e3")
    world.revisions = msgspec.structs.replace(world.revisions, policy="p-x", directory="1000")
    await world.open()
    assert (await world.admit(world.command())).text(0) == "directory"
    world.revisions = msgspec.structs.replace(world.revisions, directory="1e3")
    assert (await world.admit(world.command())).code is Code.OK


async def _absent(world: World) -> Operation:
    new = await offered(world)
    op = await world.load(new)
    await world.connection.call("DEL", world.keys.op(new.operation_id))
    return op


async def _tombstone(world: World) -> Operation:
    new = await offered(world)
    op = await world.load(new)
    await patch(world, new, tombstone="s1")
    return op


@pytest.mark.requirement("RT-STORE-01", "RT-STORE-15")
@pytest.mark.parametrize("scene", [_absent, _tombstone])
async def test_nothing_brings_back_what_is_not_there(
    world: World, scene: Callable[[World], Awaitable[Operation]]
) -> None:
    op = await scene(world)
    await refused(world, op, offer(op), Code.ABSENT)


@pytest.mark.requirement("RT-STORE-09", "DASP-CORE-006a", "DASP-CORE-007c", "RT-DEC-15")
async def test_a_settled_operation_is_final(world: World) -> None:
    new, _ = await settled(world)
    op = await world.load(new)
    await refused(world, op, terminal_change(op), Code.TERMINAL)


@pytest.mark.requirement("RT-STORE-09", "RT-DEC-15")
async def test_a_decision_is_set_once(world: World) -> None:
    new = await offered(world)
    await patch(world, new, phase="closed", decision='1 {"outcome":"success"}')
    op = await _loaded(world, new)
    await refused(world, op, terminal_change(op, reservation=None), Code.TERMINAL)
    change = terminal_change(op, decision=None, reservation=None)
    assert (await world.commit(op, change)).code is Code.OK
    stored = await world.connection.call("HGET", world.keys.op(new.operation_id), "decision")
    assert stored == b'1 {"outcome":"success"}'


async def _loaded(world: World, new: NewOperation) -> Operation:
    """As loaded, without reading the decision that a test made up."""
    decision = await world.connection.call("HGET", world.keys.op(new.operation_id), "decision")
    await world.connection.call("HDEL", world.keys.op(new.operation_id), "decision")
    op = await world.load(new)
    await patch(world, new, decision=decision.decode())
    return op


@pytest.mark.requirement("RT-STORE-07", "RT-STORE-08", "RT-STORE-09")
@pytest.mark.parametrize(
    "field",
    [
        "admission",
        "input",
        "intent",
        "at",
        "v",
        "rev",
        "phase",
        "decision",
        "reservation",
        "state",
        "b:0",
        "outcome_seq",
        "r:",
        "r:0x",
        "xr:0",
    ],
)
@pytest.mark.parametrize("how", ["set", "delete"])
async def test_only_the_answers_of_branches_are_free_fields(world: World, field: str, how: str) -> None:
    op = await world.load(await offered(world))
    more: dict[str, Any] = {"sets": ((field, b"x"),)} if how == "set" else {"deletes": (field,)}
    await refused(world, op, msgspec.structs.replace(offer(op), **more), Code.INVALID, "field")


async def test_an_answer_can_be_deleted_alone(world: World) -> None:
    new, _ = await answered(world)
    op = await world.load(new)
    assert (await world.commit(op, Change(deletes=("r:0",)))).text(0) == "2"
    row = await world.connection.call("HMGET", world.keys.op(op.id), "r:0", "rev")
    assert row == [None, b"2"]


async def test_the_answers_of_branches_can_be_set_and_deleted(world: World) -> None:
    new, _ = await answered(world)
    op = await world.load(new)
    change = Change(sets=(("o:0", b"folded"), ("x:12", b"stopped")), deletes=("r:0",))
    assert (await world.commit(op, change)).text(0) == "2"
    row = await world.connection.call("HMGET", world.keys.op(op.id), "o:0", "x:12", "r:0", "rev")
    assert row == [b"folded", b"stopped", None, b"2"]


@pytest.mark.requirement("RT-ADM-31", "RT-STORE-07", "RT-STORE-08")
async def test_identity_and_manifest_stay_through_every_transition(world: World) -> None:
    new, _ = await settled(world)
    fields = ("v", "admission", "input", "intent", "at")
    row = await world.connection.call("HMGET", world.keys.op(new.operation_id), *fields)
    assert row[:4] == [b"1", new.admission, new.input, new.intent]


# Phases and statuses: the full table (RT-STORE-12)

RANK = {phase: n for n, phase in enumerate(PHASES)}


@pytest.mark.requirement("RT-STORE-12", "RT-SET-01")
@pytest.mark.parametrize("after", PHASES)
@pytest.mark.parametrize("before", PHASES)
async def test_phases_go_forward_and_end_with_a_decision(world: World, before: Phase, after: Phase) -> None:
    """Every pair; a phase from ``closed`` on has a decision, an earlier one has none."""
    new = await offered(world)
    decided = RANK[before] >= RANK["closed"]
    await patch(world, new, phase=before, **({"decision": "1 {}"} if decided else {}))
    op = await (_loaded(world, new) if decided else world.load(new))
    closes = RANK[after] >= RANK["closed"]
    ends = terminal_change(op, phase=after, decision=None if decided else DECISION, reservation=None)
    change = ends if closes else msgspec.structs.replace(offer(op), phase=after)
    if before == "settled":
        await refused(world, op, change, Code.TERMINAL)
    elif RANK[after] < RANK[before]:
        await refused(world, op, change, Code.INVALID, "phase")
    else:
        assert (await world.commit(op, change)).code is Code.OK
        assert (await _phase(world, new)) == after


async def _phase(world: World, new: NewOperation) -> str:
    value: bytes = await world.connection.call("HGET", world.keys.op(new.operation_id), "phase")
    return value.decode()


@pytest.mark.requirement("RT-STORE-12", "RT-BR-01")
@pytest.mark.parametrize("after", [*STATUSES, "unheard"])
@pytest.mark.parametrize("before", STATUSES)
async def test_a_branch_ends_once(world: World, before: Status, after: str) -> None:
    """Every pair; only ``pending`` leads anywhere, and only to a known status."""
    new = await offered(world)
    await reword(world, new, status=before)
    op = await world.load(new)
    words = Words(op.branches[0]).ended(after)
    change = Change(phase="active", branches=(BranchChange(0, "same", words),))
    if before != "pending":
        await refused(world, op, change, Code.ASSERTION, "status", "0")
    elif after == "unheard":
        await refused(world, op, change, Code.ASSERTION, "words", "0")
    else:
        assert (await world.commit(op, change)).code is Code.OK


@pytest.mark.requirement("RT-STORE-12")
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("phase", PHASES)
async def test_phase_and_status_agree(world: World, phase: Phase, status: Status) -> None:
    """Every pair of one branch: none has ended while its operation is ``admitted``, none is left pending when
    it is ``settled``."""
    op = await world.load(await offered(world))
    words = Words(op.branches[0]).ended(status)
    decided = RANK[phase] >= RANK["closed"]
    change = Change(
        phase=phase, decision=DECISION if decided else None, branches=(BranchChange(0, "same", words),)
    )
    illegal = (phase == "admitted" and status != "pending") or (phase == "settled" and status == "pending")
    if illegal:
        await refused(world, op, change, Code.INVALID, "phase")
    else:
        assert (await world.commit(op, change)).code is Code.OK


@pytest.mark.requirement("RT-STORE-12")
@pytest.mark.parametrize("pending", [0, 1])
async def test_no_branch_stays_pending_in_a_settled_operation(world: World, pending: int) -> None:
    """Also one that the change does not name."""
    new = world.invocation()
    await world.admit(new)
    raw = await world.connection.call("HGET", world.keys.op(new.operation_id), f"b:{1 - pending}")
    op = await world.reads.operation(new.operation_id, "")
    assert op is not None
    words = Words(op.branches[0].parse(raw.decode())).ended("failure")
    op = msgspec.structs.replace(
        op, words=(raw.decode(),) * 2, branches=(op.branches[0].parse(raw.decode()),) * 2
    )
    change = Change(phase="settled", decision=DECISION, branches=(BranchChange(1 - pending, "same", words),))
    await refused(world, op, change, Code.INVALID, "phase")
    assert (await world.commit(op, msgspec.structs.replace(change, phase="closed"))).code is Code.OK


@pytest.mark.requirement("RT-STORE-12")
@pytest.mark.parametrize(
    ("phase", "decision"),
    [("active", DECISION), (None, DECISION), ("closed", None), ("settled", None)],
)
async def test_closed_goes_with_a_decision(
    world: World, phase: Phase | None, decision: Decision | None
) -> None:
    op = await world.load(await offered(world))
    change = terminal_change(op, phase=phase, decision=decision, reservation=None)
    await refused(world, op, change, Code.INVALID, "decision")


async def test_an_unknown_phase_is_refused(world: World) -> None:
    op = await world.load(await offered(world))
    unheard: Any = "asleep"
    await refused(world, op, msgspec.structs.replace(offer(op), phase=unheard), Code.INVALID, "phase")


@pytest.mark.requirement("RT-STORE-09")
@pytest.mark.parametrize("stored", ["replayable 1 2", "quarantined", "expired"])
async def test_a_reservation_moves_once(world: World, stored: str) -> None:
    new = await offered(world)
    await patch(world, new, reservation=stored)
    op = await world.load(new)
    await refused(world, op, terminal_change(op), Code.INVALID, "reservation")
    assert (await world.commit(op, terminal_change(op, reservation=None))).code is Code.OK


@pytest.mark.requirement("RT-STORE-13")
@pytest.mark.parametrize(
    ("moved", "stored"), [("replayable", "replayable {now} {end}"), ("quarantined", "quarantined")]
)
async def test_a_reservation_moves_with_the_operation(world: World, moved: Any, stored: str) -> None:
    now = await world.start()
    op = await world.load(await offered(world))
    await world.at(now + 3)
    await world.commit(op, terminal_change(op, reservation=moved))
    value = await world.connection.call("HGET", world.keys.op(op.id), "reservation")
    assert value.decode() == stored.format(now=now + 3, end=now + 3 + 86_400_000)


@pytest.mark.parametrize("text", ["replayable soon", "replayable", "expired", "pending"])
async def test_a_reservation_moves_nowhere_else(world: World, text: str) -> None:
    op = await world.load(await offered(world))
    name, keys, args = await intercepted(world, lambda: world.commit(op, terminal_change(op)))
    broken = [text if arg == "replayable 86400000" else arg for arg in args]
    assert broken != list(args)
    async with unchanged(world):
        reply = await world.store.run(name, keys, broken, world.revisions.authority)
    assert (reply.code, reply.text(0)) == (Code.INVALID, "reservation")


# Durations


@pytest.mark.requirement("RT-GUARD-09")
@pytest.mark.parametrize("what", ["until", "next", "wake", "replay"])
@pytest.mark.parametrize("excess", [0, 1])
async def test_no_duration_leaves_the_safe_integers(world: World, what: str, excess: int) -> None:
    now = await world.start()
    op = await world.load(await offered(world))
    longest = MAX_SAFE_INTEGER - now + excess
    branch = Words(op.branches[0])
    words = {
        "until": branch.offered(peer="alfa", attempt=1, fence=2, claims=0, claim_timeout_ms=longest),
        "next": branch.waiting(peer="alfa", backoff_ms=longest),
    }
    change = {
        "wake": Change(wake_in_ms=longest),
        "replay": terminal_change(op),
    }.get(what) or Change(phase="active", branches=(BranchChange(0, "same", words[what], send_to="alfa"),))

    async def commit() -> Reply:
        return await world.store.replace(op, change, world.revisions, longest if what == "replay" else 1)

    if not excess:
        assert (await commit()).code is Code.OK
        return
    async with unchanged(world):
        reply = await commit()
    assert (reply.code, reply.text(0)) == (Code.INVALID, "duration")


@pytest.mark.requirement("RT-GUARD-02", "RT-GUARD-04", "RT-GUARD-05", "RT-GUARD-08", "RT-GUARD-03")
@pytest.mark.parametrize("offset", [-1, 0, 99, 100])
async def test_the_window_is_the_stores(world: World, offset: int) -> None:
    now = await world.start()
    op = await world.load(await offered(world))
    await world.at(now + 500 + offset)
    change = msgspec.structs.replace(offer(op), not_before_ms=now + 500, not_after_ms=now + 600)
    if 0 <= offset < 100:
        reply = await world.commit(op, change)
        assert (reply.code, reply.now_ms) == (Code.OK, now + 500 + offset)
    else:
        await refused(world, op, change, Code.OUTSIDE_WINDOW, "guard")


@pytest.mark.requirement("RT-GUARD-06", "RT-GUARD-07")
@pytest.mark.parametrize(("low", "high"), [(5, 5), (6, 5)])
async def test_an_empty_or_reversed_window_is_invalid(world: World, low: int, high: int) -> None:
    op = await world.load(await offered(world))
    change = msgspec.structs.replace(offer(op), not_before_ms=low, not_after_ms=high)
    await refused(world, op, change, Code.INVALID, "guard")


# The session


@pytest.mark.requirement("DASP-CORE-012f")
@pytest.mark.parametrize("phase", ["closed", None])
async def test_a_closed_or_missing_session_gets_no_fact(world: World, phase: str | None) -> None:
    op = await world.load(await offered(world))
    if phase is None:
        await world.connection.call("DEL", world.keys.session("s1"))
    else:
        await world.connection.call("HSET", world.keys.session("s1"), "phase", phase)
    await refused(world, op, terminal_change(op), Code.NOT_FOUND)


async def _seated(world: World, seat: str) -> tuple[NewOperation, Operation]:
    await world.open()
    if seat == "queued":
        await world.admit(world.command("c0"))
    new = world.command("c1", kind="concurrent" if seat == "none" else "serial")
    await world.admit(new)
    return new, await world.load(new)


@pytest.mark.requirement("DASP-CORE-006b")
@pytest.mark.parametrize("actual", ["none", "busy", "queued"])
@pytest.mark.parametrize("loaded", ["none", "busy", "queued"])
async def test_the_seat_is_as_loaded(world: World, loaded: Any, actual: str) -> None:
    _, op = await _seated(world, actual)
    assert op.seat is not None
    assert op.seat.seat == actual
    seen = msgspec.structs.replace(op, seat=SessionSeat(loaded, "open", "0"))
    if loaded == actual:
        assert (await world.commit(seen, terminal_change(op))).code is Code.OK
    else:
        await refused(world, seen, terminal_change(op), Code.ASSERTION, "seat")


@pytest.mark.parametrize(("decided_from", "code"), [("0", Code.OK), ("1", Code.ASSERTION), ("", Code.OK)])
async def test_the_view_state_is_the_one_it_was_decided_from(
    world: World, decided_from: str, code: Code
) -> None:
    op = await world.load(await offered(world))
    change = terminal_change(op, state=b'{"value":1}', state_revision=decided_from)
    if code is Code.ASSERTION:
        await refused(world, op, change, code, "state")
    else:
        assert (await world.commit(op, change)).code is code


async def test_facts_need_a_session(world: World) -> None:
    new = world.invocation(peers=("alfa",))
    await world.admit(new)
    op = await world.reads.operation(new.operation_id, "")
    assert op is not None
    change = terminal_change(op)
    await refused(world, op, change, Code.INVALID, "facts")
    assert (await world.commit(op, msgspec.structs.replace(change, facts=()))).code is Code.OK


@pytest.mark.requirement("DASP-CORE-004a", "DASP-CORE-009b")
@pytest.mark.parametrize("broken", ["updates", "queue", "due", "session", "outbox", "next outbox"])
async def test_a_key_of_another_type_refuses_the_whole_change(world: World, broken: str) -> None:
    """Nothing is half done: not the facts before the outbox, not the outbox before the record."""
    new, _ = await held(world)
    op = await world.load(new)
    k = world.keys
    key = {
        "updates": k.updates("s1"),
        "queue": k.queue("s1"),
        "due": k.due,
        "session": k.session("s1"),
        "outbox": k.outbox("alfa"),
        "next outbox": k.outbox("bravo"),
    }[broken]
    await world.connection.call("DEL", key)
    await world.connection.call("SET", key, "junk")
    words = Words(op.branches[0]).offered(peer="bravo", attempt=2, fence=2, claims=0, claim_timeout_ms=1)
    change = Change(
        phase="active",
        branches=(BranchChange(0, "same", words, send_to="bravo"),),
        facts=(Fact("application", "c1", b"{}"),),
    )
    async with unchanged(world):
        with pytest.raises(ReplyError) as error:
            await world.commit(op, change)
        assert error.value.code == "WRONGTYPE"


@pytest.mark.requirement("DASP-CORE-009a")
async def test_a_fact_that_the_stream_refuses_refuses_the_whole_change(world: World) -> None:
    op = await world.load(await offered(world))
    await world.connection.call(
        "XADD", world.keys.updates("s1"), "7-0", "k", "x", "c", "c", "p", "{}", "t", "1"
    )
    async with unchanged(world):
        with pytest.raises(ReplyError):
            await world.commit(op, terminal_change(op))
