"""Making, adopting and deleting a tenant: a known one is never made anew, and a broken-off step loses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from shared.domain.errors import Conflict, InvalidInput, NotFound, Unavailable
from shared.domain.limits import TenantLimits
from shared.domain.policy import read_policy
from shared.store.connection import Connection
from shared.store.contracts import Contracts
from shared.store.health import lost_reason
from shared.store.keys import RETIRED, TENANTS, Keys
from shared.store.policies import FIELD, apply_policy
from shared.store.registry import (
    PeerRecord,
    adopt_tenant,
    create_tenant,
    create_token,
    delete_tenant,
    list_peers,
    register_peer,
    set_limits,
    show_tenant,
    unregistered_tenants,
)
from shared.store.runtime import Runtime
from shared.store.snapshot import Snapshot
from tests.faults.contracts import SERIAL, contract

K = Keys("acme")
KEPT = {K.meta, K.contracts, K.peers, K.policy, K.outbox("alfa")}
LIMITS = TenantLimits(sessions=5)
POLICY = b'{"rules":[{"principals":["*"],"actions":["session.open"],"effect":"allow"}]}'
Act = Callable[[Connection], Awaitable[Any]]


class Ended(Exception):
    """The process is gone."""


class Mortal(Connection):
    """A connection of a process that ends before its next command once it sent ``lives`` of them."""

    def __init__(self, url: str, lives: int) -> None:
        super().__init__(url)
        self._lives = lives

    def _live(self) -> None:
        if self._lives == 0:
            raise Ended
        self._lives -= 1

    async def call(self, *args: Any) -> Any:
        self._live()
        return await super().call(*args)

    async def pipeline(self, *commands: Sequence[Any]) -> list[Any]:
        self._live()
        return await super().pipeline(*commands)


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    async with Connection(redis_url) as made:
        yield made


async def furnished(connection: Connection) -> str:
    """Tenant acme with something of each kind; gives its authority."""
    authority = await create_tenant(connection, "acme")
    await register_peer(connection, "acme", PeerRecord("alfa"))
    await Contracts("acme", connection).register(contract(SERIAL, 1_000, 60_000))
    await apply_policy(connection, "acme", read_policy(POLICY), "olga")
    await set_limits(connection, "acme", LIMITS)
    await create_token(connection, "acme", "alice", ["caller"])
    for key in (K.op("00"), K.session("s1"), K.parked, K.cursors("s1")):
        await connection.call("HSET", key, "old", "1")
    await connection.call("XADD", K.updates("s1"), "1-0", "k", "accepted")
    await connection.call("XADD", K.outbox("alfa"), "*", "k", "request")
    await connection.call("ZADD", K.due, 1, "00")
    return authority


async def serve(url: str) -> Snapshot:
    """What a process that knows nothing serves; TenantLost where it may not."""
    async with Runtime(url) as runtime:
        return await (await runtime.tenant("acme")).snapshots.get()


async def keys(connection: Connection) -> set[bytes]:
    return set(await connection.call("KEYS", "lg:{acme}:*"))


async def retired(connection: Connection) -> list[str]:
    return str((await connection.call("HGET", RETIRED, "acme") or b"").decode()).split()


# Making


@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_registered_tenant_is_not_made_again_whatever_is_said(connection: Connection) -> None:
    authority = await furnished(connection)
    before = await keys(connection)
    for lost in (False, True):
        if lost:
            await connection.call("DEL", K.meta)
        for said in (False, True):
            with pytest.raises(Conflict, match="adopt it"):
                await create_tenant(connection, "acme", new_authority=said)
    assert await connection.call("HGET", TENANTS, "acme") == authority.encode()
    assert await keys(connection) == before - {K.meta}


@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_tenant_that_the_registry_forgot_is_not_made_by_accident(
    connection: Connection, redis_url: str
) -> None:
    old = await furnished(connection)
    await connection.call("DEL", TENANTS)
    before = await keys(connection)
    with pytest.raises(Conflict, match="its keys are in the store"):
        await create_tenant(connection, "acme")
    assert (await keys(connection), await connection.call("EXISTS", TENANTS)) == (before, 0)
    assert (await show_tenant(connection, "acme")).lost
    assert await unregistered_tenants(connection) == ["acme"]
    new = await create_tenant(connection, "acme", new_authority=True)
    assert await keys(connection) == {K.meta}
    served = await serve(redis_url)
    assert (served.revisions.authority, served.retired) == (new, frozenset({old}))
    assert await unregistered_tenants(connection) == []


@pytest.mark.requirement("DASP-CORE-012g")
@pytest.mark.parametrize("key", [K.contracts, K.peers, K.policy, K.tokens, K.due, K.parked])
async def test_one_key_left_of_a_tenant_is_enough_to_know_it(connection: Connection, key: bytes) -> None:
    await furnished(connection)
    for other in await keys(connection) - {key}:
        await connection.call("DEL", other)
    await connection.call("DEL", TENANTS)
    with pytest.raises(Conflict):
        await create_tenant(connection, "acme")


@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_deleted_tenants_name_is_used_again_only_on_purpose(
    connection: Connection, redis_url: str
) -> None:
    first = await furnished(connection)
    await delete_tenant(connection, "acme")
    assert await keys(connection) == set()
    assert await connection.call("EXISTS", TENANTS) == 0
    with pytest.raises(Conflict, match="existed here before"):
        await create_tenant(connection, "acme")
    second = await create_tenant(connection, "acme", new_authority=True)
    assert (await serve(redis_url)).retired == {first}
    await delete_tenant(connection, "acme")
    assert await retired(connection) == [first, second]
    with pytest.raises(NotFound):
        await delete_tenant(connection, "acme")


@pytest.mark.requirement("DASP-CORE-012g")
async def test_what_only_the_operator_knows_is_retired_as_well(
    connection: Connection, redis_url: str
) -> None:
    """Store and registry are gone: nothing here tells that there was a tenant."""
    with pytest.raises(InvalidInput):
        await create_tenant(connection, "acme", retired=["xyz"])
    assert await connection.call("DBSIZE") == 0
    await create_tenant(connection, "acme", retired=["e" * 32])
    assert (await serve(redis_url)).retired == {"e" * 32}


async def test_a_fresh_name_needs_no_word(connection: Connection, redis_url: str) -> None:
    authority = await create_tenant(connection, "acme", new_authority=True)
    served = await serve(redis_url)
    assert (served.revisions.authority, served.retired, served.epoch) == (authority, frozenset(), 1)
    assert await connection.call("EXISTS", RETIRED) == 0


# Adopting


async def meta_gone(connection: Connection) -> None:
    await connection.call("DEL", K.meta)


async def registry_gone(connection: Connection) -> None:
    await connection.call("DEL", TENANTS)


async def meta_of_another_type(connection: Connection) -> None:
    await connection.call("DEL", K.meta)
    await connection.call("SET", K.meta, "junk")


async def nothing_is_wrong(connection: Connection) -> None:
    """An operator restored a copy while nothing ran."""


LOSSES = pytest.mark.parametrize(
    "loss", [meta_gone, registry_gone, meta_of_another_type, nothing_is_wrong], ids=lambda f: f.__name__
)


@pytest.mark.requirement("DASP-CORE-012g")
@LOSSES
async def test_an_adopted_tenant_keeps_what_it_was_set_up_with_and_nothing_it_did(
    connection: Connection, redis_url: str, loss: Act
) -> None:
    old = await furnished(connection)
    await loss(connection)
    assert (await lost_reason(connection, "acme") is None) is (loss is nothing_is_wrong)
    new = await adopt_tenant(connection, "acme")
    assert await lost_reason(connection, "acme") is None
    served = await serve(redis_url)
    assert (served.revisions.authority, served.retired) == (new, frozenset({old}))
    assert await keys(connection) == KEPT
    assert [peer.peer for peer in await list_peers(connection, "acme")] == ["alfa"]
    assert len(await Contracts("acme", connection).every()) == 1
    assert await connection.call("HGET", K.policy, FIELD) is not None
    assert await connection.call("XLEN", K.outbox("alfa")) == 0
    assert len(await connection.call("XINFO", "GROUPS", K.outbox("alfa"))) == 1
    found = await show_tenant(connection, "acme")
    record_was_there = loss in (registry_gone, nothing_is_wrong)
    assert found.limits == (LIMITS if record_was_there else TenantLimits())
    assert (found.usage.operations, found.usage.sessions) == (0, 0)


async def test_what_is_kept_must_be_what_it_was(connection: Connection, redis_url: str) -> None:
    await furnished(connection)
    await connection.call("DEL", K.meta, K.peers, K.policy)
    for key in (K.peers, K.policy):
        await connection.call("SET", key, "junk")
    await adopt_tenant(connection, "acme")
    assert await keys(connection) == {K.meta, K.contracts}
    assert (await serve(redis_url)).policy.document is None


async def test_an_unknown_tenant_is_not_adopted(connection: Connection) -> None:
    with pytest.raises(NotFound):
        await adopt_tenant(connection, "acme")
    assert await connection.call("DBSIZE") == 0


async def test_every_authority_stays_retired_also_where_the_record_is_lost(connection: Connection) -> None:
    authorities = [await furnished(connection)]
    for _ in range(3):
        await connection.call("DEL", K.meta)
        authorities.append(await adopt_tenant(connection, "acme"))
    assert list((await show_tenant(connection, "acme")).retired) == authorities[:-1]


# Broken off


async def deleted(connection: Connection) -> None:
    await delete_tenant(connection, "acme")


async def adopted(connection: Connection) -> None:
    await adopt_tenant(connection, "acme")


async def made_anew(connection: Connection) -> None:
    await create_tenant(connection, "acme", new_authority=True)


async def stands_unchanged(connection: Connection, before: dict[bytes, Any]) -> bool:
    return await dump(connection) == before


async def dump(connection: Connection) -> dict[bytes, Any]:
    return {key: await connection.call("DUMP", key) for key in await connection.call("KEYS", "*")}


@pytest.mark.requirement("DASP-CORE-012g")
@LOSSES
@pytest.mark.parametrize("act", [adopted, deleted], ids=lambda f: f.__name__)
async def test_broken_off_anywhere_it_is_lost_and_the_same_call_brings_it_to_its_end(
    connection: Connection, redis_url: str, act: Act, loss: Act
) -> None:
    breaks, ended = 0, False
    while not ended:
        await connection.call("FLUSHALL")
        old = await furnished(connection)
        await loss(connection)
        before = await dump(connection)
        async with Mortal(redis_url, breaks) as mortal:
            try:
                await act(mortal)
                ended = True
            except Ended:
                breaks += 1
        if not ended:
            await lost_or_untouched(connection, redis_url, before)
            if await connection.call("HEXISTS", TENANTS, "acme") or await keys(connection):
                await act(connection)
        if act is adopted:
            assert old in (await serve(redis_url)).retired
            assert await keys(connection) == KEPT
        else:
            assert (await keys(connection), await connection.call("EXISTS", TENANTS)) == (set(), 0)
            assert await retired(connection) == [old]
    assert breaks >= 5


@pytest.mark.requirement("DASP-CORE-012g")
@pytest.mark.parametrize("left", [True, False], ids=["keys are left", "deleted before"])
async def test_making_anew_broken_off_is_a_lost_tenant_to_adopt(
    connection: Connection, redis_url: str, left: bool
) -> None:
    breaks, ended = 0, False
    while not ended:
        await connection.call("FLUSHALL")
        old = await furnished(connection)
        await (registry_gone(connection) if left else delete_tenant(connection, "acme"))
        before = await dump(connection)
        async with Mortal(redis_url, breaks) as mortal:
            try:
                await made_anew(mortal)
                ended = True
            except Ended:
                breaks += 1
        if ended:
            break
        await lost_or_untouched(connection, redis_url, before)
        if await connection.call("HEXISTS", TENANTS, "acme"):
            await adopt_tenant(connection, "acme")
        else:
            await made_anew(connection)
        assert old in (await serve(redis_url)).retired
    assert breaks >= 4


async def lost_or_untouched(connection: Connection, url: str, before: dict[bytes, Any]) -> None:
    """Nobody is served from a tenant that is half taken apart or half made."""
    if not await stands_unchanged(connection, before):
        with pytest.raises(Unavailable):
            await serve(url)
        if await connection.call("HEXISTS", TENANTS, "acme") or await keys(connection):
            assert await lost_reason(connection, "acme") is not None
