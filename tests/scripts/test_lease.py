"""open, renew, release and answer: only the holder of the current pair (epoch, fence), only in its time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.domain.guard import MAX_SAFE_INTEGER
from shared.store.codes import Code
from shared.store.connection import ReplyError
from shared.store.replies import Lease
from tests.scripts.scenes import (
    RESULT,
    Ended,
    answered,
    branch_of,
    code_of,
    held,
    meta,
    offered,
    patch,
    reword,
    settled,
    unchanged,
)
from tests.support.world import World

Verb = Callable[[World, Lease], Awaitable[Ended]]
VERBS: dict[str, Verb] = {
    "open": lambda world, lease: world.store.open_gate(lease, world.revisions),
    "renew": lambda world, lease: world.store.renew([lease], 1000, world.revisions),
    "release": lambda world, lease: world.store.release(lease, world.revisions),
    "answer": lambda world, lease: world.answer(lease, RESULT),
}
DONE = {"renew": Code.RENEWED}
EVERY = pytest.mark.parametrize("verb", VERBS)


async def fresh(world: World, verb: str) -> Lease:
    """A lease with which the verb would succeed."""
    _, grant = await held(world, open_gate=verb != "open")
    return grant.lease


async def _unknown(world: World, verb: str) -> Lease:
    await world.open()
    return Lease(world.command().operation_id, 0, "alfa", "1", "1", "h1")


async def _tombstone(world: World, verb: str) -> Lease:
    new, grant = await settled(world)
    await world.store.close_session("s1", world.revisions)
    await world.store.purge("s1", [new.operation_id], True, world.revisions)
    return grant.lease


def other(**changes: Any) -> Callable[[World, str], Awaitable[Lease]]:
    async def scene(world: World, verb: str) -> Lease:
        return msgspec.structs.replace(await fresh(world, verb), **changes)

    return scene


def rewritten(record: dict[str, str], words: dict[str, Any]) -> Callable[[World, str], Awaitable[Lease]]:
    async def scene(world: World, verb: str) -> Lease:
        lease = await fresh(world, verb)
        new = world.command()
        if record:
            await patch(world, new, **record)
        await reword(world, new, **words)
        return lease

    return scene


async def _nobodys(world: World, verb: str) -> Lease:
    new = await offered(world)
    await reword(world, new, until_ms=MAX_SAFE_INTEGER, gate="closed" if verb == "open" else "open")
    return Lease(new.operation_id, 0, "alfa", "1", "1", "-")


REFUSALS: list[tuple[str, Callable[[World, str], Awaitable[Lease]], Code]] = [
    ("no such operation", _unknown, Code.ABSENT),
    ("a tombstone", _tombstone, Code.ABSENT),
    ("no such branch", other(branch=1), Code.ABSENT),
    ("operation decided", rewritten({"phase": "closed"}, {}), Code.TERMINAL),
    ("operation settled", rewritten({"phase": "settled"}, {}), Code.TERMINAL),
    ("branch ended", rewritten({"phase": "active"}, {"status": "failure"}), Code.TERMINAL),
    ("older fence", rewritten({"phase": "active"}, {"fence": 2}), Code.STALE_FENCE),
    ("later fence", other(fence="2"), Code.STALE_FENCE),
    ("older epoch", rewritten({}, {"epoch": 2}), Code.STALE_FENCE),
    ("later epoch", other(epoch="2"), Code.STALE_FENCE),
    ("another holder", other(holder="h2"), Code.NOT_OWNER),
    ("nobody", _nobodys, Code.NOT_OWNER),
]


@EVERY
@pytest.mark.requirement("RT-STORE-15", "RT-OWN-04", "RT-RES-02", "RT-RES-03", "RT-RES-06", "RT-EFF-01")
@pytest.mark.parametrize(("scene", "code"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
async def test_every_refusal_has_its_code_and_changes_nothing(
    world: World, verb: str, scene: Callable[[World, str], Awaitable[Lease]], code: Code
) -> None:
    await world.start()
    lease = await scene(world, verb)
    async with unchanged(world):
        assert code_of(await VERBS[verb](world, lease)) is code


@pytest.mark.requirement("RT-RES-04")
@pytest.mark.parametrize("verb", ["open", "release", "answer"])
async def test_the_outbox_of_another_peer_is_never_touched(world: World, verb: str) -> None:
    lease = await fresh(world, verb)
    wrong = msgspec.structs.replace(lease, peer="bravo")
    async with unchanged(world):
        assert code_of(await VERBS[verb](world, wrong)) is Code.NOT_OWNER
    assert code_of(await VERBS[verb](world, lease)) is Code.OK


@EVERY
@pytest.mark.requirement("RT-OWN-05", "RT-OWN-06", "RT-RES-08", "RT-GUARD-05", "RT-GUARD-18")
@pytest.mark.parametrize("offset", [-1, 0, 1])
async def test_a_lease_ends_at_its_end(world: World, verb: str, offset: int) -> None:
    """RT-OWN-05 and 06: from ``until`` on the holder neither renews nor answers nor opens nor releases."""
    now = await world.start()
    lease = await fresh(world, verb)
    await world.at(now + 1000 + offset)
    if offset < 0:
        assert code_of(await VERBS[verb](world, lease)) is DONE.get(verb, Code.OK)
        return
    async with unchanged(world):
        assert code_of(await VERBS[verb](world, lease)) is Code.LEASE_EXPIRED


@EVERY
@pytest.mark.requirement("RT-GUARD-11", "RT-RES-09", "RT-GUARD-02")
@pytest.mark.parametrize("offset", [-1, 0, 1])
async def test_nothing_is_let_in_from_the_deadline_on(world: World, verb: str, offset: int) -> None:
    now = await world.start()
    new = await offered(world, timeout_ms=500)
    grant = await world.granted(new, open_gate=verb != "open")
    await world.at(now + 500 + offset)
    if offset < 0:
        assert code_of(await VERBS[verb](world, grant.lease)) is DONE.get(verb, Code.OK)
        return
    async with unchanged(world):
        assert code_of(await VERBS[verb](world, grant.lease)) is Code.OUTSIDE_WINDOW


@pytest.mark.parametrize(
    ("verb", "code"), [("open", Code.ANSWERED), ("renew", Code.ANSWERED), ("release", Code.ANSWERED)]
)
async def test_an_answered_branch_is_finished_for_its_holder(world: World, verb: str, code: Code) -> None:
    _, grant = await answered(world)
    async with unchanged(world):
        assert code_of(await VERBS[verb](world, grant.lease)) is code


@pytest.mark.requirement("RT-OWN-02")
async def test_a_gate_opens_once_and_a_repeat_grants_no_send(world: World) -> None:
    new, grant = await held(world, open_gate=False)
    assert (await world.store.open_gate(grant.lease, world.revisions)).code is Code.OK
    assert (await branch_of(world, new)).gate == "open"
    async with unchanged(world):
        assert (await world.store.open_gate(grant.lease, world.revisions)).code is Code.GATE_OPEN


@pytest.mark.requirement("RT-OWN-04", "RT-STORE-06")
async def test_renewal_moves_the_end_of_the_lease_and_nothing_else(world: World) -> None:
    """No lease verb moves the revision; a renewal is one field and leaves every wake-up alone."""
    now = await world.start()
    new, grant = await held(world)
    before = await world.load(new)
    due = await world.reads.due(now + 60_000, 10)
    await world.at(now + 400)
    assert await world.store.renew([grant.lease], 1500, world.revisions) == [(Code.RENEWED, now + 1900)]
    after = await world.load(new)
    assert after.revision == before.revision
    assert await world.reads.due(now + 60_000, 10) == due
    branch = msgspec.structs.replace(before.branches[0], until_ms=now + 1900)
    assert after.branches == (branch,)
    await world.at(now + 1899)
    assert (await world.answer(grant.lease, RESULT)).code is Code.OK


@pytest.mark.requirement("RT-OWN-04", "RT-OWN-05")
async def test_a_list_of_renewals_is_judged_one_by_one(world: World) -> None:
    now = await world.start()
    await world.open()
    leases = []
    for n in range(6):
        new = world.command(f"c{n}", kind="concurrent", timeout_ms=500 if n == 5 else 10_000)
        await world.admit(new)
        leases.append((await world.granted(new, f"h{n}", lease_ms=300 if n == 1 else 1000)).lease)
    await world.answer(leases[2], RESULT)
    leases[3] = msgspec.structs.replace(leases[3], fence="9")
    leases[4] = msgspec.structs.replace(leases[4], holder="h0")
    absent = msgspec.structs.replace(leases[0], operation_id="op" + "0" * 64)
    await world.at(now + 300)
    pairs = await world.store.renew([*leases[:5], absent, leases[0]], 1000, world.revisions)
    assert [code for code, _ in pairs] == [
        Code.RENEWED,
        Code.LEASE_EXPIRED,
        Code.ANSWERED,
        Code.STALE_FENCE,
        Code.NOT_OWNER,
        Code.ABSENT,
        Code.RENEWED,
    ]
    assert [until for _, until in pairs] == [now + 1300, 0, 0, 0, 0, 0, now + 1300]
    await world.at(now + 500)
    pairs = await world.store.renew([leases[5], leases[0]], 1000, world.revisions)
    assert pairs == [(Code.OUTSIDE_WINDOW, 0), (Code.RENEWED, now + 1500)]


async def test_a_refusal_that_concerns_all_renewals_comes_back_for_each(world: World) -> None:
    _, grant = await held(world)
    await meta(world, policy_rev="2")
    pairs = await world.store.renew([grant.lease] * 3, 1000, world.revisions)
    assert pairs == [(Code.STALE_SNAPSHOT, 0)] * 3


@pytest.mark.requirement("RT-GUARD-09")
@pytest.mark.parametrize(("lease_ms", "code"), [(0, Code.INVALID), (1, Code.RENEWED)])
async def test_a_renewal_gives_time(world: World, lease_ms: int, code: Code) -> None:
    _, grant = await held(world)
    assert (await world.store.renew([grant.lease], lease_ms, world.revisions))[0][0] is code


@pytest.mark.requirement("RT-GUARD-09")
async def test_a_renewal_stays_within_the_safe_integers(world: World) -> None:
    now = await world.start()
    _, grant = await held(world)
    longest = MAX_SAFE_INTEGER - now
    async with unchanged(world):
        assert await world.store.renew([grant.lease], longest + 1, world.revisions) == [(Code.INVALID, 0)]
    assert await world.store.renew([grant.lease], longest, world.revisions) == [
        (Code.RENEWED, MAX_SAFE_INTEGER)
    ]


@pytest.mark.requirement("RT-OWN-11")
async def test_release_behind_a_closed_gate_costs_no_claim(world: World) -> None:
    now = await world.start()
    new, grant = await held(world, open_gate=False)
    await world.at(now + 10)
    assert (await world.store.release(grant.lease, world.revisions)).code is Code.OK
    branch = await branch_of(world, new)
    assert (branch.status, branch.gate, branch.claims, branch.until_ms) == ("pending", "closed", 0, now + 10)
    assert await world.reads.due(now + 10, 10) == [(new.operation_id, now + 10)]


@pytest.mark.requirement("RT-OWN-11")
async def test_release_behind_an_open_gate_keeps_the_claim_and_votes_for_nothing(world: World) -> None:
    now = await world.start()
    new, grant = await held(world)
    assert (await world.store.release(grant.lease, world.revisions)).code is Code.OK
    op = await world.load(new)
    branch = op.branches[0]
    assert (branch.status, branch.gate, branch.claims, branch.until_ms) == ("pending", "open", 1, now)
    assert (op.phase, op.decision, dict(op.answers)) == ("admitted", None, {})


async def test_claims_given_back_never_fall_below_none(world: World) -> None:
    new, grant = await held(world, open_gate=False)
    await reword(world, new, claims=0)
    await world.store.release(grant.lease, world.revisions)
    assert (await branch_of(world, new)).claims == 0


async def test_release_never_delays_a_wake_up(world: World) -> None:
    now = await world.start()
    new, grant = await held(world)
    await world.connection.call("ZADD", world.keys.due, now - 5, new.operation_id)
    await world.store.release(grant.lease, world.revisions)
    assert await world.reads.due(now, 10) == [(new.operation_id, now - 5)]


@EVERY
@pytest.mark.requirement("RT-STORE-06")
async def test_no_lease_verb_moves_the_revision(world: World, verb: str) -> None:
    lease = await fresh(world, verb)
    assert code_of(await VERBS[verb](world, lease)) is DONE.get(verb, Code.OK)
    assert (await world.load(world.command())).revision == "1"


async def test_an_answered_branch_is_still_its_holders_alone(world: World) -> None:
    _, grant = await answered(world)
    other_holder = msgspec.structs.replace(grant.lease, holder="h2")
    assert await world.store.renew([other_holder], 1000, world.revisions) == [(Code.NOT_OWNER, 0)]


@pytest.mark.requirement("RT-DUR-06")
@pytest.mark.parametrize("verb", ["open", "release", "answer"])
async def test_due_of_another_type_refuses_the_whole_step(world: World, verb: str) -> None:
    lease = await fresh(world, verb)
    await world.connection.call("DEL", world.keys.due)
    await world.connection.call("SET", world.keys.due, "junk")
    async with unchanged(world):
        with pytest.raises(ReplyError) as refused:
            await VERBS[verb](world, lease)
        assert refused.value.code == "WRONGTYPE"
