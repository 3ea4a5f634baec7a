"""Administration straight at the store: what revision moves, who is woken, and that nobody is created."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis

from shared.domain.errors import Conflict, NotFound
from shared.domain.limits import TenantLimits
from shared.domain.policy import PolicyDocument, read_policy
from shared.store.connection import Connection
from shared.store.keys import TENANTS
from shared.store.policies import Applied, apply_policy, show_policy
from shared.store.registry import (
    PeerRecord,
    create_tenant,
    create_token,
    find_token,
    list_peers,
    list_tokens,
    register_peer,
    remove_peer,
    revoke_token,
    set_limits,
    show_tenant,
)
from shared.store.replies import TenantLost
from shared.store.wake import Wake, session_topic
from tests.support.polling import wait_until

TENANT = "acme"
LONG = 60.0


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Connection]:
    async with Connection(redis_url) as connection:
        await create_tenant(connection, TENANT)
        yield connection


def document(*principals: str) -> PolicyDocument:
    rules = "".join(
        f"  - {{principals: [{p}], actions: [session.read], effect: allow}}\n" for p in principals
    )
    return read_policy(f"rules:\n{rules}".encode() if principals else b"rules: []")


async def revisions(store: Connection) -> tuple[str, str]:
    summary = await show_tenant(store, TENANT)
    return summary.policy_revision, summary.directory_revision


async def test_a_revoked_token_moves_the_policy_and_a_new_one_does_not(store: Connection) -> None:
    before = await revisions(store)
    token = await create_token(store, TENANT, "alice", ["caller"])
    other = await create_token(store, TENANT, "alice", ["caller"])
    assert await revisions(store) == before
    await revoke_token(store, TENANT, token.token_id)
    assert await revisions(store) == (str(int(before[0]) + 1), before[1])
    assert await find_token(store, TENANT, token.token_id) is None
    assert set(await list_tokens(store, TENANT)) == {other.token_id}
    with pytest.raises(NotFound):
        await revoke_token(store, TENANT, token.token_id)
    assert await revisions(store) == (str(int(before[0]) + 1), before[1])


async def test_what_is_said_of_a_peer_moves_the_directory_when_it_changes(store: Connection) -> None:
    policy, directory = await revisions(store)
    await register_peer(store, TENANT, PeerRecord("alfa"))
    await register_peer(store, TENANT, PeerRecord("alfa"))
    assert await revisions(store) == (policy, str(int(directory) + 1))
    await register_peer(store, TENANT, PeerRecord("alfa", principals=("svc.alfa",)))
    assert await revisions(store) == (policy, str(int(directory) + 2))
    assert await list_peers(store, TENANT) == [PeerRecord("alfa", principals=("svc.alfa",))]
    await remove_peer(store, TENANT, "alfa")
    assert await revisions(store) == (policy, str(int(directory) + 3))
    with pytest.raises(NotFound):
        await remove_peer(store, TENANT, "alfa")
    assert await revisions(store) == (policy, str(int(directory) + 3))


async def test_a_policy_is_applied_shown_and_replaced(store: Connection) -> None:
    first = await show_policy(store, TENANT)
    assert (first.document, first.applied_ms, first.applied_by) == (None, 0, "")
    applied = await apply_policy(store, TENANT, document("alice"), "olga")
    assert applied == Applied(str(int(first.revision) + 1), changed=True)
    assert await apply_policy(store, TENANT, document("alice"), "paul") == Applied(applied.revision, False)
    shown = await show_policy(store, TENANT)
    assert (shown.revision, shown.document) == (applied.revision, document("alice").text)
    assert (shown.applied_ms > 0, shown.applied_by) == (True, "olga")
    await apply_policy(store, TENANT, document("bob"), "paul")
    shown = await show_policy(store, TENANT)
    assert (shown.document, shown.applied_by) == (document("bob").text, "paul")


async def test_of_racing_policies_that_build_on_one_revision_one_is_applied(store: Connection) -> None:
    revision, _ = await revisions(store)

    async def attempt(name: str) -> str | None:
        try:
            await apply_policy(store, TENANT, document(name), name, expected=revision)
        except Conflict:
            return None
        return name

    winners = [n for n in await asyncio.gather(*(attempt(f"p{i}") for i in range(20))) if n is not None]
    assert len(winners) == 1
    shown = await show_policy(store, TENANT)
    assert (shown.revision, shown.applied_by) == (str(int(revision) + 1), winners[0])
    assert shown.document == document(winners[0]).text


async def test_a_revoked_token_makes_a_policy_that_built_on_before_a_conflict(store: Connection) -> None:
    token = await create_token(store, TENANT, "alice", ["caller"])
    revision, _ = await revisions(store)
    await revoke_token(store, TENANT, token.token_id)
    with pytest.raises(Conflict):
        await apply_policy(store, TENANT, document("alice"), "olga", expected=revision)
    assert (await show_policy(store, TENANT)).document is None


ADMINISTRATION: dict[str, Callable[[Connection], Awaitable[Any]]] = {
    "create_token": lambda store: create_token(store, TENANT, "bob", ["caller"]),
    "revoke_token": lambda store: revoke_token(store, TENANT, "0" * 16),
    "register_peer": lambda store: register_peer(store, TENANT, PeerRecord("bravo")),
    "remove_peer": lambda store: remove_peer(store, TENANT, "alfa"),
    "apply_policy": lambda store: apply_policy(store, TENANT, document("bob"), "olga"),
    "show_policy": lambda store: show_policy(store, TENANT),
    "set_limits": lambda store: set_limits(store, TENANT, TenantLimits()),
}


def contents(raw: redis.Redis) -> dict[bytes, Any]:
    client: Any = raw
    return {key: client.dump(key) for key in client.scan_iter(count=1_000)}


@pytest.mark.requirement("DASP-CORE-012g")
@pytest.mark.parametrize("verb", ADMINISTRATION)
@pytest.mark.parametrize("loss", ["meta", "everything of the tenant", "the registry", "another authority"])
async def test_nothing_that_administers_makes_a_lost_tenant_again(
    store: Connection, raw: redis.Redis, verb: str, loss: str
) -> None:
    await register_peer(store, TENANT, PeerRecord("alfa"))
    await apply_policy(store, TENANT, document("alice"), "olga")
    client: Any = raw
    if loss == "meta":
        client.delete(f"lg:{{{TENANT}}}:meta")
    elif loss == "everything of the tenant":
        client.delete(*client.keys(f"lg:{{{TENANT}}}:*"))
    elif loss == "the registry":
        client.delete(TENANTS)
    else:
        client.hset(f"lg:{{{TENANT}}}:meta", "authority", "f" * 32)
    before = contents(raw)
    with pytest.raises(TenantLost):
        await ADMINISTRATION[verb](store)
    assert contents(raw) == before


@pytest.mark.requirement("RT-AUTH-08")
@pytest.mark.parametrize("verb", ["revoke", "apply"])
async def test_whoever_waits_is_woken_when_the_policy_moves(
    store: Connection, redis_url: str, verb: str
) -> None:
    token = await create_token(store, TENANT, "alice", ["caller"])
    async with (
        Wake(redis_url, check_s=LONG) as wake,
        wake.watch(TENANT, [session_topic("s1")]) as one,
        wake.watch(TENANT, [session_topic("s2")]) as other,
        wake.watch("zeta", [session_topic("s1")]) as elsewhere,
    ):
        await wait_until(lambda: wake.subscribed(TENANT) and wake.subscribed("zeta"))
        for watcher in (one, other, elsewhere):
            assert await watcher.wait(LONG)
        await create_token(store, TENANT, "bob", ["caller"])
        if verb == "revoke":
            await revoke_token(store, TENANT, token.token_id)
        else:
            await apply_policy(store, TENANT, document("alice"), "olga")
        assert await one.wait(LONG)
        assert await other.wait(LONG)
        assert not await elsewhere.wait(0)
