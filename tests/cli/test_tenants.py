"""Tenants and the word on the store's clock, from the command line."""

from __future__ import annotations

import asyncio
import re

import pytest
import redis

from shared.domain.guard import TimeGuard
from shared.store.connection import Connection
from shared.store.replies import ClockRefusal
from shared.store.runtime import Runtime
from tests.cli.conftest import Lockgate, LockgateJson
from tests.support.world import World


def test_a_tenant_is_created_once_and_shown(lockgate: Lockgate, lockgate_json: LockgateJson) -> None:
    assert "no tenant yet" in lockgate("tenant", "list").stdout
    created = lockgate("tenant", "create", "acme").stdout
    authority = re.findall(r"[0-9a-f]{32}", created)[0]
    assert "exists already" in lockgate("tenant", "create", "acme", status=1).stderr
    shown = lockgate_json("tenant", "show", "acme")
    assert shown["authority"] == authority
    assert shown["lost"] is False
    assert shown["epoch"] == 1
    assert [row["tenant"] for row in lockgate_json("tenant", "list")] == ["acme"]
    assert authority in lockgate("tenant", "list").stdout


@pytest.mark.parametrize("name", ["UPPER", "a--b", "-a", "a.b", "", "{x}", "a" * 64, "a\nb"])
def test_a_malformed_tenant_is_wrong_usage_and_stores_nothing(
    lockgate: Lockgate, raw: redis.Redis, name: str
) -> None:
    said = lockgate("tenant", "create", "--", name, status=2).stderr
    assert "must be a tenant id" in said
    assert raw.dbsize() == 0


def test_a_missing_tenant_is_told_with_what_to_do(lockgate: Lockgate) -> None:
    for arguments in (("tenant", "show", "nope"), ("tenant", "delete", "nope"), ("tenant", "adopt", "nope")):
        assert "lockgate tenant list" in lockgate(*arguments, status=1).stderr
    assert "lockgate tenant create" in lockgate("peer", "list", status=1).stderr


def test_without_a_name_the_only_tenant_is_meant_and_never_one_of_two(lockgate: Lockgate) -> None:
    lockgate("tenant", "create", "acme")
    assert "no peer yet" in lockgate("peer", "list").stdout
    lockgate("tenant", "create", "beta")
    said = lockgate("peer", "list", status=2).stderr
    assert "--tenant" in said
    assert "acme, beta" in said


def test_deleting_asks_first_and_leaves_other_tenants(lockgate: Lockgate, raw: redis.Redis) -> None:
    lockgate("tenant", "create", "acme")
    lockgate("tenant", "create", "acme-2")
    lockgate("token", "create", "alice", "--tenant", "acme-2")
    assert "nothing was done" in lockgate("tenant", "delete", "acme", status=1, given="n\n").stderr
    assert raw.exists("lg:{acme}:meta")
    lockgate("tenant", "delete", "acme", given="y\n")
    assert not raw.keys("lg:{acme}:*")
    assert raw.hkeys("lg:tenants") == [b"acme-2"]
    assert raw.exists("lg:{acme-2}:tokens")


def test_a_served_tenant_is_not_adopted_by_accident(lockgate: Lockgate, raw: redis.Redis) -> None:
    lockgate("tenant", "create", "acme")
    before = raw.hget("lg:tenants", "acme")
    assert "is not lost" in lockgate("tenant", "adopt", "acme", "--yes", status=1).stderr
    assert raw.hget("lg:tenants", "acme") == before


@pytest.mark.requirement("DASP-CORE-012g")
def test_a_lost_tenant_is_told_and_adopted_under_another_authority(
    lockgate: Lockgate, lockgate_json: LockgateJson, raw: redis.Redis
) -> None:
    lockgate("tenant", "create", "acme")
    token = lockgate("token", "create", "alice").stdout.strip()
    before = lockgate_json("tenant", "show", "acme")["authority"]
    raw.delete("lg:{acme}:meta")
    shown = lockgate_json("tenant", "show", "acme")
    assert shown["lost"] is True
    assert "LOST" in lockgate("tenant", "list").stdout
    assert "tenant adopt" in lockgate("token", "create", "bob", status=1).stderr
    lockgate("tenant", "adopt", "acme", "--yes")
    after = lockgate_json("tenant", "show", "acme")
    assert after["lost"] is False
    assert after["authority"] != before
    assert after["retired"] == [before]
    assert lockgate_json("token", "list") == []
    assert token.split(".")[2] == before[:8]


