"""The checks that open every script: authority, epoch, policy, clock; and the hint that ends every change."""

from __future__ import annotations

import msgspec
import pytest
import redis

from shared.domain.guard import MAX_SAFE_INTEGER
from shared.store.codes import Code
from shared.store.connection import ReplyError
from shared.store.replies import ClockRefusal, TenantLost
from tests.scripts.scenes import CALLS, DONE, code_of, intercepted, meta, unchanged
from tests.support.world import World

EVERY = pytest.mark.parametrize("verb", CALLS)
UNGUARDED = {"lookup"}
EVIDENCE = {"answer", "release"}


@EVERY
@pytest.mark.requirement("DASP-CORE-012g", "RT-STORE-15")
async def test_another_authority_refuses_everything(world: World, verb: str) -> None:
    call = await CALLS[verb](world)
    mine = world.revisions
    world.revisions = msgspec.structs.replace(mine, authority="f" * 32)
    async with unchanged(world):
        with pytest.raises(TenantLost):
            await call()
    world.revisions = mine
    assert code_of(await call()) is DONE.get(verb, Code.OK)


@EVERY
@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_tenant_without_its_meta_is_lost_and_not_a_new_one(world: World, verb: str) -> None:
    call = await CALLS[verb](world)
    await world.connection.call("DEL", world.keys.meta)
    async with unchanged(world):
        with pytest.raises(TenantLost):
            await call()


@EVERY
async def test_another_replication_id_raises_the_epoch_before_anything_is_done(
    world: World, verb: str
) -> None:
    call = await CALLS[verb](world)
    await meta(world, replid="0" * 40)
    assert code_of(await call()) is DONE.get(verb, Code.OK)
    assert world.epochs_moved == 1
    assert await world.connection.call("HGET", world.keys.meta, "epoch") == b"2"


@EVERY
@pytest.mark.requirement("RT-AUTH-08", "RT-STORE-15")
async def test_a_moved_policy_is_a_stale_snapshot_except_for_evidence(world: World, verb: str) -> None:
    call = await CALLS[verb](world)
    await meta(world, policy_rev="2")
    if verb in EVIDENCE:
        assert code_of(await call()) is Code.OK
        return
    async with unchanged(world):
        outcome = await call()
        assert code_of(outcome) is Code.STALE_SNAPSHOT
    world.revisions = msgspec.structs.replace(world.revisions, policy="2")
    assert code_of(await call()) is DONE.get(verb, Code.OK)


@EVERY
@pytest.mark.requirement("RT-GUARD-17")
async def test_a_clock_gone_back_stops_transitions_and_leaves_reads(world: World, verb: str) -> None:
    now = await world.start()
    call = await CALLS[verb](world)
    await meta(world, last_ms=now + 251)
    async with unchanged(world):
        if verb in UNGUARDED:
            assert code_of(await call()) is DONE[verb]
            return
        with pytest.raises(ClockRefusal) as refused:
            await call()
        assert "251 ms" in str(refused.value.description)
        assert await world.reads.session("s1", world.revisions) is not None or verb == "open_session"
    await meta(world, last_ms=now)
    assert code_of(await call()) is DONE.get(verb, Code.OK)


@EVERY
@pytest.mark.requirement("RT-GUARD-03", "RT-GUARD-18")
async def test_every_change_commits_at_the_instant_its_guard_saw(world: World, verb: str) -> None:
    """Boundaries: the instant of the last commit is not a rollback; each commit becomes the last one."""
    now = await world.start()
    call = await CALLS[verb](world)
    last = int(await world.connection.call("HGET", world.keys.meta, "last_ms"))
    assert last == now
    await world.at(now + 7)
    assert code_of(await call()) is DONE.get(verb, Code.OK)
    last = int(await world.connection.call("HGET", world.keys.meta, "last_ms"))
    assert last == (now if verb in {"lookup", "cursor"} else now + 7)


@EVERY
@pytest.mark.requirement("RT-GUARD-05", "RT-GUARD-06", "RT-GUARD-09")
@pytest.mark.parametrize("bound", ["now", "zero", "unsafe"])
async def test_the_upper_bound_is_exclusive_positive_and_safe(world: World, verb: str, bound: str) -> None:
    now = await world.start()
    call = await CALLS[verb](world)
    until = {"now": now, "zero": 0, "unsafe": MAX_SAFE_INTEGER + 1}[bound]
    world.clock.bound = until
    if verb in UNGUARDED:
        assert code_of(await call()) is DONE[verb]
        return
    async with unchanged(world):
        assert code_of(await call()) is (Code.OUTSIDE_WINDOW if bound == "now" else Code.INVALID)
    world.clock.bound = now + 1
    assert code_of(await call()) is DONE.get(verb, Code.OK)


@pytest.mark.requirement("RT-GUARD-01")
@pytest.mark.parametrize("bound", ["not before", "not after"])
@pytest.mark.parametrize("verb", ["admit", "replace"])
async def test_a_bound_that_is_no_number_is_invalid(world: World, verb: str, bound: str) -> None:
    call = await CALLS[verb](world)
    name, keys, args = await intercepted(world, call)
    broken = list(args)
    broken[3 if bound == "not before" else 4] = ""
    async with unchanged(world):
        reply = await world.store.run(name, keys, broken, world.revisions.authority)
    assert (reply.code, reply.text(0)) == (Code.INVALID, "guard")
    assert (await world.store.run(name, keys, args, world.revisions.authority)).code is Code.OK


HINTS = {
    "admit": ["s:s1"],
    "release": ["o:"],
    "answer": ["o:"],
    "replace": ["o:", "s:s1"],
    "close": ["s:s1"],
    "turn": ["s:s1"],
    "purge": ["s:s1"],
}


@EVERY
async def test_changes_that_others_wait_for_wake_them(world: World, verb: str, raw: redis.Redis) -> None:
    call = await CALLS[verb](world)
    with raw.pubsub(ignore_subscribe_messages=True) as watching:  # type: ignore[no-untyped-call]
        watching.subscribe(world.keys.wake)
        watching.get_message(timeout=5)
        await call()
        raw.publish(world.keys.wake, "end")
        heard: list[str] = []
        while not heard or heard[-1] != "end":
            message = watching.get_message(timeout=5)
            assert message is not None, f"only {heard} was heard"
            heard.append(message["data"].decode())
    words = " ".join(heard[:-1]).split()
    wanted = HINTS.get(verb, [])
    assert len(words) == len(wanted)
    for word, start in zip(words, wanted, strict=True):
        assert word.startswith(start)


@pytest.mark.parametrize("script", ["lease", "session"])
async def test_an_unknown_verb_is_refused(world: World, script: str) -> None:
    call = await CALLS["close" if script == "session" else "answer"](world)
    async with unchanged(world):
        name, keys, args = await intercepted(world, call)
        assert name == script
        reply = await world.store.run(script, keys, ["dance", *args[1:]], world.revisions.authority)
        assert (reply.code, reply.text(0)) == (Code.INVALID, "verb")


@pytest.mark.requirement("RT-STORE-15")
@EVERY
async def test_a_meta_of_another_type_is_an_error_and_changes_nothing(world: World, verb: str) -> None:
    call = await CALLS[verb](world)
    await world.connection.call("DEL", world.keys.meta)
    await world.connection.call("SET", world.keys.meta, "junk")
    async with unchanged(world):
        with pytest.raises(ReplyError) as refused:
            await call()
        assert refused.value.code == "WRONGTYPE"
