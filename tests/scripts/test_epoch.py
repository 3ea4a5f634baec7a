"""A server that comes back: the same one raises the epoch once, any other loses the tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.store.address import Address
from shared.store.codes import Code
from shared.store.connection import Connection, ReplyError
from shared.store.embedded import EmbeddedStore
from shared.store.inspection import Boundary, inspect
from shared.store.replies import Grant, StoreRefusal, TenantLost
from shared.store.runtime import Runtime, lost_by_restart
from shared.store.scripts import TenantStore
from tests.scripts.scenes import RESULT, code_of, held, meta, offered, outcomes, unchanged
from tests.support.polling import wait_until
from tests.support.world import TENANT, BelievingClock, World, moved_scripts


def served_by(world: World, runtime: Runtime) -> World:
    """The same tenant seen by another process: its own connection, the runtime's judgement of servers."""
    other = World(runtime.connection, world.revisions.authority)
    other.store = TenantStore(TENANT, runtime.connection, other.clock, runtime.accept_server, moved_scripts())
    return other


@asynccontextmanager
async def tenant_on(url: str, declared: Boundary | None = None) -> AsyncIterator[tuple[World, Runtime]]:
    async with Runtime(url, declared) as runtime:
        yield served_by(await World.create(runtime.connection), runtime), runtime


async def restart(store: EmbeddedStore, *runtimes: Runtime, end: Callable[[], None] | None = None) -> None:
    (end or store.kill)()
    store.start()
    await wait_until(lambda: not any(runtime.connection.connected for runtime in runtimes))


async def epoch(world: World) -> int:
    return int(await world.connection.call("HGET", world.keys.meta, "epoch"))


@pytest.mark.requirement("DASP-CORE-012c", "RT-OWN-02", "RT-GUARD-18")
async def test_the_same_server_restarted_is_a_new_epoch_and_keeps_every_promise(
    own_store: EmbeddedStore,
) -> None:
    async with tenant_on(own_store.url) as (world, runtime):
        new = await offered(world)
        grant = await world.granted(new, lease_ms=60_000)
        before = await world.dump()
        await restart(own_store, runtime)
        assert await world.dump() == before
        assert (await world.admit(new)).code is Code.DUPLICATE
        assert await epoch(world) == 2
        assert (await world.answer(grant.lease, RESULT)).code is Code.OK
        settled = await world.decide(new, grant.granted_ms)
        assert settled is not None
        assert settled.code is Code.OK
        assert len(await outcomes(world)) == 1
        later = await offered(world, "c2")
        again = await world.granted(later)
        assert (grant.lease.epoch, again.lease.epoch) == ("1", "2")


@pytest.mark.requirement("RT-OWN-02")
async def test_the_epoch_is_raised_once_however_many_find_out(own_store: EmbeddedStore) -> None:
    async with tenant_on(own_store.url) as (world, first), AsyncExitStack() as stack:
        new, _ = await held(world)
        others = [await stack.enter_async_context(Runtime(own_store.url)) for _ in range(3)]
        worlds = [world, *(served_by(world, runtime) for runtime in others)]
        await asyncio.gather(*(w.admit(new) for w in worlds))
        await restart(own_store, first, *others)
        replies = await asyncio.gather(*(w.admit(new) for w in worlds for _ in range(5)))
        assert {reply.code for reply in replies} == {Code.DUPLICATE}
        assert await epoch(world) == 2


@pytest.mark.parametrize("what", ["stored", "inspected"])
async def test_the_epoch_is_raised_for_the_server_that_was_inspected_only(world: World, what: str) -> None:
    await world.open()
    replid = (await world.connection.call("HGET", world.keys.meta, "replid")).decode()
    other = "0" * 40
    stored, inspected = (other, replid) if what == "stored" else (replid, other)
    async with unchanged(world):
        reply = await world.store.raise_epoch(world.revisions.authority, stored, inspected, "process-restart")
    assert (reply.code, reply.text(0)) == (Code.CONFLICT, "1")


