"""answer: evidence is stored, its request acknowledged and settling woken in one step; once per grant."""

from __future__ import annotations

from typing import Any

import pytest

from shared.domain.records import answer_digest, encode
from shared.store.codes import Code
from shared.store.registry import GROUP
from shared.store.replies import Grant, NewOperation
from tests.scripts.scenes import (
    AGAIN,
    OTHER_RESULT,
    RESULT,
    answered,
    branch_of,
    held,
    outbox_ids,
    outcomes,
    session_of,
    settled,
    terminal_change,
    unchanged,
)
from tests.support.world import World

CONFLICTS_KEPT = 8


async def delivered(world: World) -> None:
    """Read the outbox as a sidecar does: the entry is pending for it then."""
    await world.connection.call(
        "XREADGROUP", "GROUP", GROUP, "me", "COUNT", 10, "STREAMS", world.keys.outbox("alfa"), ">"
    )


async def pending(world: World) -> int:
    summary = await world.connection.call("XPENDING", world.keys.outbox("alfa"), GROUP)
    return int(summary[0])


async def conflicts(world: World, new: NewOperation) -> str:
    value = await world.connection.call("HGET", world.keys.op(new.operation_id), "pc")
    return value.decode() if value is not None else ""


@pytest.mark.requirement("RT-DUR-06", "RT-OUT-01", "RT-DLV-03", "RT-DUR-09")
async def test_an_answer_is_stored_acknowledged_and_woken_in_one_step(world: World) -> None:
    now = await world.start()
    new, grant = await held(world)
    await delivered(world)
    assert (await pending(world), len(await outbox_ids(world))) == (1, 1)
    await world.at(now + 3)
    assert (await world.answer(grant.lease, RESULT)).code is Code.OK
    assert (await pending(world), await outbox_ids(world)) == (0, [])
    op = await world.load(new)
    assert (op.answers[0].stored_ms, op.answers[0].body) == (now + 3, encode(RESULT))
    branch = op.branches[0]
    assert (branch.gate, branch.outbox, branch.digest) == ("answered", None, answer_digest(encode(RESULT)))
    assert (op.phase, branch.status, op.decision) == ("admitted", "pending", None)
    assert await world.reads.due(now + 3, 10) == [(new.operation_id, now + 3)]


async def test_an_answer_never_delays_a_wake_up(world: World) -> None:
    now = await world.start()
    new, grant = await held(world)
    await world.connection.call("ZADD", world.keys.due, now - 5, new.operation_id)
    await world.answer(grant.lease, RESULT)
    assert await world.reads.due(now, 10) == [(new.operation_id, now - 5)]


async def test_an_answer_behind_a_closed_gate_is_no_answer(world: World) -> None:
    _, grant = await held(world, open_gate=False)
    async with unchanged(world):
        assert (await world.answer(grant.lease, RESULT)).code is Code.GATE_CLOSED


@pytest.mark.requirement("RT-DUR-10", "RT-RES-11", "RT-DUR-08")
async def test_an_equal_repeat_is_a_duplicate_and_changes_nothing(world: World) -> None:
    _, grant = await answered(world)
    async with unchanged(world):
        again = await world.answer(grant.lease, RESULT)
    assert (again.code, again.text(0)) == (Code.DUPLICATE, "")


@pytest.mark.requirement("RT-DUR-10", "RT-RES-11", "DASP-CORE-006b")
async def test_a_repeat_after_settling_tells_the_decision_and_votes_for_nothing(world: World) -> None:
    _, grant = await settled(world)
    async with unchanged(world):
        again = await world.answer(grant.lease, RESULT)
    assert again.code is Code.DUPLICATE
    assert '"outcome":"success"' in again.text(0)
    assert len(await outcomes(world)) == 1


@pytest.mark.requirement("RT-RES-12", "RT-RES-14", "RT-OUT-06")
@pytest.mark.parametrize("when", ["before settling", "after settling"])
async def test_other_bytes_are_a_protocol_conflict_that_is_only_recorded(world: World, when: str) -> None:
    now = await world.start()
    new, grant = await (answered(world) if when == "before settling" else settled(world))
    before = await world.load(new)
    facts = await world.connection.call("XLEN", world.keys.updates("s1"))
    for n in range(1, 11):
        await world.at(now + n)
        reply = await world.answer(grant.lease, OTHER_RESULT)
        assert reply.code is Code.PROTOCOL_CONFLICT
        count, *kept = (await conflicts(world, new)).split("\n")
        assert int(count) == n
        assert len(kept) == min(n, CONFLICTS_KEPT)
        if n <= CONFLICTS_KEPT:
            assert kept[-1] == f"{now + n} 0 {answer_digest(encode(OTHER_RESULT))}"
    assert await world.load(new) == before
    assert await world.connection.call("XLEN", world.keys.updates("s1")) == facts


