"""The table "how an operation closed", row by row, committed on a real store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.domain.decide import Event
from shared.domain.records import Answer, NamedData, Refusal
from shared.store.codes import Code
from shared.store.replies import NewOperation
from tests.scripts.scenes import AGAIN, RESULT, answered, branch_of, held, offered, outcomes, session_of
from tests.support.world import World

DEADLINE_MS = 10_000
REFUSED = Answer(refused=Refusal("not-today", "come back never"))
OTHERWISE = Answer(result=msgspec.Raw(b'{"ok":false}'))

Scene = Callable[[World, int], Awaitable[tuple[NewOperation, int]]]


async def _answered(world: World, now: int) -> tuple[NewOperation, int]:
    return (await answered(world))[0], now


def with_answer(answer: Answer) -> Scene:
    async def scene(world: World, now: int) -> tuple[NewOperation, int]:
        return (await answered(world, answer))[0], now

    return scene


async def _offered_to_deadline(world: World, now: int) -> tuple[NewOperation, int]:
    return await offered(world), now + DEADLINE_MS


async def _queued_to_deadline(world: World, now: int) -> tuple[NewOperation, int]:
    await offered(world, "c0")
    return await offered(world), now + DEADLINE_MS


async def _closed_gate_to_deadline(world: World, now: int) -> tuple[NewOperation, int]:
    return (await held(world, open_gate=False))[0], now + DEADLINE_MS


async def _open_gate_to_deadline(world: World, now: int) -> tuple[NewOperation, int]:
    return (await held(world))[0], now + DEADLINE_MS


async def _answered_to_deadline(world: World, now: int) -> tuple[NewOperation, int]:
    return (await answered(world))[0], now + DEADLINE_MS


async def _lost_open(world: World, now: int) -> tuple[NewOperation, int]:
    return (await held(world))[0], now + 1000


async def _lost_closed(world: World, now: int) -> tuple[NewOperation, int]:
    return (await held(world, open_gate=False))[0], now + 1000


async def _queued_closing(world: World, now: int) -> tuple[NewOperation, int]:
    await offered(world, "c0")
    new = await offered(world)
    await world.store.close_session("s1", world.revisions)
    return new, now


async def _offered_closing(world: World, now: int) -> tuple[NewOperation, int]:
    new = await offered(world)
    await world.store.close_session("s1", world.revisions)
    return new, now


async def _lost_closed_closing(world: World, now: int) -> tuple[NewOperation, int]:
    new, when = await _lost_closed(world, now)
    await world.store.close_session("s1", world.revisions)
    return new, when


async def second_attempt(world: World, now: int) -> tuple[NewOperation, int]:
    """The first attempt was lost behind an open gate, the second is offered."""
    new, _ = await held(world)
    for when in (now + 1000, now + 1200):
        await world.at(when)
        assert await world.decide(new, when, effects="idempotent") is not None
    assert (await branch_of(world, new)).attempt == 2
    return new, now + 1200


def then(more: Callable[[World, NewOperation, int], Awaitable[int]]) -> Scene:
    async def scene(world: World, now: int) -> tuple[NewOperation, int]:
        new, when = await second_attempt(world, now)
        return new, await more(world, new, when)

    return scene


async def _answers(world: World, new: NewOperation, when: int) -> int:
    grant = await world.granted(new, attempt=2)
    await world.answer(grant.lease, AGAIN)
    return when


async def _succeeds(world: World, new: NewOperation, when: int) -> int:
    grant = await world.granted(new, attempt=2)
    await world.answer(grant.lease, RESULT)
    return when


async def _dies_before_the_gate(world: World, new: NewOperation, when: int) -> int:
    await world.granted(new, attempt=2, open_gate=False)
    return when + 1000


async def _session_closes(world: World, new: NewOperation, when: int) -> int:
    await world.store.close_session("s1", world.revisions)
    return when


async def _nothing(world: World, new: NewOperation, when: int) -> int:
    return when - 1200 + DEADLINE_MS


def row(
    name: str,
    scene: Scene,
    decision: str,
    settlement: str,
    branch: str,
    outcome: str,
    code: str | None,
    reservation: str,
    **terms: Any,
) -> Any:
    return pytest.param(scene, terms, (decision, settlement, branch, outcome, code, reservation), id=name)


SUCCESS = ("success", "complete", "success", "completed", None, "replayable")


def failed(code: str) -> tuple[str, str, str, str, str, str]:
    return ("failed", "complete", "failure", "failed", code, "replayable")


def uncertain(code: str, decision: str = "indeterminate", settlement: str = "indeterminate") -> Any:
    return (decision, settlement, "indeterminate", "uncertain", code, "quarantined")


SAFE = ("none", "idempotent", "fenced", "unsafe")
ACTING = ("idempotent", "fenced", "unsafe")
ROWS = [
    *[row(f"accepted success, {e}", _answered, *SUCCESS, effects=e) for e in SAFE],
    *[row(f"refused, {e}", with_answer(REFUSED), *failed("not-today"), effects=e) for e in SAFE],
    row(
        "unsuccessful",
        with_answer(OTHERWISE),
        *failed("unsuccessful"),
        succeeds=lambda v: v.get("ok") is not False,
    ),
    *[
        row(
            f"asks again for the last time, {e}",
            with_answer(AGAIN),
            *failed("attempts-exhausted"),
            effects=e,
            max_attempts=1,
        )
        for e in SAFE
    ],
    *[row(f"never claimed, {e}", _offered_to_deadline, *failed("timeout"), effects=e) for e in SAFE],
    *[row(f"never dispatched, {e}", _queued_to_deadline, *failed("timeout"), effects=e) for e in SAFE],
    *[
        row(f"deadline behind a closed gate, {e}", _closed_gate_to_deadline, *failed("timeout"), effects=e)
        for e in SAFE
    ],
    row("deadline behind an open gate, none", _open_gate_to_deadline, *failed("timeout"), effects="none"),
    *[
        row(
            f"deadline behind an open gate, {e}",
            _open_gate_to_deadline,
            *uncertain("timeout", "failed"),
            effects=e,
        )
        for e in ACTING
    ],
    row("deadline before the fold, none", _answered_to_deadline, *failed("timeout"), effects="none"),
    *[
        row(
            f"deadline before the fold, {e}",
            _answered_to_deadline,
            *uncertain("timeout", "failed", "complete"),
            effects=e,
        )
        for e in ACTING
    ],
    row("lost behind an open gate, unsafe", _lost_open, *uncertain("worker-lost"), effects="unsafe"),
    row("last attempt lost, none", _lost_open, *failed("attempts-exhausted"), effects="none", max_attempts=1),
    *[
        row(
            f"last attempt lost, {e}", _lost_open, *uncertain("attempts-exhausted"), effects=e, max_attempts=1
        )
        for e in ("idempotent", "fenced")
    ],
    *[
        row(
            f"lost before the gate too often, {e}",
            _lost_closed,
            *failed("claims-exhausted"),
            effects=e,
            max_claims=1,
        )
        for e in SAFE
    ],
    *[
        row(f"session closed while queued, {e}", _queued_closing, *failed("session-closed"), effects=e)
        for e in SAFE
    ],
    row("session closed while offered", _offered_closing, *failed("session-closed"), effects="unsafe"),
    row(
        "session closed, holder lost before the gate",
        _lost_closed_closing,
        *failed("session-closed"),
        effects="unsafe",
    ),
    row("a later attempt succeeds", then(_succeeds), *SUCCESS, effects="idempotent"),
    row(
        "a lost attempt, then the last asks again",
        then(_answers),
        *uncertain("attempts-exhausted"),
        effects="fenced",
        max_attempts=2,
    ),
    row("the same, none", then(_answers), *failed("attempts-exhausted"), effects="none", max_attempts=2),
    row(
        "a lost attempt, then lost before the gate",
        then(_dies_before_the_gate),
        *uncertain("claims-exhausted"),
        effects="idempotent",
        max_claims=1,
    ),
    row(
        "the same, none",
        then(_dies_before_the_gate),
        *failed("claims-exhausted"),
        effects="none",
        max_claims=1,
    ),
    row(
        "a lost attempt, then the session closes",
        then(_session_closes),
        *uncertain("session-closed"),
        effects="idempotent",
    ),
    row("the same, none", then(_session_closes), *failed("session-closed"), effects="none"),
    row(
        "a lost attempt, then the deadline",
        then(_nothing),
        *uncertain("timeout", "failed"),
        effects="idempotent",
    ),
    row("the same, none", then(_nothing), *failed("timeout"), effects="none"),
]


@pytest.mark.requirement(
    "RT-DEC-14",
    "RT-BR-01",
    "RT-BR-03",
    "RT-SET-02",
    "RT-STORE-13",
    "RT-GUARD-12",
    "DASP-CORE-006c",
    "DASP-CORE-007b",
    "DASP-CORE-008a",
)
@pytest.mark.case(49)
@pytest.mark.parametrize(("scene", "terms", "expected"), ROWS)
async def test_how_an_operation_closed(
    world: World, scene: Scene, terms: dict[str, Any], expected: tuple[str | None, ...]
) -> None:
    now = await world.start()
    new, when = await scene(world, now)
    before = len(await outcomes(world))
    await world.at(when)
    event: Event = "due"
    reply = await world.decide(new, when, event, **terms)
    assert reply is not None
    assert reply.code is Code.OK
    op = await world.load(new)
    assert op.phase == "settled"
    assert op.decision is not None
    page = await world.reads.page("s1", 0, 100, world.revisions)
    assert page is not None
    (fact,) = [f for f in page.facts if f.sequence == op.outcome_sequence]
    outcome = msgspec.json.decode(fact.payload)
    error = outcome["error"]
    found = (
        op.decision.outcome,
        op.decision.settlement,
        op.branches[0].status,
        outcome["status"],
        error and error["code"],
        op.reservation.split(" ")[0],
    )
    assert found == expected
    assert op.decision.at_ms == when
    if outcome["status"] == "uncertain":
        assert outcome["output"] is None or error["code"] == "attempts-exhausted"
        assert error["retryable"] is False
    assert (fact.kind, fact.command_id) == ("outcome", new.command_id)
    assert len(await outcomes(world)) == before + 1
    assert await world.decide(new, when + 99_999, **terms) is None


@pytest.mark.requirement("RT-GUARD-12", "RT-GUARD-13")
@pytest.mark.parametrize("scene", [_offered_to_deadline, _open_gate_to_deadline, _answered_to_deadline])
async def test_the_deadline_closes_nothing_before_it(world: World, scene: Scene) -> None:
    """Decided too early by a clock ahead, refused by the store's."""
    now = await world.start()
    new, when = await scene(world, now)
    await world.at(when - 1)
    reply = await world.decide(new, when, effects="unsafe")
    assert reply is not None
    assert (reply.code, reply.text(0)) == (Code.OUTSIDE_WINDOW, "guard")
    await world.at(when)
    reply = await world.decide(new, when, effects="unsafe")
    assert reply is not None
    assert reply.code is Code.OK


