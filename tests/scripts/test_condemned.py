"""A store copy that may not be served, condemned in one step for everybody; and the clock taken as true."""

from __future__ import annotations

import pytest
import redis

from shared.store.codes import Code
from shared.store.continuity import STANDING_FIELDS, Progress, Standing, read_standing
from shared.store.replies import Reply, StoreRefusal, TenantLost
from shared.store.wake import EVERYBODY, GIVEN_UP
from tests.scripts.scenes import RESULT, held, meta, unchanged
from tests.support.world import World, moved_scripts

WHY = "it is older"


async def run(world: World, verb: str, *more: str | int, authority: str | None = None) -> Reply:
    """One verb of the script, as the test's clock has it."""
    args = (verb, world.revisions.authority if authority is None else authority, *more)
    source = moved_scripts()["epoch"].source
    return Reply.of(await world.connection.call("EVAL", source, 1, world.keys.meta, *args))


async def standing(world: World) -> Standing:
    found = read_standing(await world.connection.call("HMGET", world.keys.meta, *STANDING_FIELDS))
    assert found is not None
    return found


def words(found: Standing, **changes: int) -> str:
    at = found.progress
    values = {"epoch": found.epoch, "clocks": at.clocks, "policy": at.policy, "directory": at.directory}
    return " ".join(str(value) for value in {**values, **changes}.values())


@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_condemned_copy_serves_nobody_and_says_why(world: World) -> None:
    new, grant = await held(world)
    now = await world.start()
    assert (await run(world, "condemn", "", "", WHY)).code is Code.OK
    row = await world.connection.call("HMGET", world.keys.meta, "authority", "lost")
    assert row == [b"lost:" + world.revisions.authority.encode(), f"{now} {WHY}".encode()]
    async with unchanged(world):
        for call in (world.admit(new), world.admit(world.command("c2")), world.answer(grant.lease, RESULT)):
            with pytest.raises(TenantLost):
                await call
        with pytest.raises(TenantLost):
            await world.reads.session("s1", world.revisions)
        assert (await run(world, "condemn", "", "", WHY)).code is Code.AUTHORITY_LOST
    assert read_standing(await world.connection.call("HMGET", world.keys.meta, *STANDING_FIELDS)) is None


@pytest.mark.requirement("DASPX-09")
async def test_everybody_who_waits_hears_of_it(world: World, raw: redis.Redis) -> None:
    await world.open()
    with raw.pubsub(ignore_subscribe_messages=True) as watching:  # type: ignore[no-untyped-call]
        watching.subscribe(world.keys.wake)
        watching.get_message(timeout=5)
        await run(world, "condemn", "", "", WHY)
        message = watching.get_message(timeout=5)
    assert message is not None
    assert message["data"] == f"{EVERYBODY} {GIVEN_UP}".encode()


@pytest.mark.requirement("RT-STORE-16")
@pytest.mark.parametrize("moved", ["epoch", "clocks", "policy", "directory"])
async def test_only_what_was_judged_is_condemned(world: World, moved: str) -> None:
    """Whoever judged one copy must not condemn the store that was put back in its place meanwhile."""
    await world.open()
    await run(world, "clock", "olga")
    found = await standing(world)
    now = {"epoch": found.epoch, **{f: getattr(found.progress, f) for f in ("clocks", "policy", "directory")}}
    async with unchanged(world):
        judged = words(found, **{moved: now[moved] - 1})
        assert (await run(world, "condemn", judged, "", WHY)).code is Code.CONFLICT
    assert (await run(world, "condemn", words(found), "", WHY)).code is Code.OK


@pytest.mark.requirement("RT-STORE-16")
async def test_a_copy_that_lacks_one_commit_is_condemned_while_it_lacks_it(world: World) -> None:
    await world.open()
    found = await standing(world)
    last = found.progress.last_ms
    async with unchanged(world):
        assert (await run(world, "condemn", words(found), last, WHY)).code is Code.CONFLICT
    assert (await run(world, "condemn", words(found), last + 1, WHY)).code is Code.OK


@pytest.mark.requirement("DASP-CORE-012g")
async def test_another_authoritys_store_is_neither_condemned_nor_made(world: World) -> None:
    await world.open()
    async with unchanged(world):
        for verb, more in (("condemn", ("", "", WHY)), ("clock", ("olga",))):
            assert (await run(world, verb, *more, authority="f" * 32)).code is Code.AUTHORITY_LOST
        assert (await run(world, "dance")).code is Code.INVALID
    await world.connection.call("DEL", world.keys.meta)
    async with unchanged(world):
        for verb, more in (("condemn", ("", "", WHY)), ("clock", ("olga",))):
            assert (await run(world, verb, *more)).code is Code.AUTHORITY_LOST


@pytest.mark.requirement("RT-GUARD-17")
async def test_an_accepted_clock_is_counted_and_noted(world: World) -> None:
    start = await world.start()
    await world.open()
    for count, now in enumerate((start - 5_000, start - 7_000), 1):
        await world.at(now)
        reply = await run(world, "clock", "olga")
        assert (reply.code, reply.now_ms) == (Code.OK, now)
        row = await world.connection.call("HMGET", world.keys.meta, "last_ms", "clocks", "clock_accepted")
        assert row == [b"%d" % now, b"%d" % count, b"%d olga" % now]


@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_new_epoch_keeps_what_the_store_had_when_it_began(world: World) -> None:
    """Whoever knows more than that knows that the epoch was given to an older copy."""
    await world.open()
    await run(world, "clock", "olga")
    before = await standing(world)
    reply = await world.store.raise_epoch(
        world.revisions.authority, before.replid, before.replid, "process-restart"
    )
    assert reply.code is Code.OK
    assert (await world.open("s2")).code is Code.OK
    after = await standing(world)
    assert after.epoch == before.epoch + 1
    assert after.since == before.progress
    assert after.since.clocks == 1
    assert after.progress.last_ms >= before.progress.last_ms


@pytest.mark.requirement("KEYX-24", "RT-STORE-15")
@pytest.mark.parametrize("field", ["epoch", "policy_rev", "dir_rev", "last_ms", "since"])
async def test_a_record_that_cannot_be_read_is_not_absence(world: World, field: str) -> None:
    await meta(world, **{field: "what?"})
    row = await world.connection.call("HMGET", world.keys.meta, *STANDING_FIELDS)
    with pytest.raises(StoreRefusal) as refused:
        read_standing(row)
    assert not isinstance(refused.value, TenantLost)


def test_a_progress_of_another_length_is_no_progress() -> None:
    row = [b"a", b"r", b"b", b"1", b"0", b"1", b"1", b"1", b"1 2 3", None]
    with pytest.raises(StoreRefusal):
        read_standing(row)
    row[8] = b"1 2 3 4"
    found = read_standing(row)
    assert found is not None
    assert found.since == Progress(1, 2, 3, 4)
