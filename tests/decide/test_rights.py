"""Rights that are taken back, that end, and that nobody knows: what deciding makes of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.domain.decide import Rights, apply
from shared.domain.errors import Unavailable
from shared.store.codes import Code
from shared.store.replies import NEXT_TURN, Claim, Grant, NewOperation, Reply
from tests.decide.rights import Asked, expiring, only, unreadable, without
from tests.decide.test_closing import second_attempt
from tests.scripts.scenes import (
    AGAIN,
    RESULT,
    answered,
    branch_of,
    held,
    offered,
    outbox_ids,
    outcomes,
    session_of,
    settled,
)
from tests.support.world import World, anyone, terms

SAFE = ("none", "idempotent", "fenced", "unsafe")
ACTING = ("idempotent", "fenced", "unsafe")
BOTH = ("alfa", "bravo")

Scene = Callable[[World, int], Awaitable[tuple[NewOperation, int]]]


async def _offered(world: World, now: int) -> tuple[NewOperation, int]:
    return await offered(world), now


async def _queued(world: World, now: int) -> tuple[NewOperation, int]:
    await offered(world, "c0")
    return await offered(world), now


async def _claimed(world: World, now: int) -> tuple[NewOperation, int]:
    return (await held(world, open_gate=False))[0], now


async def _lost_closed(world: World, now: int) -> tuple[NewOperation, int]:
    return (await held(world, open_gate=False))[0], now + 1000


async def _waiting(world: World, now: int) -> tuple[NewOperation, int]:
    """A known answer asked for another attempt, its time has not come."""
    new, _ = await answered(world, AGAIN)
    assert (await _decided(world, new, now, anyone)).code is Code.OK
    return new, now + 100


async def _open(world: World, now: int) -> tuple[NewOperation, int]:
    return (await held(world))[0], now


async def _lost_open(world: World, now: int) -> tuple[NewOperation, int]:
    return (await held(world))[0], now + 1000


async def _answered(world: World, now: int) -> tuple[NewOperation, int]:
    return (await answered(world))[0], now


NEVER_OPEN: dict[str, Scene] = {
    "offered": _offered,
    "queued": _queued,
    "claimed": _claimed,
    "lost before the gate": _lost_closed,
    "waiting for its retry": _waiting,
}
MAY_HAVE_ACTED: dict[str, Scene] = {
    "behind an open gate": _open,
    "lost behind an open gate": _lost_open,
    "answered": _answered,
    "lost before, offered again": second_attempt,
}
CASES = [
    *[(scene, effects, False) for scene in NEVER_OPEN.values() for effects in SAFE],
    *[(scene, "none", False) for scene in MAY_HAVE_ACTED.values()],
    *[(scene, effects, True) for scene in MAY_HAVE_ACTED.values() for effects in ACTING],
]
NAMES = [
    *[f"{name}, {effects}" for name in NEVER_OPEN for effects in SAFE],
    *[f"{name}, none" for name in MAY_HAVE_ACTED],
    *[f"{name}, {effects}" for name in MAY_HAVE_ACTED for effects in ACTING],
]


async def _decided(world: World, new: NewOperation, now: int, rights: Rights, **more: Any) -> Reply:
    reply = await world.decide(new, now, rights=rights, **more)
    assert reply is not None
    return reply


@pytest.mark.requirement(
    "RT-ADM-35", "RT-ADM-37", "RT-ATT-06", "RT-OWN-07", "RT-RES-10", "RT-BR-05", "RT-AUTH-08", "RT-AUTH-04"
)
@pytest.mark.parametrize(("scene", "effects", "uncertain"), CASES, ids=NAMES)
async def test_a_right_taken_back_ends_the_branch_at_once(
    world: World, scene: Scene, effects: str, uncertain: bool
) -> None:
    now = await world.start()
    new, when = await scene(world, now)
    await world.at(when)
    before = len(await outcomes(world))
    reply = await _decided(world, new, when, without("alfa"), effects=effects)
    assert reply.code is Code.OK
    op = await world.load(new)
    assert op.decision is not None
    assert (op.phase, op.branches[0].status, op.decision.reason) == ("settled", "revoked", "revoked")
    assert op.decision.at_ms == when
    assert (op.decision.outcome, op.decision.settlement, op.reservation.split(" ")[0]) == (
        ("indeterminate", "indeterminate", "quarantined")
        if uncertain
        else ("failed", "complete", "replayable")
    )
    (*_, last) = await outcomes(world)
    outcome = msgspec.json.decode(last)
    assert outcome["status"] == ("uncertain" if uncertain else "failed")
    assert outcome["output"] is None
    assert (outcome["error"]["code"], outcome["error"]["retryable"]) == ("revoked", False)
    assert len(await outcomes(world)) == before + 1
    # Nobody is offered it any more, no answer of it is left, and its lease is worth nothing.
    assert len(await outbox_ids(world)) == (1 if scene is _queued else 0)
    assert not op.answers
    branch = op.branches[0]
    claim = Claim(op.id, 0, "alfa", branch.attempt, "h9", 1000, 3, True, "s1")
    refused = await world.store.claim(claim, world.revisions)
    assert isinstance(refused, Reply)
    assert refused.code is Code.TERMINAL
    assert await world.decide(new, when + 99_999, rights=anyone) is None


@pytest.mark.requirement("RT-AUTH-08", "RT-AUTH-01", "RT-AUTH-02", "RT-CTX-04")
@pytest.mark.parametrize(
    ("scene", "action"),
    [
        (_offered, "branch.assign"),
        (_queued, "branch.assign"),
        (_waiting, "branch.assign"),
        (_lost_open, "branch.assign"),
        (_claimed, "claim"),
        (_open, "claim"),
        (_answered, "answer"),
    ],
)
async def test_what_is_asked_is_what_the_branch_is_about_to_do(
    world: World, scene: Scene, action: str
) -> None:
    """For the peer and the attempt that the branch names; taking back that one action ends it."""
    now = await world.start()
    new, when = await scene(world, now)
    op = await world.load(new)
    asked: list[Asked] = []
    apply(op, terms(), without(asked=asked), "due", when)
    assert asked[0] == (action, "alfa", op.branches[0].attempt)
    change = apply(op, terms(), without(action), "due", when)
    assert change is not None
    assert change.decision is not None
    assert change.decision.reason == "revoked"
    spared = apply(op, terms(), only([action, "branch.assign", "claim"]), "due", when)
    assert spared is None or spared.decision is None or spared.decision.reason != "revoked"


@pytest.mark.requirement("RT-AUTH-08", "RT-ADM-35")
@pytest.mark.parametrize("scene", [_offered, _queued, _waiting, _lost_open])
async def test_a_peer_that_may_not_claim_is_given_nothing(world: World, scene: Scene) -> None:
    """Waiting for it until the deadline would be waiting for nobody."""
    now = await world.start()
    new, when = await scene(world, now)
    op = await world.load(new)
    change = apply(op, terms(), without("claim"), "due", when)
    assert change is not None
    assert change.decision is not None
    assert change.decision.reason == "revoked"


@pytest.mark.requirement("RT-AUTH-08", "RT-BR-05")
@pytest.mark.parametrize("effects", ["none", "unsafe"])
async def test_an_answer_that_asks_for_an_attempt_nobody_may_make(world: World, effects: str) -> None:
    """It was heard, so nothing about it is uncertain; it ends all the same."""
    now = await world.start()
    new, _ = await answered(world, AGAIN)
    reply = await _decided(world, new, now, without("branch.assign"), effects=effects)
    assert reply.code is Code.OK
    op = await world.load(new)
    assert op.branches[0].status == "revoked"
    (outcome,) = [msgspec.json.decode(payload) for payload in await outcomes(world)]
    assert (outcome["status"], outcome["error"]["code"]) == ("failed", "revoked")


@pytest.mark.requirement("RT-SEL-02", "RT-AUTH-08", "RT-ADM-35")
async def test_a_peer_that_may_not_be_assigned_is_passed_over(world: World) -> None:
    """Of three eligible peers the next is the one after it; where none is left the same peer goes on."""
    now = await world.start()
    new = await offered(world, peers=("alfa", "bravo", "delta"))
    await world.at(now + 1000)
    assert (await _decided(world, new, now + 1000, without("bravo"))).code is Code.OK
    branch = await branch_of(world, new)
    assert (branch.peer, branch.attempt) == ("delta", 2)
    await world.at(now + 2000)
    assert (await _decided(world, new, now + 2000, without("bravo", "alfa"))).code is Code.OK
    branch = await branch_of(world, new)
    assert (branch.peer, branch.attempt) == ("delta", 2)
    await world.at(now + 3000)
    assert (await _decided(world, new, now + 3000, without("bravo"))).code is Code.OK
    branch = await branch_of(world, new)
    assert (branch.peer, branch.attempt) == ("alfa", 3)
    # The peer itself: its branch ends, whoever else is eligible.
    assert (await _decided(world, new, now + 3000, without("alfa"))).code is Code.OK
    assert (await branch_of(world, new)).status == "revoked"
    for peer in (*BOTH, "delta"):
        assert await outbox_ids(world, peer) == []


@pytest.mark.requirement("RT-SEL-02", "RT-AUTH-08", "RT-OWN-08")
async def test_a_retry_goes_to_a_peer_that_may_make_it(world: World) -> None:
    now = await world.start()
    new, _ = await held(world, peers=BOTH)
    await world.at(now + 1000)
    assert (await _decided(world, new, now + 1000, without("bravo"))).code is Code.OK
    branch = await branch_of(world, new)
    assert (branch.status, branch.peer, branch.attempt) == ("pending", "alfa", 2)


@pytest.mark.requirement("RT-AUTH-05")
async def test_nothing_that_needs_a_right_is_decided_while_nobody_knows_it(world: World) -> None:
    """The deadline and the close of a session go on: they give nobody anything."""
    now = await world.start()
    new, grant = await held(world)
    for step in (None, world.answer(grant.lease, RESULT)):
        if step is not None:
            await step
        with pytest.raises(Unavailable):
            await world.decide(new, now, rights=unreadable)
    assert (await branch_of(world, new)).status == "pending"
    await world.at(now + 10_000)
    assert (await _decided(world, new, now + 10_000, unreadable)).code is Code.OK
    assert (await world.load(new)).phase == "settled"


async def test_a_closing_session_ends_what_waits_without_a_right(world: World) -> None:
    now = await world.start()
    new = await offered(world)
    await world.store.close_session("s1", world.revisions)
    assert (await _decided(world, new, now, unreadable)).code is Code.OK
    (outcome,) = [msgspec.json.decode(payload) for payload in await outcomes(world)]
    assert outcome["error"]["code"] == "session-closed"


async def test_the_deadline_goes_before_what_was_taken_back(world: World) -> None:
    now = await world.start()
    new, _ = await held(world)
    await world.at(now + 10_000)
    assert (await _decided(world, new, now + 10_000, without("alfa"), effects="unsafe")).code is Code.OK
    (outcome,) = [msgspec.json.decode(payload) for payload in await outcomes(world)]
    assert outcome["error"]["code"] == "timeout"


# A right that ends before the commit does not authorize it


async def _fold(world: World, now: int) -> tuple[NewOperation, int]:
    return (await answered(world, RESULT))[0], now


async def _unclaimed(world: World, now: int) -> tuple[NewOperation, int]:
    return await offered(world), now + 1000


async def _retry_due(world: World, now: int) -> tuple[NewOperation, int]:
    new, _ = await _waiting(world, now)
    return new, now + 200


async def _again(world: World, now: int) -> tuple[NewOperation, int]:
    return (await answered(world, AGAIN))[0], now


@pytest.mark.requirement("RT-AUTH-06", "RT-AUTH-09", "RT-GUARD-05")
@pytest.mark.parametrize("scene", [_fold, _unclaimed, _retry_due, _again, _lost_open, _lost_closed])
async def test_what_rests_on_a_right_commits_before_that_ends(world: World, scene: Scene) -> None:
    now = await world.start()
    new, due = await scene(world, now)
    when = due + 5
    await world.at(when)
    before = await world.dump()
    reply = await _decided(world, new, when, without(expires_ms=when))
    assert (reply.code, reply.text(0)) == (Code.OUTSIDE_WINDOW, "guard")
    assert await world.dump() == before
    assert (await _decided(world, new, when, without(expires_ms=when + 1))).code is Code.OK


@pytest.mark.requirement("RT-AUTH-09")
@pytest.mark.parametrize("scene", [_unclaimed, _lost_open])
async def test_the_right_of_the_next_peer_counts_too(world: World, scene: Scene) -> None:
    """The branch's present peer may go on for ever, the one that is to follow until now."""
    now = await world.start()
    new = await offered(world, peers=BOTH)
    if scene is _lost_open:
        await world.granted(new)
    when = now + 1005
    await world.at(when)
    rights = expiring({"alfa": when + 5000, "bravo": when})
    assert (await _decided(world, new, when, rights)).code is Code.OUTSIDE_WINDOW
    rights = expiring({"alfa": when + 5000, "bravo": when + 1})
    assert (await _decided(world, new, when, rights)).code is Code.OK
    assert (await branch_of(world, new)).peer == "bravo"