@pytest.mark.requirement("RT-GUARD-13", "RT-RES-09")
async def test_an_answer_that_is_folded_at_the_deadline_is_late(world: World) -> None:
    """Received in time, serialized at the deadline: it has no vote, whoever decided before."""
    now = await world.start()
    new, _ = await answered(world)
    await world.at(now + DEADLINE_MS)
    reply = await world.decide(new, now + DEADLINE_MS - 1)
    assert reply is not None
    assert (reply.code, reply.text(0)) == (Code.OUTSIDE_WINDOW, "guard")
    await world.decide(new, now + DEADLINE_MS, effects="unsafe")
    op = await world.load(new)
    assert op.decision is not None
    assert (op.decision.reason, op.decision.settlement) == ("timeout", "complete")
    assert dict(op.answers) == {}
    (outcome,) = await outcomes(world)
    assert b'"uncertain"' in outcome
    assert b'"value":3' not in outcome


@pytest.mark.requirement("DASP-CORE-007b")
@pytest.mark.parametrize(("halts", "effects"), [(True, "unsafe"), (False, "unsafe"), (True, "none")])
async def test_uncertain_halts_a_session_that_says_so(world: World, halts: bool, effects: str) -> None:
    now = await world.start()
    new, _ = await held(world)
    await world.at(now + DEADLINE_MS)
    await world.decide(new, now + DEADLINE_MS, effects=effects, halt_on_uncertain=halts)
    halted = halts and effects == "unsafe"
    assert (await session_of(world)).halted == (new.operation_id if halted else "")


