"""What administration changes, and the revision that moves with it: one step, or nothing."""

from __future__ import annotations

import asyncio

import pytest

from shared.store.codes import Code
from shared.store.connection import Connection, ReplyError, evalsha
from shared.store.replies import Reply
from tests.scripts.scenes import meta, unchanged
from tests.support.world import World, moved_scripts

AUTHORITY_LOST = Code.AUTHORITY_LOST


async def change(
    world: World,
    mode: str = "put",
    value: str = "v1",
    *,
    field: str = "f",
    counter: str = "policy_rev",
    expected: str = "",
    wake: str = "",
    by: str = "",
    key: bytes = b"",
) -> Reply:
    keys = [world.keys.meta, key or world.keys.policy]
    args = (world.revisions.authority, counter, mode, field, value, expected, wake, by)
    return Reply.of(await evalsha(world.connection, moved_scripts()["registry"], keys, args))


async def revision(world: World, counter: str = "policy_rev") -> str:
    return str((await world.connection.call("HGET", world.keys.meta, counter)).decode())


async def fields(world: World) -> dict[str, str]:
    flat = await world.connection.call("HGETALL", world.keys.policy)
    return {k.decode(): v.decode() for k, v in zip(flat[::2], flat[1::2], strict=True)}


@pytest.mark.parametrize("counter", ["policy_rev", "dir_rev"])
@pytest.mark.parametrize("mode", ["put", "new"])
async def test_a_change_moves_its_own_revision_and_no_other(world: World, counter: str, mode: str) -> None:
    before = {name: int(await revision(world, name)) for name in ("policy_rev", "dir_rev")}
    reply = await change(world, mode, counter=counter)
    after = {name: int(await revision(world, name)) for name in before}
    assert (reply.code, reply.text(0)) == (Code.OK, str(before[counter] + 1))
    assert after == {**before, counter: before[counter] + 1}
    assert await fields(world) == {"f": "v1"}


async def test_a_change_that_no_revision_covers_moves_none(world: World) -> None:
    before = await world.connection.call("HGETALL", world.keys.meta)
    reply = await change(world, "new", counter="")
    assert (reply.code, reply.text(0)) == (Code.OK, "")
    assert await fields(world) == {"f": "v1"}
    assert await world.connection.call("HGETALL", world.keys.meta) == before


@pytest.mark.parametrize("mode", ["put", "new"])
async def test_the_same_again_is_a_duplicate_and_moves_nothing(world: World, mode: str) -> None:
    first = await change(world, mode, by="alice")
    async with unchanged(world):
        again = await change(world, mode, by="bob", expected="1")
    assert (again.code, again.text(0)) == (Code.DUPLICATE, first.text(0))


async def test_a_put_replaces_and_a_new_one_does_not(world: World) -> None:
    await change(world)
    async with unchanged(world):
        reply = await change(world, "new", "v2")
    assert (reply.code, reply.text(0)) == (Code.CONFLICT, "2")
    assert (await change(world, "put", "v2")).code is Code.OK
    assert (await fields(world), await revision(world)) == ({"f": "v2"}, "3")


async def test_what_is_removed_is_gone_once(world: World) -> None:
    await change(world, field="other")
    await change(world)
    reply = await change(world, "remove", "")
    assert (reply.code, reply.text(0)) == (Code.OK, "4")
    assert await fields(world) == {"other": "v1"}
    async with unchanged(world):
        assert (await change(world, "remove", "")).code is Code.NOT_FOUND


async def test_removing_names_a_field_and_not_its_value(world: World) -> None:
    await change(world)
    assert (await change(world, "remove", "v1")).code is Code.OK
    assert await fields(world) == {}


@pytest.mark.parametrize("mode", ["put", "new", "remove"])
async def test_a_change_that_builds_on_another_revision_is_a_conflict(world: World, mode: str) -> None:
    if mode == "remove":
        await change(world)
    present = await revision(world)
    async with unchanged(world):
        reply = await change(world, mode, "v2", expected="17")
    assert (reply.code, reply.text(0)) == (Code.CONFLICT, present)
    assert (await change(world, mode, "v2", expected=present)).code is Code.OK


async def test_of_racing_changes_that_build_on_one_revision_one_wins(world: World, redis_url: str) -> None:
    present = await revision(world)
    replies = await asyncio.gather(
        *(change(world, "put", f"v{n}", field="document", expected=present) for n in range(16))
    )
    codes = [reply.code for reply in replies]
    assert (codes.count(Code.OK), codes.count(Code.CONFLICT)) == (1, 15)
    assert await revision(world) == str(int(present) + 1)


@pytest.mark.requirement("DASP-CORE-012g")
@pytest.mark.parametrize("mode", ["put", "new", "remove"])
async def test_a_lost_tenant_is_not_made_again(world: World, mode: str) -> None:
    await change(world)
    await world.connection.call("DEL", world.keys.meta)
    async with unchanged(world):
        assert (await change(world, mode, "v2")).code is AUTHORITY_LOST
    assert await world.connection.call("EXISTS", world.keys.meta) == 0


@pytest.mark.requirement("DASP-CORE-012g")
async def test_another_authoritys_registry_is_left_alone(world: World) -> None:
    await meta(world, authority="f" * 32)
    async with unchanged(world):
        assert (await change(world)).code is AUTHORITY_LOST


async def test_who_and_when_are_noted_beside_a_change(world: World) -> None:
    await world.at(1_796_025_679_851)
    await change(world, by="cli")
    assert await fields(world) == {"f": "v1", "appliedAtMs": "1796025679851", "appliedBy": "cli"}
    await change(world, "put", "v2", field="g")
    assert (await fields(world))["appliedBy"] == "cli"


async def test_a_change_wakes_with_its_message_and_only_when_it_happens(world: World, redis_url: str) -> None:
    """The receivers are counted by the store: PUBLISH is part of what the script did."""
    async with Connection(redis_url) as other:
        heard = await _published(world, other, wake="!")
        assert heard == 1
        assert await _published(world, other, wake="!") == 0, "a duplicate moves nothing"
        assert await _published(world, other, value="v2") == 0, "nobody asked for a hint"


async def _published(world: World, other: Connection, value: str = "v1", wake: str = "") -> int:
    """How many messages a change publishes, as the store itself counts PUBLISH calls."""

    async def calls() -> int:
        stats = (await other.call("INFO", "commandstats")).decode()
        lines = [line for line in stats.splitlines() if line.startswith("cmdstat_publish:calls=")]
        return int(lines[0].split("=")[1].split(",")[0]) if lines else 0

    before = await calls()
    await change(world, "put", value, wake=wake)
    return await calls() - before


async def test_a_key_of_another_type_refuses_before_anything_is_written(world: World) -> None:
    await world.connection.call("SET", world.keys.policy, "no hash")
    async with unchanged(world):
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            await change(world)
