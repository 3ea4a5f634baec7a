"""What a process knows of a tenant: read once for everybody who asks, and the policy with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import redis

from shared.domain.errors import Unavailable
from shared.domain.policy import AuthorizationInput, read_policy
from shared.store.connection import Connection
from shared.store.policies import apply_policy
from shared.store.registry import create_tenant, create_token, revoke_token
from shared.store.snapshot import Snapshot, SnapshotSource

TENANT = "acme"
NOW = 1_796_025_679_851
POLICY = read_policy(b"rules:\n  - {principals: [alice], actions: ['*'], sessions: ['*'], effect: allow}\n")
READ = AuthorizationInput("alice", "session.read", session_id="s1", owner="bob")


class Counting(Connection):
    """Counts readings: a snapshot is one pipeline."""

    readings = 0

    async def pipeline(self, *commands: Sequence[Any]) -> list[Any]:
        self.readings += 1
        return await super().pipeline(*commands)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Counting]:
    async with Counting(redis_url) as connection:
        await create_tenant(connection, TENANT)
        yield connection


async def test_many_who_find_their_snapshot_stale_read_it_once(store: Counting) -> None:
    source = SnapshotSource(TENANT, store)
    stale = await source.get()
    await apply_policy(store, TENANT, POLICY, "olga")
    store.readings = 0
    found = await asyncio.gather(*(source.reload(stale) for _ in range(1_000)))
    assert store.readings == 1
    assert {id(snapshot) for snapshot in found} == {id(await source.get())}
    assert found[0].policy.document == POLICY.text
    assert (await source.reload(stale)) is found[0], "who was late takes what is there"
    assert store.readings == 1


async def test_one_who_gives_up_does_not_take_the_reading_from_the_others(store: Counting) -> None:
    source = SnapshotSource(TENANT, store)
    stale = await source.get()
    store.readings = 0
    impatient = asyncio.ensure_future(source.reload(stale))
    others = [asyncio.ensure_future(source.reload(stale)) for _ in range(10)]
    await asyncio.sleep(0)
    impatient.cancel()
    found: list[Snapshot] = await asyncio.gather(*others)
    assert store.readings == 1
    assert all(snapshot is found[0] for snapshot in found)


async def test_without_a_document_the_roles_decide(store: Counting) -> None:
    snapshot = await SnapshotSource(TENANT, store).get()
    assert (snapshot.policy.document, snapshot.policy.applies) == (None, False)
    assert snapshot.policy.revision == snapshot.revisions.policy


@pytest.mark.requirement("RT-AUTH-07")
async def test_a_policy_decides_under_the_revision_it_was_applied_with(store: Counting) -> None:
    source = SnapshotSource(TENANT, store)
    stale = await source.get()
    assert not stale.policy.decide(READ, NOW).allowed
    applied = await apply_policy(store, TENANT, POLICY, "olga")
    fresh = await source.reload(stale)
    verdict = fresh.policy.decide(READ, NOW)
    assert (verdict.allowed, verdict.revision) == (True, applied.revision)
    assert fresh.revisions.policy == applied.revision


async def test_another_revision_of_the_same_document_is_another_policy_by_the_same_rules(
    store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SnapshotSource(TENANT, store)
    await apply_policy(store, TENANT, POLICY, "olga")
    first = await source.get()
    token = await create_token(store, TENANT, "alice", ["caller"])
    await revoke_token(store, TENANT, token.token_id)
    monkeypatch.setattr("shared.store.snapshot.read_policy", None)
    second = await source.reload(first)
    assert second.policy.revision != first.policy.revision
    assert second.policy.decide(READ, NOW).allowed


@pytest.mark.requirement("RT-AUTH-05")
@pytest.mark.parametrize("stored", [b"", b"{", b'{"rules":[{}]}', b"\xff\x00"])
async def test_a_stored_policy_that_cannot_be_read_decides_nothing(
    store: Counting, raw: redis.Redis, stored: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    raw.hset("lg:{acme}:policy", "document", stored)
    with caplog.at_level(logging.ERROR, "lockgate.store.snapshot"):
        snapshot = await SnapshotSource(TENANT, store).get()
    assert "cannot be read" in caplog.text
    with pytest.raises(Unavailable):
        snapshot.policy.decide(READ, NOW)


async def test_a_policy_of_another_type_refuses_the_tenant(store: Counting, raw: redis.Redis) -> None:
    raw.set("lg:{acme}:policy", "no hash")
    with pytest.raises(Unavailable):
        await SnapshotSource(TENANT, store).get()