async def test_a_conflict_of_a_later_branch_is_told_apart(world: World) -> None:
    new = world.invocation()
    await world.admit(new)
    grant = await world.granted(new, branch=1, peer="bravo")
    await world.answer(grant.lease, RESULT)
    await world.answer(grant.lease, OTHER_RESULT)
    assert (await conflicts(world, new)).split("\n")[1].split(" ")[1] == "1"
    assert await world.connection.call("HEXISTS", world.keys.op(new.operation_id), "r:1") == 1
    assert len(await outbox_ids(world, "alfa")) == 1


@pytest.mark.requirement("RT-RES-11")
async def test_the_answer_of_an_attempt_that_was_retried_is_stale(world: World) -> None:
    now = await world.start()
    new, grant = await held(world)
    await world.answer(grant.lease, AGAIN)
    reply = await world.decide(new, now)
    assert reply is not None
    assert reply.code is Code.OK
    async with unchanged(world):
        for answer in (AGAIN, RESULT):
            assert (await world.answer(grant.lease, answer)).code is Code.STALE_FENCE


@pytest.mark.requirement("DASP-CORE-012f", "RT-STORE-15")
async def test_an_answer_after_the_session_was_deleted_finds_nothing(world: World) -> None:
    new, grant = await settled(world)
    await world.store.close_session("s1", world.revisions)
    await world.store.purge("s1", [new.operation_id], True, world.revisions)
    async with unchanged(world):
        assert (await world.answer(grant.lease, RESULT)).code is Code.ABSENT


@pytest.mark.requirement("RT-RES-09", "RT-GUARD-13", "DASP-CORE-006b")
async def test_an_answer_after_the_deadline_closed_the_operation_is_terminal(world: World) -> None:
    now = await world.start()
    new, grant = await held(world)
    await world.store.renew([grant.lease], 60_000, world.revisions)
    await world.at(now + 10_000)
    await world.decide(new, now + 10_000, effects="unsafe")
    async with unchanged(world):
        assert (await world.answer(grant.lease, RESULT)).code is Code.TERMINAL
    assert len(await outcomes(world)) == 1


async def test_the_bytes_are_stored_as_they_came(world: World) -> None:
    new, grant = await held(world)
    body = b'{"result":{"a":[],"b":{},"n":9007199254740991,"s":"a/b","z":null}}  \x00'
    await world.store.answer(grant.lease, answer_digest(body), body, world.revisions)
    assert (await world.load(new)).answers[0].body == body


# Fences


async def lost(world: World, new: NewOperation, grant: Grant, **terms: Any) -> None:
    """Let the lease run out and offer the work again."""
    await world.at(grant.until_ms)
    await world.decide(new, grant.until_ms, **terms)
    branch = await branch_of(world, new)
    if branch.outbox is None:
        await world.at(branch.next_ms)
        await world.decide(new, branch.next_ms, **terms)


@pytest.mark.case(32)
@pytest.mark.requirement("RT-OWN-02", "RT-OWN-08", "RT-OWN-11", "RT-RES-06")
async def test_fences_rise_over_expiry_release_and_retry(world: World) -> None:
    """Case 32: every former holder is refused by its fence alone, while the work is running."""
    await world.start()
    new, first = await held(world, "h1", open_gate=False)
    await lost(world, new, first)
    second = await world.granted(new, "h2", open_gate=False)
    await world.store.release(second.lease, world.revisions)
    await world.decide(new, second.granted_ms)
    third = await world.granted(new, "h3")
    await lost(world, new, third, effects="idempotent")
    fourth = await world.granted(new, "h4", attempt=2)
    fences = [int(g.lease.fence) for g in (first, second, third, fourth)]
    assert fences == sorted(set(fences))
    branch = await branch_of(world, new)
    assert (branch.status, branch.gate, branch.holder, branch.attempt) == ("pending", "open", "h4", 2)
    for grant in (first, second, third):
        async with unchanged(world):
            assert (await world.answer(grant.lease, RESULT)).code is Code.STALE_FENCE
            assert (await world.store.open_gate(grant.lease, world.revisions)).code is Code.STALE_FENCE
            assert (await world.store.release(grant.lease, world.revisions)).code is Code.STALE_FENCE
            assert await world.store.renew([grant.lease], 1000, world.revisions) == [(Code.STALE_FENCE, 0)]
    assert (await world.answer(fourth.lease, RESULT)).code is Code.OK