@pytest.mark.requirement("DASP-CORE-006c", "DASP-CORE-009a")
async def test_only_an_accepted_answer_carries_updates_and_state(world: World) -> None:
    update = NamedData("counter.changed", msgspec.Raw(b'{"value":3}'))
    full = msgspec.structs.replace(
        RESULT, updates=(update,), state=msgspec.Raw(b'{"value":3}'), state_revision="0"
    )
    now = await world.start()
    new, _ = await answered(world, full)
    await world.decide(new, now)
    page = await world.reads.page("s1", 0, 9, world.revisions)
    assert page is not None
    assert [f.payload for f in page.facts][1] == b'{"name":"counter.changed","data":{"value":3}}'
    assert (page.session.state, page.session.state_revision) == (b'{"value":3}', "1")


@pytest.mark.parametrize(
    ("effects", "status"), [("none", "failed"), ("idempotent", "uncertain"), ("unsafe", "uncertain")]
)
async def test_an_answer_from_another_view_state_is_not_applied(
    world: World, effects: str, status: str
) -> None:
    stale = msgspec.structs.replace(RESULT, state=msgspec.Raw(b'{"value":9}'), state_revision="7")
    now = await world.start()
    new, _ = await answered(world, stale)
    await world.decide(new, now, effects=effects)
    (outcome,) = await outcomes(world)
    assert msgspec.json.decode(outcome)["status"] == status
    assert msgspec.json.decode(outcome)["error"]["code"] == "state-moved"
    assert (await session_of(world)).state == b'{"value":0}'
