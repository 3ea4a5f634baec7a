"""The assertions of replace about a branch: what was loaded still holds, and a lease stays its holder's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.domain.decide import Assertion, BranchChange, Change
from shared.domain.decide.change import Words
from shared.domain.records import Branch, Operation
from shared.store.codes import Code
from shared.store.replies import Reply
from tests.scripts.scenes import (
    RESULT,
    answered,
    branch_of,
    held,
    intercepted,
    offered,
    outbox_ids,
    reword,
    unchanged,
)
from tests.support.world import World


def one(words: str, assertion: Assertion = "same", **changes: Any) -> Change:
    return Change(phase="active", branches=(BranchChange(0, assertion, words, **changes),))


def taken(op: Operation, **changes: Any) -> Change:
    """Take the lease from its holder and offer the attempt again."""
    branch = op.branches[0]
    words = Words(branch).offered(
        peer=branch.peer, attempt=branch.attempt, fence=branch.fence + 1, claims=1, claim_timeout_ms=1000
    )
    return one(words, send_to=branch.peer, **changes)


async def refused(world: World, op: Operation, change: Change, *values: str) -> None:
    async with unchanged(world):
        reply = await world.commit(op, change)
    assert reply.code is Code.ASSERTION
    assert (reply.text(0), reply.text(1)) == (*values, "0")


OTHER_WORDS: dict[str, Any] = {
    "peer": "bravo",
    "attempt": 2,
    "epoch": 2,
    "fence": 2,
    "holder": "h2",
    "gate": "closed",
    "claims": 2,
    "next_ms": 5,
    "outbox": "1-1",
    "digest": "x",
}


@pytest.mark.requirement("RT-STORE-04", "RT-STORE-13")
@pytest.mark.parametrize("word", OTHER_WORDS)
async def test_same_is_everything_but_the_end_of_the_lease(world: World, word: str) -> None:
    new, grant = await held(world)
    op = await world.load(new)
    await reword(world, new, **{word: OTHER_WORDS[word]})
    await world.at(grant.until_ms)
    await refused(world, op, taken(op), "same")


async def test_a_renewal_since_loading_is_no_reason_to_refuse_what_does_not_need_expiry(world: World) -> None:
    new, grant = await held(world)
    op = await world.load(new)
    await world.store.renew([grant.lease], 5000, world.revisions)
    assert (await world.commit(op, one(Words(op.branches[0]).ended("failure")))).code is Code.OK


@pytest.mark.requirement("RT-OWN-05", "RT-GUARD-18", "RT-GUARD-04")
@pytest.mark.parametrize(("offset", "refusal"), [(-1, "expired"), (0, None)])
async def test_a_lease_is_taken_from_its_end_on(world: World, offset: int, refusal: str | None) -> None:
    await world.start()
    new, grant = await held(world)
    op = await world.load(new)
    await world.at(grant.until_ms + offset)
    if refusal:
        await refused(world, op, taken(op, expired=True), refusal)
    else:
        assert (await world.commit(op, taken(op, expired=True))).code is Code.OK


@pytest.mark.requirement("RT-OWN-04", "RT-GUARD-18")
@pytest.mark.case(48)
async def test_a_lease_that_was_renewed_since_loading_is_not_taken(world: World) -> None:
    """Case 48: whoever decided from an older end is refused by the stored one."""
    await world.start()
    new, grant = await held(world)
    op = await world.load(new)
    await world.at(grant.until_ms - 1)
    await world.store.renew([grant.lease], 1000, world.revisions)
    await world.at(grant.until_ms)
    await refused(world, op, taken(op, expired=True), "expired")


# live: for folding


@pytest.mark.requirement("RT-RES-06", "RT-STORE-04")
@pytest.mark.parametrize("word", ["epoch", "fence", "holder"])
async def test_live_is_the_same_grant(world: World, word: str) -> None:
    new, _ = await answered(world)
    op = await world.load(new)
    await reword(world, new, **{word: OTHER_WORDS[word]})
    words = Words(await branch_of(world, new)).ended("success")
    await refused(world, op, one(words, "live"), "live")


@pytest.mark.requirement("RT-RES-08")
@pytest.mark.parametrize("stored", [True, False])
async def test_live_is_answered_or_unexpired(world: World, stored: bool) -> None:
    await world.start()
    new, grant = await (answered(world) if stored else held(world))
    op = await world.load(new)
    change = one(Words(op.branches[0]).ended("success"), "live")
    await world.at(grant.until_ms)
    if stored:
        assert (await world.commit(op, change)).code is Code.OK
        return
    await refused(world, op, change, "live")
    await world.at(grant.until_ms - 1)
    assert (await world.commit(op, change)).code is Code.OK


@pytest.mark.requirement("RT-RES-08")
async def test_live_does_not_mind_an_answer_since_loading(world: World) -> None:
    new, grant = await held(world)
    op = await world.load(new)
    await world.answer(grant.lease, RESULT)
    words = Words(await branch_of(world, new)).ended("success")
    assert (await world.commit(op, one(words, "live"))).code is Code.OK


# What the new words may be


@pytest.mark.requirement("RT-OWN-02")
@pytest.mark.parametrize("word", ["fence", "attempt", "epoch"])
async def test_neither_fence_nor_attempt_nor_epoch_falls(world: World, word: str) -> None:
    new = await offered(world)
    await reword(world, new, fence=2, attempt=2, epoch=2)
    op = await world.load(new)
    changed = msgspec.structs.replace(op.branches[0], **{"fence": 3, "outbox": None, word: 1})
    await refused(world, op, one(changed.words()), "fence")
    fine = msgspec.structs.replace(op.branches[0], fence=3, outbox=None)
    assert (await world.commit(op, one(fine.words()))).code is Code.OK


UNDER_THE_SAME_FENCE: dict[str, dict[str, Any]] = {
    "attempt": {"attempt": 2},
    "holder taken": {"holder": None},
    "holder given": {"holder": "h2"},
    "gate closed": {"gate": "closed"},
    "gate answered": {"gate": "answered"},
    "answered": {"digest": "x"},
    "offered": {"outbox": "@"},
}


@pytest.mark.requirement("RT-OWN-02", "RT-OWN-03", "RT-OWN-08")
@pytest.mark.parametrize("changes", UNDER_THE_SAME_FENCE.values(), ids=UNDER_THE_SAME_FENCE)
async def test_only_a_new_fence_changes_the_grant(world: World, changes: dict[str, Any]) -> None:
    new, _ = await held(world)
    op = await world.load(new)
    words = msgspec.structs.replace(op.branches[0], **{"outbox": "=", **changes}).words()
    await refused(world, op, one(words, send_to="alfa" if changes.get("outbox") == "@" else None), "grant")


UNDER_A_NEW_FENCE: dict[str, dict[str, Any]] = {
    "with a holder": {"holder": "h2"},
    "with its holder": {"holder": "h1"},
    "open": {"gate": "open"},
    "answered": {"gate": "answered"},
    "with a digest": {"digest": "x"},
}


@pytest.mark.requirement("RT-OWN-03", "RT-OWN-02")
@pytest.mark.parametrize("changes", UNDER_A_NEW_FENCE.values(), ids=UNDER_A_NEW_FENCE)
async def test_a_new_fence_is_granted_by_claim_alone(world: World, changes: dict[str, Any]) -> None:
    new, _ = await held(world)
    op = await world.load(new)
    free: dict[str, Any] = {"fence": 2, "holder": None, "gate": "closed", "outbox": None, "digest": None}
    words = msgspec.structs.replace(op.branches[0], **{**free, **changes}).words()
    await refused(world, op, one(words), "grant")


@pytest.mark.parametrize(
    "words",
    [
        "pending alfa 1 1 2 - 0 closed 0 0 -",
        "pending alfa 1 1 2 - 0 closed 0 0 - - -",
        "pending alfa one 1 2 - 0 closed 0 0 - -",
        "pending alfa 1 1 2 - soon closed 0 0 - -",
        "pending alfa 1 1 2 - 0 closed 0 0 1-1 -",
        "lost alfa 1 1 2 - 0 closed 0 0 - -",
        "",
    ],
)
async def test_words_that_are_no_branch_are_refused(world: World, words: str) -> None:
    op = await world.load(await offered(world))
    loaded = msgspec.structs.replace(op, words=op.words)
    change = BranchChange(0, "same", words)
    async with unchanged(world):
        reply = await _commit_words(world, loaded, change)
    assert (reply.code, reply.text(0)) == (Code.ASSERTION, "words")


async def _commit_words(world: World, op: Operation, change: BranchChange) -> Reply:
    """Past the typed method's own reading of the attempt."""
    stand_in = msgspec.structs.replace(change, words="pending alfa 1 x")
    keys, args = await _sent(world, op, one(stand_in.words))
    args[args.index(stand_in.words)] = change.words
    return await world.store.run("replace", keys, args, world.revisions.authority)