@pytest.mark.requirement("RT-AUTH-06", "RT-AUTH-09", "RT-OWN-04")
async def test_grants_renewals_and_turns_are_committed_before_their_right_ends(world: World) -> None:
    now = await world.start()
    first = await offered(world)
    second = world.command("c2")
    await world.admit(second)
    claim = Claim(first.operation_id, 0, "alfa", 1, "h1", 1000, 3, False, "s1")
    refused = await world.store.claim(claim, world.revisions, now)
    assert isinstance(refused, Reply)
    assert (refused.code, refused.text(0)) == (Code.OUTSIDE_WINDOW, "guard")
    grant = await world.store.claim(claim, world.revisions, now + 1)
    assert isinstance(grant, Grant)
    assert (await world.store.open_gate(grant.lease, world.revisions, now)).code is Code.OUTSIDE_WINDOW
    assert (await world.store.open_gate(grant.lease, world.revisions, now + 1)).code is Code.OK
    await world.at(now + 10)
    ((code, _),) = await world.store.renew([grant.lease], 1000, world.revisions, now + 10)
    assert code is Code.OUTSIDE_WINDOW
    assert (await branch_of(world, first)).until_ms == grant.until_ms
    ((code, until),) = await world.store.renew([grant.lease], 1000, world.revisions, now + 11)
    assert (code, until) == (Code.RENEWED, now + 1010)
    await world.answer(grant.lease, RESULT)
    assert (await _decided(world, first, now + 10, anyone)).code is Code.OK
    following = await world.load(second)

    async def turn(right_ends_ms: int) -> Reply:
        return await world.store.turn(
            "s1",
            world.revisions,
            busy=NEXT_TURN,
            following=following,
            claim_timeout_ms=1000,
            decision_expires_ms=right_ends_ms,
        )

    assert (await session_of(world)).busy == NEXT_TURN
    assert (await turn(now + 10)).code is Code.OUTSIDE_WINDOW
    assert await outbox_ids(world) == []
    assert (await turn(now + 11)).text(0) == "dispatched"


@pytest.mark.requirement("RT-ADM-35", "RT-DEC-15")
async def test_what_is_closed_stays_as_it_is(world: World) -> None:
    now = await world.start()
    new, _ = await settled(world)
    before = await world.dump()
    for moment in (now, now + 99_999):
        assert await world.decide(new, moment, rights=without("alfa")) is None
    assert await world.dump() == before