@pytest.mark.requirement("DASP-CORE-012g")
async def test_the_epoch_of_another_authority_is_not_raised(world: World) -> None:
    replid = (await world.connection.call("HGET", world.keys.meta, "replid")).decode()
    async with unchanged(world):
        reply = await world.store.raise_epoch("f" * 32, replid, replid, "process-restart")
        assert reply.code is Code.AUTHORITY_LOST
    reply = await world.store.raise_epoch(world.revisions.authority, replid, replid, "power-loss")
    assert (reply.code, reply.text(0)) == (Code.OK, "2")
    row = await world.connection.call("HMGET", world.keys.meta, "epoch", "replid", "boundary")
    assert row == [b"2", replid.encode(), b"power-loss"]


@pytest.mark.requirement("DASP-CORE-012g", "DASP-CORE-012e")
async def test_a_restart_that_may_have_lost_writes_loses_the_tenant(tmp_path: Path) -> None:
    """``everysec`` loses acknowledged writes: what came back may be anything but everything."""
    with EmbeddedStore(tmp_path / "store", extra={"appendfsync": "everysec"}) as store:
        async with tenant_on(store.url) as (world, runtime):
            new, grant = await held(world)
            await restart(store, runtime, end=store.stop)
            async with unchanged(world):
                with pytest.raises(TenantLost):
                    await world.admit(new)
                with pytest.raises(TenantLost):
                    await world.answer(grant.lease, RESULT)


@pytest.mark.requirement("DASP-CORE-012g", "RT-STORE-18")
async def test_a_promotion_without_proof_loses_the_tenant(own_store: EmbeddedStore) -> None:
    """The server remembers whose replica it was; nothing proves that it had received every write."""
    async with tenant_on(own_store.url) as (world, _):
        new, grant = await held(world)
        await world.connection.call("REPLICAOF", "127.0.0.1", 1)
        await world.connection.call("REPLICAOF", "NO", "ONE")
        before = await world.dump()
        with pytest.raises(TenantLost) as lost:
            await world.admit(new)
        assert "promoted" in str(lost.value.description)
        # It is noted there: after another restart nothing else would tell that it ever was a replica.
        note = await world.connection.call("HMGET", world.keys.meta, "authority", "lost")
        assert note[0] == b"lost:" + world.revisions.authority.encode()
        assert b"promoted" in note[1]
        await restart(own_store)
        async with Runtime(own_store.url) as fresh:
            with pytest.raises(TenantLost):
                await fresh.tenant(TENANT)
        with pytest.raises(TenantLost):
            await world.answer(grant.lease, RESULT)
        after = await world.dump()
        assert {key for key in before if before[key] != after[key]} == {world.keys.meta}


@pytest.mark.requirement("RT-STORE-18")
async def test_a_replica_serves_no_transition(own_store: EmbeddedStore) -> None:
    async with tenant_on(own_store.url) as (world, runtime):
        _, grant = await held(world)
        await world.connection.call("REPLICAOF", "127.0.0.1", 1)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: world.admit(world.command("c2")),
            lambda: world.answer(grant.lease, RESULT),
            lambda: world.claim(world.command()),
        ]
        for call in calls:
            with pytest.raises(ReplyError) as refused:
                code_of(await call())
            assert refused.value.code == "READONLY"
        await runtime.refresh()
        assert "primary" in (await runtime.unready() or "")
        await meta_on_primary(world, replid="0" * 40)
        with pytest.raises(StoreRefusal):
            await world.store.lookup(world.command().operation_id, b"", "s1", world.revisions)


async def meta_on_primary(world: World, **fields: str) -> None:
    """What the record says of the server, changed while it is writable for a moment."""
    await world.connection.call("CONFIG", "SET", "replica-read-only", "no")
    await meta(world, **fields)
    await world.connection.call("CONFIG", "SET", "replica-read-only", "yes")