async def _sent(world: World, op: Operation, change: Change) -> tuple[list[bytes], list[Any]]:
    _, keys, args = await intercepted(world, lambda: world.commit(op, change))
    return list(keys), list(args)


@pytest.mark.requirement("RT-SEL-06")
async def test_there_is_no_fence_zero(world: World) -> None:
    """Neither in a stored record, nor in what replaces one, nor in the identity of a lease."""
    new, grant = await held(world)
    op = await world.load(new)
    none = msgspec.structs.replace(op.branches[0], fence=0, outbox=None)
    with pytest.raises(ValueError, match="start at 1"):
        Branch.parse(none.words())
    await refused(world, op, one(none.words()), "fence")
    lease = msgspec.structs.replace(grant.lease, fence="0")
    async with unchanged(world):
        assert (await world.answer(lease, RESULT)).code is Code.STALE_FENCE
        assert (await world.store.open_gate(lease, world.revisions)).code is Code.STALE_FENCE


async def test_a_branch_changes_once_in_one_change(world: World) -> None:
    op = await world.load(await offered(world))
    change = taken(op)
    async with unchanged(world):
        reply = await world.commit(op, msgspec.structs.replace(change, branches=change.branches * 2))
    assert (reply.code, reply.text(0)) == (Code.INVALID, "branches")


