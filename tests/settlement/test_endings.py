"""The table "how an operation closed", row by row: decided, committed, and read back as clients will see
it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.domain.records import Answer, NamedData, Refusal
from shared.store.replies import NewOperation
from tests.support.world import World

pytestmark = pytest.mark.requirement("DASP-CORE-008b")

Story = Callable[[World, NewOperation, int, str], Awaitable[int]]
GOOD = Answer(
    result=msgspec.Raw(b'{"value":3}'),
    updates=(NamedData("counter.changed", msgspec.Raw(b'{"value":3}')),),
    state=msgspec.Raw(b'{"value":3}'),
    state_revision="0",
)
AGAIN = Answer(result=msgspec.Raw(b'{"again":true}'))


async def accepted(world: World, new: NewOperation, now: int, effects: str) -> int:
    """The handler succeeds."""
    await world.answer((await world.granted(new)).lease, GOOD)
    return now


async def refused(world: World, new: NewOperation, now: int, effects: str) -> int:
    """The handler says no."""
    await world.answer((await world.granted(new)).lease, Answer(refused=Refusal("demo.no", "not today")))
    return now


async def retried_out(world: World, new: NewOperation, now: int, effects: str) -> int:
    """Every attempt asks for another one; all answers are known."""
    for attempt in (1, 2):
        await world.answer((await world.granted(new, attempt=attempt)).lease, AGAIN)
        await world.decide(new, now, effects=effects)
        now += 200
        await world.at(now)
        await world.decide(new, now, effects=effects)
    await world.answer((await world.granted(new, attempt=3)).lease, AGAIN)
    return now


async def never_claimed(world: World, new: NewOperation, now: int, effects: str) -> int:
    """Nobody ever takes the offer."""
    return now + new.timeout_ms


async def held_closed(world: World, new: NewOperation, now: int, effects: str) -> int:
    """Somebody holds it at the deadline and has not called the handler."""
    await world.granted(new, open_gate=False, lease_ms=60_000)
    return now + new.timeout_ms


async def held_open(world: World, new: NewOperation, now: int, effects: str) -> int:
    """Somebody may be at it when the deadline comes."""
    await world.granted(new, lease_ms=60_000)
    return now + new.timeout_ms


async def answered_unfolded(world: World, new: NewOperation, now: int, effects: str) -> int:
    """The answer is stored and nobody folds it until the deadline."""
    await world.answer((await world.granted(new)).lease, GOOD)
    return now + new.timeout_ms


async def lost_open(world: World, new: NewOperation, now: int, effects: str) -> int:
    """The worker is gone after the gate was opened."""
    await world.granted(new)
    return now + 1_000


async def lost_out(world: World, new: NewOperation, now: int, effects: str) -> int:
    """Every attempt is lost behind an open gate."""
    for attempt in (1, 2, 3):
        await world.granted(new, attempt=attempt)
        now += 1_000
        await world.at(now)
        if attempt < 3:
            await world.decide(new, now, effects=effects)
            now += 200
            await world.at(now)
            await world.decide(new, now, effects=effects)
    return now


async def lost_once_then_known(world: World, new: NewOperation, now: int, effects: str) -> int:
    """One attempt is lost behind an open gate, the others ask for another one."""
    await world.granted(new)
    now += 1_000
    await world.at(now)
    for attempt in (2, 3):
        await world.decide(new, now, effects=effects)
        now += 200
        await world.at(now)
        await world.decide(new, now, effects=effects)
        await world.answer((await world.granted(new, attempt=attempt)).lease, AGAIN)
    return now


async def lost_closed(world: World, new: NewOperation, now: int, effects: str) -> int:
    """Every holder is gone before it opened the gate."""
    for _ in range(3):
        await world.granted(new, open_gate=False)
        now += 1_000
        await world.at(now)
        if _ < 2:
            await world.decide(new, now, effects=effects)
    return now


ROWS: list[tuple[Story, str, str, str, str | None, str]] = [
    # story, effects, decision, outcome, error code, reservation
    (accepted, "none", "success", "completed", None, "replayable"),
    (accepted, "unsafe", "success", "completed", None, "replayable"),
    (refused, "unsafe", "failed", "failed", "demo.no", "replayable"),
    (retried_out, "unsafe", "failed", "failed", "attempts-exhausted", "replayable"),
    (never_claimed, "unsafe", "failed", "failed", "timeout", "replayable"),
    (held_closed, "unsafe", "failed", "failed", "timeout", "replayable"),
    (held_open, "none", "failed", "failed", "timeout", "replayable"),
    (held_open, "idempotent", "failed", "uncertain", "timeout", "quarantined"),
    (held_open, "fenced", "failed", "uncertain", "timeout", "quarantined"),
    (held_open, "unsafe", "failed", "uncertain", "timeout", "quarantined"),
    (answered_unfolded, "none", "failed", "failed", "timeout", "replayable"),
    (answered_unfolded, "idempotent", "failed", "uncertain", "timeout", "quarantined"),
    (answered_unfolded, "unsafe", "failed", "uncertain", "timeout", "quarantined"),
    (lost_open, "unsafe", "indeterminate", "uncertain", "worker-lost", "quarantined"),
    (lost_out, "none", "failed", "failed", "attempts-exhausted", "replayable"),
    (lost_out, "idempotent", "indeterminate", "uncertain", "attempts-exhausted", "quarantined"),
    (lost_out, "fenced", "indeterminate", "uncertain", "attempts-exhausted", "quarantined"),
    (lost_once_then_known, "idempotent", "indeterminate", "uncertain", "attempts-exhausted", "quarantined"),
    (lost_once_then_known, "none", "failed", "failed", "attempts-exhausted", "replayable"),
    (lost_closed, "unsafe", "failed", "failed", "claims-exhausted", "replayable"),
]


@pytest.mark.parametrize(
    ("story", "effects", "decision", "status", "code", "reservation"),
    ROWS,
    ids=[f"{row[0].__name__}-{row[1]}" for row in ROWS],
)
@pytest.mark.requirement("DASP-CORE-006a", "DASP-CORE-006c", "DASP-CORE-007b", "RT-GUARD-13")
async def test_row(
    world: World, story: Story, effects: str, decision: str, status: str, code: str | None, reservation: str
) -> None:
    await world.open()
    new = world.command()
    await world.admit(new)
    now = await story(world, new, await world.start(), effects)
    await world.at(now)
    reply = await world.decide(new, now, effects=effects)
    assert reply is not None
    assert reply.code == "OK"

    op = await world.load(new)
    assert op.phase == "settled"
    assert op.decision is not None
    assert (op.decision.outcome, op.decision.at_ms) == (decision, now)
    assert op.reservation.split(" ")[0] == reservation
    assert op.answers == {}
    outcome = await _outcome(world, op.outcome_sequence)
    assert outcome["status"] == status
    assert (outcome["error"] or {}).get("code") == code
    if status == "uncertain":
        assert outcome["output"] is None or story is lost_once_then_known
        assert outcome["error"]["retryable"] is False
    assert await world.connection.call("XLEN", world.keys.outbox("alfa")) == 0
    assert await world.connection.call("ZSCORE", world.keys.due, new.operation_id) is None

    # Terminal is terminal: whatever time passes, nothing is decided again.
    before = await world.dump()
    await world.at(now + 3_600_000)
    assert await world.decide(new, now + 3_600_000, effects=effects) is None
    assert await world.dump() == before


async def _outcome(world: World, sequence: int | None) -> dict[str, Any]:
    assert sequence is not None
    fact = await world.reads.fact("s1", sequence)
    assert fact is not None
    assert fact.kind == "outcome"
    outcome: dict[str, Any] = json.loads(fact.payload)
    return outcome


@pytest.mark.parametrize("lost_before", [False, True])
async def test_row_session_closed_while_queued(world: World, lost_before: bool) -> None:
    await world.open()
    first, second = world.command("c1"), world.command("c2")
    await world.admit(first)
    await world.admit(second)
    now = await world.start()
    if lost_before:
        await world.granted(first)
        now += 1_000
        await world.at(now)
        await world.decide(first, now, effects="idempotent")
    await world.store.close_session("s1", world.revisions)
    await world.decide(second, now, "session-closing", effects="idempotent")
    await world.decide(first, now, "session-closing", effects="idempotent")

    outcomes = {
        c.operation_id: await _outcome(world, (await world.load(c)).outcome_sequence) for c in (first, second)
    }
    assert outcomes[second.operation_id]["status"] == "failed"
    assert outcomes[second.operation_id]["error"]["code"] == "session-closed"
    # The one that may have acted once is not called failed because its session was closed.
    assert outcomes[first.operation_id]["status"] == ("uncertain" if lost_before else "failed")
    assert (await world.load(second)).reservation.startswith("replayable")


@pytest.mark.requirement("DASP-CORE-008b", "DASP-CORE-006c")
async def test_completion_is_the_addition_the_new_state_and_its_facts_in_one_commit(world: World) -> None:
    await world.open()
    new = world.command()
    await world.admit(new)
    now = await world.start()
    await world.answer((await world.granted(new)).lease, GOOD)
    before = await world.reads.session("s1", world.revisions)
    assert before is not None
    assert (before.head, before.state) == (1, b'{"value":0}')
    await world.decide(new, now)
    after = await world.reads.session("s1", world.revisions)
    assert after is not None
    assert (after.head, after.state, after.busy) == (3, b'{"value":3}', "")
    facts = [await world.reads.fact("s1", n) for n in (2, 3)]
    assert [(f.kind, f.at_ms) for f in facts if f is not None] == [("application", now), ("outcome", now)]
