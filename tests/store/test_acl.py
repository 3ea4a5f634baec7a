"""Users of the store: what each may reach, and that nothing of another tenant is within it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

import lua
import shared.store
from shared.domain.credentials import secret_digest
from shared.domain.errors import InvalidInput
from shared.store.acl import Role, commands, further_tenant, make_password, store_user
from shared.store.address import Address
from shared.store.connection import Connection, ReplyError, StoreUnavailable, evalsha
from shared.store.inspection import Boundary, inspect, refusal
from shared.store.keys import TENANTS, Keys
from shared.store.registry import create_tenant, create_token, tenant_names
from shared.store.replies import TenantLost
from shared.store.runtime import Runtime
from shared.store.scripts import missing_guard

PASSWORD = "a-password-of-this-test"
ROLES = list(Role)
NEVER = """
    acl config debug flushall flushdb keys scan randomkey monitor shutdown save bgsave bgrewriteaof replicaof
    slaveof migrate restore dump sort object client module function fcall swapdb move copy rename psubscribe
    ssubscribe pubsub latency slowlog cluster failover memory get set getset mget mset hgetall
"""
TENANT_IDS = st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,20}", fullmatch=True)


async def login(admin: Connection, role: Role, *tenants: str) -> Connection:
    """A connection of the user that is printed for a role."""
    user = store_user(role, tenants or ("acme",))
    await admin.call(*user.command(secret_digest(PASSWORD)).split(" "))
    return Connection(replace(admin._address, username=user.name, password=PASSWORD))


@asynccontextmanager
async def user(url: str, role: Role, *tenants: str) -> AsyncIterator[Connection]:
    async with Connection(url) as admin, await login(admin, role, *tenants) as connection:
        yield connection
    async with Connection(url) as admin:
        await admin.call("ACL", "DELUSER", store_user(role, tenants or ("acme",)).name)


async def refused(connection: Connection, *command: Any) -> None:
    with pytest.raises(ReplyError) as error:
        await connection.call(*command)
    assert error.value.code == "NOPERM", (command, error.value.message)


@pytest.fixture
async def two_tenants(redis_url: str) -> tuple[str, str]:
    """Tenants ``acme`` and ``beta``, each with a token; their token ids."""
    async with Connection(redis_url) as admin:
        made = []
        for tenant in ("acme", "beta"):
            await create_tenant(admin, tenant)
            made.append((await create_token(admin, tenant, "alice", ["caller"])).token_id)
            for key, field in every_key(tenant):
                if not await admin.call("EXISTS", key):
                    await admin.call("HSET", key, field, "canary")
        return made[0], made[1]


def every_key(tenant: str) -> list[tuple[bytes, str]]:
    k = Keys(tenant)
    whole = [k.contracts, k.peers, k.policy, k.tokens, k.ledger, k.parked, k.meta, k.due]
    by_id = [k.op, k.session, k.updates, k.queue, k.cursors, k.outbox, k.effects, k.attempts, k.reservations]
    return [(key, "f") for key in (*whole, *(kind("x1") for kind in by_id))]


# Patterns


def patterns(rules: tuple[str, ...]) -> Iterator[str]:
    for rule in rules:
        if "~" in rule:
            yield rule.partition("~")[2]


def matches(pattern: str, key: str) -> bool:
    """As the store matches: everything but the last star is literal (no id holds ``?[]\\``)."""
    assert re.fullmatch(r"[^*?\[\]\\]*\*?", pattern), pattern
    return fnmatch.fnmatchcase(key, pattern)


@given(st.lists(TENANT_IDS, min_size=2, max_size=4, unique=True), st.sampled_from(ROLES))
def test_no_pattern_of_one_tenant_matches_a_key_of_another(tenants: list[str], role: Role) -> None:
    """Whatever the names: prefixes of each other, with hyphens, as long as they may be."""
    mine, *others = tenants
    rules = store_user(role, [mine]).rules
    assert set(further_tenant(role, mine)) <= set(rules)
    keys = [key.decode() for other in others for key, _ in every_key(other)]
    for pattern in patterns(rules):
        assert not [key for key in keys if matches(pattern, key)], pattern
    channels = [rule for rule in rules if rule.startswith("&")]
    assert channels == [f"&{Keys(mine).wake.decode()}"]
    assert not set("*?[]\\") & set(channels[0])


@pytest.mark.parametrize(
    "tenant", ["*", "a*", "?", "[a]", "a]", "\\", "{acme}", "a}b", "acme:x", "a b", "a\nb"]
)
def test_no_tenant_is_a_pattern(tenant: str) -> None:
    for role in ROLES:
        with pytest.raises(InvalidInput):
            store_user(role, [tenant])
        with pytest.raises(InvalidInput):
            further_tenant(role, tenant)


@pytest.mark.parametrize("tenants", [[], ["acme", "beta"]])
def test_a_sidecar_serves_one_tenant(tenants: list[str]) -> None:
    with pytest.raises(InvalidInput):
        store_user(Role.SIDECAR, tenants)


def test_a_sidecar_reaches_less_than_a_door() -> None:
    door, sidecar = (
        set(patterns(store_user(role, ["acme"]).rules)) for role in (Role.ADMISSION, Role.SIDECAR)
    )
    assert {"lg:{acme}:tokens", "lg:tenants"} <= door - sidecar
    assert sidecar - door == {"lg:{acme}:parked"}


def test_a_password_is_random_and_only_its_hash_is_in_a_line() -> None:
    (first, digest), (second, _) = make_password(), make_password()
    assert first != second
    assert len(first) >= 43
    made = store_user(Role.ADMISSION, ["acme"])
    assert f"#{digest}" in made.command(digest).split(" ")
    assert f"#{digest}" in made.line(digest).split(" ")
    assert first not in made.command(digest) + made.line(digest)


# Commands


@pytest.mark.parametrize("role", ROLES)
def test_only_what_is_used_is_granted(role: Role) -> None:
    granted = commands(role)
    rules = store_user(role, ["acme"]).rules
    assert [rule for rule in rules if rule.startswith("+")] == [f"+{verb}" for verb in granted]
    assert not any("@" in rule for rule in rules if rule != "-@all")
    assert not {verb.partition("|")[0] for verb in granted} & set(NEVER.split())
    # Every one of them is written somewhere: in a script, or in a call of the store's own modules.
    folder = Path(shared.store.__file__).parent
    texts = [path.read_text() for path in sorted(folder.glob("*.py")) if path.name != "acl.py"]
    texts += [lua.load(name).source.decode() for name in lua.NAMES]
    said = "\n".join(texts).upper()
    for verb in granted:
        base = verb.upper().partition("|")[0].removesuffix("_RO")
        assert re.search(rf"['\"]{base}", said), verb


async def test_no_user_may_choose_another_database_than_its_own(redis_url: str) -> None:
    async with Connection(redis_url) as admin:
        made = store_user(Role.SIDECAR, ["acme"], db=3)
        await admin.call(*made.command(secret_digest(PASSWORD)).split(" "))
        address = replace(Address.parse(redis_url), username=made.name, password=PASSWORD)
        async with Connection(replace(address, db=3)) as third:
            await third.call("TIME")
            await refused(third, "SELECT", 0)
        async with Connection(replace(address, db=2), connect_s=0.1) as second:
            # It would be served from database 0 if the refusal were passed over.
            with pytest.raises(StoreUnavailable, match="NOPERM"):
                await second.call("TIME")
        await admin.call("ACL", "DELUSER", made.name)


# Reach, asked of the store itself


READS = {
    "admission": {"contracts", "peers", "policy", "tokens", "meta", "due"}
    | {f"{kind}:x1" for kind in ("op", "session", "updates", "queue", "cursors", "outbox")},
    "sidecar": {"contracts", "peers", "policy", "parked", "meta", "due"}
    | {f"{kind}:x1" for kind in ("op", "session", "updates", "queue", "cursors", "outbox")},
}
READS["settlement"] = READS["sidecar"]
WRITES = {
    role: kinds - {"contracts", "peers", "tokens"} - ({"policy"} if role != "admission" else set())
    for role, kinds in READS.items()
}
IN_SCRIPT = "return redis.call('HGET', KEYS[1], 'f')"
UNDECLARED = "return redis.call('HGET', '{}', 'f')"


@pytest.mark.parametrize("role", ROLES)
async def test_a_user_reaches_its_tenants_keys_and_no_other(
    two_tenants: tuple[str, str], redis_url: str, role: Role
) -> None:
    """By a command, in a script that declares the key, and in one that does not."""
    async with user(redis_url, role) as mine:
        for tenant in ("acme", "beta"):
            for key, _ in every_key(tenant):
                kind = key.decode().partition("}:")[2]
                own = tenant == "acme"
                await judge(mine, own and kind in READS[role], "HGET", key, "f")
                await judge(mine, own and kind in WRITES[role], "HSET", key, "f", "v")
                await judge(mine, own and kind in READS[role], "EVAL", UNDECLARED.format(key.decode()), 0)
                await judge(mine, own and kind in WRITES[role], "EVAL", IN_SCRIPT, 1, key)


async def judge(connection: Connection, allowed: bool, *command: Any) -> None:
    (reply,) = await connection.pipeline(command)
    message = f"{reply.code} {reply.message}" if isinstance(reply, ReplyError) else ""
    forbidden = "NOPERM" in message or "ACL failure" in message
    assert forbidden != allowed, (command, message or reply)


async def test_a_sidecar_reads_no_token_by_whatever_way(
    two_tenants: tuple[str, str], redis_url: str, raw: redis.Redis
) -> None:
    """Neither its own tenant's nor another's, not by a command, a script, or a script that was loaded."""
    before = {key: raw.dump(key) for key in (Keys("acme").tokens, Keys("beta").tokens)}
    async with user(redis_url, Role.SIDECAR) as mine:
        for tenant, token_id in zip(("acme", "beta"), two_tenants, strict=True):
            key = Keys(tenant).tokens
            ways: list[tuple[Any, ...]] = [
                ("HGET", key, token_id),
                ("HMGET", key, token_id),
                ("HVALS", key),
                ("HKEYS", key),
                ("EXISTS", key),
                ("DEL", key),
                ("HSET", key, token_id, "{}"),
                ("HDEL", key, token_id),
                ("HGETALL", key),
                ("DUMP", key),
                ("EVALSHA", "0" * 40, 1, key),
            ]
            for command in ways:
                await refused(mine, *command)
            script = lua.pin("steal", f"return redis.call('HGET', '{key.decode()}', '{token_id}')")
            with pytest.raises(ReplyError) as error:
                await evalsha(mine, script, [], [])
            assert "ACL" in error.value.message or error.value.code == "NOPERM"
        elsewhere: list[tuple[Any, ...]] = [
            ("HKEYS", TENANTS),
            ("HGET", TENANTS, "beta"),
            ("KEYS", "*"),
            ("SCAN", 0),
            ("CONFIG", "GET", "*"),
            ("ACL", "LIST"),
            ("ACL", "WHOAMI"),
            ("MONITOR",),
            ("CLIENT", "LIST"),
            ("FLUSHALL",),
            ("SCRIPT", "FLUSH"),
            ("SUBSCRIBE", Keys("beta").wake),
            ("PSUBSCRIBE", "*"),
            ("PUBLISH", Keys("beta").wake, "s:s1"),
            ("SHUTDOWN",),
        ]
        for command in elsewhere:
            await refused(mine, *command)
    assert {key: raw.dump(key) for key in before} == before


async def test_nobody_may_write_what_all_users_may_read(redis_url: str) -> None:
    """The keys by which readiness is proved are shared by every tenant's users: no message passes there."""
    for role in ROLES:
        async with user(redis_url, role) as mine:
            for key in ("lg:{-}:meta", "lg:{-}:op:"):
                await mine.call("HGET", key, "f")
                await refused(mine, "HSET", key, "f", "v")
                await refused(mine, "EVAL", "return 1", 1, key)
            assert await missing_guard(mine) is None