@pytest.mark.parametrize("what", ["withdraw", "send"])
async def test_an_offer_is_withdrawn_from_and_sent_to_a_named_outbox(world: World, what: str) -> None:
    new = await offered(world)
    op = await world.load(new)
    change = taken(op)
    if what == "withdraw":
        op = msgspec.structs.replace(op, branches=(msgspec.structs.replace(op.branches[0], outbox=None),))
    else:
        change = msgspec.structs.replace(
            change, branches=(msgspec.structs.replace(change.branches[0], send_to=None),)
        )
    async with unchanged(world):
        reply = await world.commit(op, change)
    assert (reply.code, reply.text(0)) == (Code.INVALID, "outbox")


async def test_an_offer_that_stays_needs_no_outbox(world: World) -> None:
    op = await world.load(await offered(world))
    unnamed = msgspec.structs.replace(op, branches=(msgspec.structs.replace(op.branches[0], outbox=None),))
    words = msgspec.structs.replace(op.branches[0], outbox="=").words()
    assert (await world.commit(unnamed, one(words))).code is Code.OK


@pytest.mark.parametrize("stored", [None, "pending alfa"])
async def test_a_branch_that_is_missing_or_unreadable_is_not_changed(
    world: World, stored: str | None
) -> None:
    op = await world.load(await offered(world))
    key = world.keys.op(op.id)
    await world.connection.call(*(("HDEL", key, "b:0") if stored is None else ("HSET", key, "b:0", stored)))
    await refused(world, op, taken(op), "status")