@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_server_restarted_empty_is_not_a_new_tenant(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "store", extra={"appendonly": "no"}) as store:
        async with tenant_on(store.url) as (world, runtime):
            new, grant = await held(world)
            await restart(store, runtime)
            with pytest.raises(TenantLost):
                await world.admit(new)
            with pytest.raises(TenantLost):
                await world.answer(grant.lease, RESULT)
            assert await world.connection.call("DBSIZE") == 0


async def test_a_server_that_changes_under_every_call_is_given_up(world: World) -> None:
    async def changes_again(store: TenantStore, authority: str) -> None:
        world.epochs_moved += 1

    await world.open()
    await meta(world, replid="0" * 40)
    world.store = TenantStore(TENANT, world.connection, BelievingClock(), changes_again, moved_scripts())
    with pytest.raises(TenantLost):
        await world.admit(world.command())
    assert world.epochs_moved == 2


@pytest.mark.requirement("DASP-CORE-012d", "DASP-CORE-012g")
@pytest.mark.parametrize(
    ("stored", "inspected", "declared", "lost"),
    [
        (Boundary.PROCESS_RESTART, Boundary.PROCESS_RESTART, None, False),
        (Boundary.POWER_LOSS, Boundary.PROCESS_RESTART, None, False),
        (Boundary.VOLATILE, Boundary.PROCESS_RESTART, Boundary.PROCESS_RESTART, True),
        (Boundary.PROCESS_RESTART, Boundary.VOLATILE, Boundary.PROCESS_RESTART, True),
        (Boundary.UNKNOWN, Boundary.UNKNOWN, None, True),
        (Boundary.UNKNOWN, Boundary.UNKNOWN, Boundary.VOLATILE, True),
        (Boundary.UNKNOWN, Boundary.UNKNOWN, Boundary.PROCESS_RESTART, False),
        (Boundary.PROCESS_RESTART, Boundary.UNKNOWN, Boundary.POWER_LOSS, False),
    ],
)
async def test_where_nobody_can_look_the_operators_word_says_what_a_restart_kept(
    world: World, stored: Boundary, inspected: Boundary, declared: Boundary | None, lost: bool
) -> None:
    durability = msgspec.structs.replace(
        await inspect(world.connection), boundary=inspected, declared=declared, replid="b" * 40
    )
    assert (lost_by_restart("a" * 40, stored, durability) is not None) is lost
    assert lost_by_restart("b" * 40, stored, durability) is None


@pytest.mark.requirement("DASP-CORE-012d")
async def test_a_store_that_hides_its_replication_serves_on_the_operators_word(
    own_store: EmbeddedStore,
) -> None:
    """INFO is refused: no epoch can be told, the boundary is what was declared, every script still runs."""
    async with Connection(own_store.url) as admin:
        await admin.call("ACL", "SETUSER", "hosted", "on", ">secret", "~*", "&*", "+@all", "-info")
    hidden = replace(Address.parse(own_store.url), username="hosted", password="secret")
    async with Connection(hidden) as connection:
        world = await World.create(connection)
        assert await connection.call("HGET", world.keys.meta, "replid") == b""
        new, grant = await held(world)
        assert (await world.answer(grant.lease, RESULT)).code is Code.OK
        assert (await world.admit(new)).code is Code.DUPLICATE
        assert world.epochs_moved == 0


@pytest.mark.requirement("RT-OWN-02")
async def test_pairs_are_compared_whole(world: World) -> None:
    """A grant of an older epoch is not the grant of a newer one, also where their fences are equal."""
    new, grant = await held(world, open_gate=False)
    key = world.keys.op(new.operation_id)
    words = (await world.connection.call("HGET", key, "b:0")).decode().split(" ")
    words[3] = "2"
    await world.connection.call("HSET", key, "b:0", " ".join(words))
    async with unchanged(world):
        assert (await world.store.open_gate(grant.lease, world.revisions)).code is Code.STALE_FENCE
    newer = await world.claim(new, "h1", open_gate=False)
    assert isinstance(newer, Grant)
    assert newer.lease.epoch == "2"