# What services do without


async def test_a_central_user_reads_the_list_of_tenants_and_no_other_does_more(redis_url: str) -> None:
    async with Connection(redis_url) as admin:
        await create_tenant(admin, "acme")
    for role in (Role.ADMISSION, Role.SETTLEMENT):
        async with user(redis_url, role) as mine:
            assert await tenant_names(mine) == ["acme"]
            await refused(mine, "HSET", TENANTS, "evil", "0" * 32)
            await refused(mine, "HDEL", TENANTS, "acme")


async def test_durability_is_the_operators_word_where_settings_are_not_told(redis_url: str) -> None:
    async with user(redis_url, Role.ADMISSION) as mine:
        silent = await inspect(mine)
        assert silent.boundary is Boundary.UNKNOWN
        assert "declare it" in (refusal(silent) or "")
        assert silent.replid is not None
        assert silent.maxmemory_policy == "noeviction"
        declared = await inspect(mine, Boundary.PROCESS_RESTART)
        assert refusal(declared) is None


@pytest.mark.parametrize("role", ROLES)
async def test_a_process_of_each_kind_is_ready_and_serves_its_tenant_only(redis_url: str, role: Role) -> None:
    async with Connection(redis_url) as admin:
        for tenant in ("acme", "beta"):
            await create_tenant(admin, tenant)
    async with user(redis_url, role):
        name = store_user(role, ["acme"]).name
        url = redis_url.replace("unix://", f"unix://{name}:{PASSWORD}@")
        async with Runtime(url, Boundary.PROCESS_RESTART) as runtime:
            assert await runtime.unready() is None
            assert (await runtime.tenant("acme")).tenant == "acme"
            said = []
            for other in ("beta", "nobody"):
                with pytest.raises(TenantLost) as lost:
                    await runtime.tenant(other)
                said.append(lost.value.description)
            # One that is there and one that never was are told alike.
            assert said[0] == said[1]