@pytest.mark.requirement("RT-GUARD-17")
def test_an_accepted_clock_ends_the_refusals_of_a_clock_that_stepped_back(
    lockgate: Lockgate, lockgate_json: LockgateJson, redis_url: str, raw: redis.Redis
) -> None:
    """The last commit lies an hour ahead of the store's clock, as after the clock was set back."""

    async def admit() -> str:
        async with Runtime(redis_url) as runtime, Connection(redis_url) as connection:
            handle = await runtime.tenant("acme")
            authority = (await handle.snapshots.get()).revisions
            world = World(connection, authority.authority)
            world.revisions = authority
            await runtime.refresh()
            now = runtime.clock.lower_ms()
            guard = TimeGuard(now - 10_000, now + 4_000)
            opened = await handle.reads.session("s1", authority)
            assert opened is not None, "reads go on"
            reply = await handle.store.admit(world.command(), authority, guard)
            return reply.code.value

    async def set_up() -> None:
        async with Connection(redis_url) as connection:
            await (await World.create(connection)).open()

    asyncio.run(set_up())
    ahead = int(raw.time()[0]) * 1000 + 3_600_000
    raw.hset("lg:{acme}:meta", "last_ms", ahead)
    with pytest.raises(ClockRefusal):
        asyncio.run(admit())
    assert "clock accept --tenant acme" in lockgate("doctor", "--no-measure", status=1).stdout
    assert "nothing was done" in lockgate("clock", "accept", status=1, given="n\n").stderr
    lockgate("clock", "accept", "--yes")
    assert asyncio.run(admit()) == "OK"
    assert lockgate_json("doctor", "--no-measure")["acceptsNewWork"] is True
    noted = raw.hget("lg:{acme}:meta", "clock_accepted")
    assert isinstance(noted, bytes)
    at, who = noted.split(b" ")
    assert int(at) < ahead
    assert re.fullmatch(rb"[A-Za-z0-9._@-]+", who)
    assert who.decode() in lockgate("tenant", "show", "acme").stdout


def test_a_clock_can_be_accepted_for_all_tenants(lockgate: Lockgate, raw: redis.Redis) -> None:
    for name in ("acme", "beta"):
        lockgate("tenant", "create", name)
    lockgate("clock", "accept", "--all-tenants", "--yes")
    for name in ("acme", "beta"):
        assert raw.hget(f"lg:{{{name}}}:meta", "clock_accepted")


@pytest.mark.requirement("DASP-CORE-012g")
def test_a_known_name_is_used_again_only_on_purpose(
    lockgate: Lockgate, lockgate_json: LockgateJson, raw: redis.Redis
) -> None:
    lockgate("tenant", "create", "acme")
    first = lockgate_json("tenant", "show", "acme")["authority"]
    raw.delete("lg:tenants")
    assert "tenant adopt acme" in lockgate("doctor", "--no-measure", status=1).stdout
    assert "LOST" in lockgate("tenant", "list").stdout
    assert lockgate_json("tenant", "show", "acme")["reason"] == "its registration is gone from the store"
    said = lockgate("tenant", "create", "acme", status=1).stderr
    assert "adopt it" in said
    assert "--new-authority" in said
    lockgate("tenant", "adopt", "acme", "--yes")
    second = lockgate_json("tenant", "show", "acme")
    assert second["retired"] == [first]
    lockgate("tenant", "delete", "acme", "--yes")
    assert "existed here before" in lockgate("tenant", "create", "acme", status=1).stderr
    lockgate("tenant", "create", "acme", "--new-authority")
    assert lockgate_json("tenant", "show", "acme")["retired"] == [first, second["authority"]]


def test_a_retired_authority_has_the_form_of_one(lockgate: Lockgate, raw: redis.Redis) -> None:
    assert "32 hexadecimal" in lockgate("tenant", "create", "acme", "--retire", "xyz", status=2).stderr
    assert raw.dbsize() == 0
    lockgate("tenant", "create", "acme", "--retire", "e" * 32)
    assert raw.hget("lg:{acme}:meta", "retired") == b"e" * 32