@pytest.mark.case(34)
@pytest.mark.case(35)
@pytest.mark.requirement("RT-OWN-02", "RT-STORE-15")
async def test_a_former_owner_frees_nothing(world: World) -> None:
    """Cases 34 and 35: A's lease ran out, B holds the work, A gives back: B is still its owner."""
    await world.start()
    new, a = await held(world, "A", open_gate=False)
    await lost(world, new, a)
    b = await world.granted(new, "B")
    async with unchanged(world):
        assert (await world.store.release(a.lease, world.revisions)).code is Code.STALE_FENCE
        stolen = a.lease.__class__(new.operation_id, 0, "alfa", b.lease.epoch, b.lease.fence, "A")
        assert (await world.store.release(stolen, world.revisions)).code is Code.NOT_OWNER
    assert (await branch_of(world, new)).holder == "B"
    assert (await world.answer(b.lease, RESULT)).code is Code.OK


@pytest.mark.case(34)
async def test_the_end_of_one_command_frees_the_seat_of_no_other(world: World) -> None:
    """Case 34: A was settled and the seat is B's; a late repeat of A's settling leaves it there."""
    new, _ = await answered(world)
    second = world.command("c2")
    await world.admit(second)
    loaded = await world.load(new)
    await world.decide(new, 0)
    session = await session_of(world)
    following = await world.load(second)
    await world.store.turn(
        "s1", world.revisions, busy=session.busy, following=following, claim_timeout_ms=1000
    )
    async with unchanged(world):
        assert (await world.commit(loaded, terminal_change(loaded))).code is Code.TERMINAL
    assert (await session_of(world)).busy == second.operation_id


@pytest.mark.case(52)
@pytest.mark.requirement("RT-RES-06", "DASP-CORE-006b")
async def test_a_delayed_finish_cannot_land_in_the_next_attempt(world: World) -> None:
    """Case 52: the finish of fence f arrives while f + 1 is running."""
    await world.start()
    new, first = await held(world, "A")
    await lost(world, new, first, effects="idempotent")
    second = await world.granted(new, "B", attempt=2)
    async with unchanged(world):
        assert (await world.answer(first.lease, RESULT)).code is Code.STALE_FENCE
    assert (await world.answer(second.lease, RESULT)).code is Code.OK
    assert (await world.decide(new, second.granted_ms)) is not None
    assert len(await outcomes(world)) == 1


@pytest.mark.case(40)
@pytest.mark.requirement("RT-EFF-06", "RT-OWN-06", "DASP-CORE-006b")
async def test_a_holder_that_slept_past_its_lease_finishes_nothing(world: World) -> None:
    """Case 40, at the store: another one completed; the first one's finish is stale, one terminal fact."""
    await world.start()
    new, first = await held(world, "A")
    await lost(world, new, first, effects="idempotent")
    second = await world.granted(new, "B", attempt=2)
    await world.answer(second.lease, RESULT)
    await world.decide(new, second.granted_ms, effects="idempotent")
    async with unchanged(world):
        assert (await world.answer(first.lease, RESULT)).code is Code.STALE_FENCE
    assert len(await outcomes(world)) == 1


@pytest.mark.requirement("RT-OUT-05")
async def test_offering_the_same_attempt_again_keeps_its_message_id(world: World) -> None:
    """RT-OUT-05: the same attempt, re-sent under a new fence, is the same message."""
    await world.start()
    new, first = await held(world, open_gate=False)
    (before,) = await outbox_ids(world)
    await lost(world, new, first)
    (entry,) = await world.connection.call("XRANGE", world.keys.outbox("alfa"), "-", "+")
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    assert entry[0].decode() != before
    assert (fields[b"m"].decode(), fields[b"a"]) == (new.offers[0].message_id, b"1")
