"""claim: who gets a lease, under which fence, and every reason why not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.domain.guard import MAX_SAFE_INTEGER
from shared.store.codes import Code
from shared.store.replies import Grant, NewOperation, Reply
from tests.scripts.scenes import (
    RESULT,
    answered,
    branch_of,
    held,
    meta,
    offered,
    patch,
    reword,
    settled,
    unchanged,
)
from tests.support.world import World

LEASE_MS = 1000


@pytest.mark.requirement("RT-OWN-01", "RT-OUT-01", "RT-GUARD-18")
async def test_a_grant_names_its_assignment_and_carries_the_work(world: World) -> None:
    now = await world.start()
    new = await offered(world)
    await world.at(now + 5)
    grant = await world.granted(new, "h1", open_gate=False)
    lease = grant.lease
    assert (lease.operation_id, lease.branch, lease.peer) == (new.operation_id, 0, "alfa")
    assert (lease.epoch, lease.fence, lease.holder, grant.attempt) == ("1", "1", "h1", 1)
    assert (grant.granted_ms, grant.until_ms, grant.deadline_ms) == (now + 5, now + 1005, now + 10_000)
    assert (grant.admission, grant.input) == (new.admission, new.input)
    assert (grant.head, grant.state, grant.state_revision) == (1, b'{"value":0}', "0")
    branch = await branch_of(world, new)
    assert (branch.holder, branch.until_ms, branch.gate, branch.claims) == ("h1", now + 1005, "closed", 1)


async def test_an_invocation_is_granted_without_a_session(world: World) -> None:
    new = world.invocation()
    await world.admit(new)
    grant = await world.granted(new, branch=1, peer="bravo")
    assert (grant.head, grant.state, grant.state_revision, grant.input) == (0, b"", "", b"{}")
    assert (await branch_of(world, new, 0)).holder is None


async def test_claim_may_open_the_gate_at_once(world: World) -> None:
    new, _ = await held(world, open_gate=True)
    assert (await branch_of(world, new)).gate == "open"


async def _unknown(world: World) -> NewOperation:
    await world.open()
    return world.command()


async def _tombstone(world: World) -> NewOperation:
    new, _ = await settled(world)
    await world.store.close_session("s1", world.revisions)
    await world.store.purge("s1", [new.operation_id], True, world.revisions)
    return new


async def _closed(world: World) -> NewOperation:
    new = await offered(world)
    await patch(world, new, phase="closed")
    return new


async def _settled_phase(world: World) -> NewOperation:
    new = await offered(world)
    await patch(world, new, phase="settled")
    return new


async def _branch_ended(world: World) -> NewOperation:
    new = await offered(world)
    await reword(world, new, status="failure")
    return new


async def _answered(world: World) -> NewOperation:
    return (await answered(world))[0]


async def _held(world: World) -> NewOperation:
    return (await held(world, "other"))[0]


async def _lapsed(world: World) -> NewOperation:
    new, grant = await held(world, "other")
    await world.at(grant.until_ms + 1)
    return new


async def _waiting(world: World) -> NewOperation:
    await offered(world)
    second = world.command("c2")
    await world.admit(second)
    return second


async def _claimed_often(world: World) -> NewOperation:
    new = await offered(world)
    await reword(world, new, claims=3)
    return new


REFUSALS: list[tuple[str, Callable[[World], Awaitable[NewOperation]], dict[str, Any], Code]] = [
    ("no such operation", _unknown, {}, Code.ABSENT),
    ("a tombstone", _tombstone, {}, Code.ABSENT),
    ("no such branch", offered, {"branch": 1}, Code.ABSENT),
    ("operation decided", _closed, {}, Code.TERMINAL),
    ("operation settled", _settled_phase, {}, Code.TERMINAL),
    ("branch ended", _branch_ended, {}, Code.TERMINAL),
    ("offered to another peer", offered, {"peer": "bravo"}, Code.NOT_OWNER),
    ("another attempt", offered, {"attempt": 2}, Code.STALE_FENCE),
    ("answered", _answered, {}, Code.ANSWERED),
    ("held by another", _held, {}, Code.HELD),
    ("lease of another ran out", _lapsed, {}, Code.HELD),
    ("waits for its turn", _waiting, {}, Code.NOT_OFFERED),
    ("claimed too often", _claimed_often, {}, Code.EXHAUSTED),
    ("nobody's name", offered, {"holder": "-"}, Code.INVALID),
    ("two words as a name", offered, {"holder": "h1 h2"}, Code.INVALID),
    ("no name at all", offered, {"holder": "=h1"}, Code.INVALID),
    ("no lease time", offered, {"lease_ms": 0}, Code.INVALID),
    ("endless lease", offered, {"lease_ms": MAX_SAFE_INTEGER}, Code.INVALID),
]


@pytest.mark.requirement("RT-STORE-15", "RT-OWN-03", "RT-RES-04", "RT-RES-05", "RT-GUARD-09")
@pytest.mark.parametrize(
    ("scene", "changes", "code"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
async def test_every_refusal_has_its_code_and_changes_nothing(
    world: World, scene: Callable[[World], Awaitable[NewOperation]], changes: dict[str, Any], code: Code
) -> None:
    await world.start()
    new = await scene(world)
    async with unchanged(world):
        reply = await world.claim(new, **{"holder": "h1", **changes})
    assert isinstance(reply, Reply)
    assert reply.code is code


@pytest.mark.requirement("RT-GUARD-09")
async def test_the_longest_lease_ends_on_the_last_safe_integer(world: World) -> None:
    now = await world.start()
    new = await offered(world)
    grant = await world.granted(new, lease_ms=MAX_SAFE_INTEGER - now)
    assert grant.until_ms == MAX_SAFE_INTEGER


@pytest.mark.requirement("RT-GUARD-11", "RT-GUARD-05", "RT-GUARD-02")
@pytest.mark.parametrize(("offset", "granted"), [(-1, True), (0, False), (1, False)])
async def test_nothing_is_granted_at_the_deadline(world: World, offset: int, granted: bool) -> None:
    now = await world.start()
    new = await offered(world, timeout_ms=5000)
    await world.at(now + 5000 + offset)
    reply = await world.claim(new)
    if granted:
        assert isinstance(reply, Grant)
    else:
        assert isinstance(reply, Reply)
        assert (reply.code, reply.text(0)) == (Code.OUTSIDE_WINDOW, "deadline")


@pytest.mark.requirement("RT-AUTH-09", "RT-GUARD-05")
@pytest.mark.parametrize(("offset", "granted"), [(-1, True), (0, False)])
async def test_a_decision_that_expires_before_the_commit_grants_nothing(
    world: World, offset: int, granted: bool
) -> None:
    now = await world.start()
    new = await offered(world)
    await world.at(now + 100 + offset)
    world.clock.bound = now + 100
    reply = await world.claim(new)
    assert isinstance(reply, Grant) is granted
    if isinstance(reply, Reply):
        assert (reply.code, reply.text(0)) == (Code.OUTSIDE_WINDOW, "guard")


async def test_an_offer_may_be_claimed_late_as_long_as_it_is_not_withdrawn(world: World) -> None:
    now = await world.start()
    new = await offered(world)
    await world.at(now + 1001)
    assert isinstance(await world.claim(new), Grant)


@pytest.mark.requirement("RT-OWN-02", "RT-GUARD-18")
@pytest.mark.parametrize("offset", [-1, 0])
async def test_a_repeated_claim_gives_the_same_grant_until_the_lease_ends(world: World, offset: int) -> None:
    await world.start()
    new, grant = await held(world, open_gate=False)
    await world.at(grant.until_ms + offset)
    async with unchanged(world):
        again = await world.claim(new, "h1", open_gate=False)
    if offset < 0:
        assert isinstance(again, Grant)
        assert (again.lease, again.until_ms) == (grant.lease, grant.until_ms)
    else:
        assert isinstance(again, Reply)
        assert again.code is Code.LEASE_EXPIRED


@pytest.mark.requirement("RT-OWN-02")
async def test_a_repeated_claim_may_open_the_gate_once(world: World) -> None:
    new, grant = await held(world, open_gate=False)
    opened = await world.claim(new, "h1", open_gate=True)
    assert isinstance(opened, Grant)
    assert opened.lease == grant.lease
    assert (await branch_of(world, new)).gate == "open"
    async with unchanged(world):
        for open_gate in (True, False):
            again = await world.claim(new, "h1", open_gate=open_gate)
            assert isinstance(again, Reply)
            assert again.code is Code.GATE_OPEN


@pytest.mark.requirement("RT-OWN-02")
async def test_a_lost_reply_of_claim_and_open_grants_no_send(world: World) -> None:
    new, _ = await held(world, open_gate=True)
    again = await world.claim(new, "h1", open_gate=True)
    assert isinstance(again, Reply)
    assert again.code is Code.GATE_OPEN


async def test_a_grant_of_an_earlier_epoch_is_still_its_holders(world: World) -> None:
    new, grant = await held(world, open_gate=False)
    await meta(world, replid="0" * 40)
    again = await world.claim(new, "h1", open_gate=False)
    assert isinstance(again, Grant)
    assert again.lease == grant.lease
    assert again.lease.epoch == "1"
    other = world.command("c2", kind="concurrent")
    await world.admit(other)
    assert (await world.granted(other)).lease.epoch == "2"


@pytest.mark.requirement("RT-OWN-03", "RT-GUARD-18")
async def test_claim_only_lowers_the_wake_up(world: World) -> None:
    now = await world.start()
    early = await offered(world)
    await world.granted(early, lease_ms=999)
    late = world.command("c2", kind="concurrent")
    await world.admit(late)
    await world.granted(late, lease_ms=1001)
    due = dict(await world.reads.due(now + 60_000, 10))
    assert due == {early.operation_id: now + 999, late.operation_id: now + 1000}


async def test_claim_arms_a_wake_up_that_was_lost(world: World) -> None:
    now = await world.start()
    new = await offered(world)
    await world.connection.call("DEL", world.keys.due)
    await world.granted(new)
    assert await world.reads.due(now + 60_000, 10) == [(new.operation_id, now + LEASE_MS)]


@pytest.mark.requirement("RT-OWN-10", "RT-OUT-01")
@pytest.mark.case(45)
async def test_twenty_claimers_get_each_fence_once(world: World) -> None:
    """Case 45: offers that ran out are claimed by many; every (operation, fence) is granted once."""
    now = await world.start()
    await world.open()
    ops = [world.command(f"c{n}", kind="concurrent", timeout_ms=600_000) for n in range(25)]
    for new in ops:
        await world.admit(new)
    granted: list[tuple[str, str]] = []

    async def claimer(name: str, now_ms: int, attempt: int) -> None:
        for new in ops:
            reply = await world.claim(new, f"{name}-{now_ms}", attempt=attempt)
            if isinstance(reply, Grant):
                granted.append((new.operation_id, reply.lease.fence))

    for n in range(3):
        await asyncio.gather(*(claimer(f"h{k}", now, n + 1) for k in range(20)))
        assert len(granted) == len(set(granted)) == 25 * (n + 1)
        now += LEASE_MS
        await world.at(now)
        for new in ops:
            await world.decide(new, now, effects="idempotent", max_attempts=9)
        now += 200
        await world.at(now)
        for new in ops:
            await world.decide(new, now, effects="idempotent", max_attempts=9)


@pytest.mark.case(38)
@pytest.mark.requirement("RT-CTX-06", "RT-GUARD-18")
async def test_no_time_of_the_claimer_reaches_the_store(world: World) -> None:
    """Case 38: a lease is a duration; the instants are the store's, whatever the caller's clocks say."""
    now = await world.start()
    new = await offered(world)
    world.clock.monotonic_ms = lambda: -1e12
    grant = await world.granted(new)
    assert (grant.granted_ms, grant.until_ms) == (now, now + LEASE_MS)
    other = await world.claim(new, "h2")
    assert isinstance(other, Reply)
    assert other.code is Code.HELD


@pytest.mark.case(30)
async def test_an_admission_without_a_deadline_cannot_be(world: World) -> None:
    """Case 30: running work always has a deadline: a record without one is an error, never free to take."""
    new = await offered(world)
    await world.connection.call("HDEL", world.keys.op(new.operation_id), "at")
    async with unchanged(world):
        with pytest.raises(Exception, match="the store refused"):
            await world.claim(new)


@pytest.mark.requirement("RT-ADM-37")
async def test_a_claim_under_a_revoked_policy_gives_nothing_out(world: World) -> None:
    new = await offered(world)
    await meta(world, policy_rev="2")
    reply = await world.claim(new)
    assert isinstance(reply, Reply)
    assert (reply.code, reply.text(0), reply.text(1)) == (Code.STALE_SNAPSHOT, "policy", "2")
    world.revisions = msgspec.structs.replace(world.revisions, policy="2")
    grant = await world.granted(new)
    assert (await world.answer(grant.lease, RESULT)).code is Code.OK