# What becomes of the words


@pytest.mark.requirement("RT-STORE-13", "RT-OWN-08", "RT-OUT-01")
@pytest.mark.case(42)
async def test_a_new_offer_replaces_the_old_one_in_one_step(world: World) -> None:
    """Case 42: the former request is acknowledged and gone when the next one is there."""
    now = await world.start()
    new, grant = await held(world)
    await world.connection.call(
        "XREADGROUP", "GROUP", "work", "me", "COUNT", 1, "STREAMS", world.keys.outbox("alfa"), ">"
    )
    op = await world.load(new)
    await world.at(grant.until_ms)
    assert (await world.commit(op, taken(op, expired=True))).code is Code.OK
    (entry,) = await outbox_ids(world)
    assert entry != op.branches[0].outbox
    assert (await world.connection.call("XPENDING", world.keys.outbox("alfa"), "work"))[0] == 0
    branch = await branch_of(world, new)
    assert (branch.outbox, branch.fence, branch.holder) == (entry, 2, None)
    assert (branch.gate, branch.until_ms, branch.claims) == ("closed", now + 2000, 1)


@pytest.mark.requirement("RT-OWN-09", "RT-OUT-01", "RT-STORE-13")
async def test_a_waiting_attempt_is_withdrawn_and_told_when_it_may_be_offered(world: World) -> None:
    now = await world.start()
    new, _ = await held(world)
    op = await world.load(new)
    await world.commit(op, one(Words(op.branches[0]).waiting(peer="bravo", backoff_ms=70)))
    branch = await branch_of(world, new)
    assert (branch.peer, branch.attempt, branch.fence, branch.next_ms) == ("bravo", 2, 2, now + 70)
    assert (branch.outbox, branch.digest, branch.gate, branch.holder) == (None, None, "closed", None)
    assert await outbox_ids(world) == []


async def test_ending_keeps_the_grant_as_evidence(world: World) -> None:
    new, grant = await answered(world)
    op = await world.load(new)
    await world.commit(op, one(Words(op.branches[0]).ended("success")))
    assert await branch_of(world, new) == msgspec.structs.replace(op.branches[0], status="success", next_ms=0)
    assert grant.lease.holder == op.branches[0].holder


async def test_an_offer_that_is_kept_stays_where_it_is(world: World) -> None:
    new, _ = await held(world)
    op = await world.load(new)
    words = msgspec.structs.replace(op.branches[0], claims=7, outbox="=").words()
    assert (await world.commit(op, one(words))).code is Code.OK
    assert await outbox_ids(world) == [op.branches[0].outbox]
    assert (await branch_of(world, new)).outbox == op.branches[0].outbox


async def test_a_change_to_a_later_branch_is_told_by_its_index(world: World) -> None:
    new = world.invocation()
    await world.admit(new)
    raw = await world.connection.call("HGET", world.keys.op(new.operation_id), "b:1")
    op = await world.reads.operation(new.operation_id, "")
    assert op is not None
    second = Branch.parse(raw.decode())
    op = msgspec.structs.replace(op, words=(*op.words, raw.decode()), branches=(*op.branches, second))
    words = Words(second).offered(peer="bravo", attempt=1, fence=2, claims=0, claim_timeout_ms=9)
    change = Change(phase="active", branches=(BranchChange(1, "same", words, send_to="bravo"),))
    assert (await world.commit(op, change)).code is Code.OK
    assert (await branch_of(world, new, 0)) == op.branches[0]
    assert (await branch_of(world, new, 1)).fence == 2
    (entry,) = await world.connection.call("XRANGE", world.keys.outbox("bravo"), "-", "+")
    assert dict(zip(entry[1][::2], entry[1][1::2], strict=True))[b"b"] == b"1"
    op = msgspec.structs.replace(op, revision="2")
    async with unchanged(world):
        reply = await world.commit(op, change)
    assert (reply.code, reply.text(0), reply.text(1)) == (Code.ASSERTION, "same", "1")
