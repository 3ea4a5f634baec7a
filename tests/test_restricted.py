"""The mode that runs services under restricted users: it restricts, and no refused command goes unseen."""

from __future__ import annotations

import pytest

from shared.store.acl import Role
from shared.store.connection import Connection, ReplyError
from tests.admission.house import house
from tests.settlement.host import Host, contract
from tests.support import acl


async def test_a_refused_command_is_named_with_its_user(redis_url: str) -> None:
    with acl.services(restricted=True) as refused:
        async with house(redis_url) as door:
            client = await door.client("alice")
            assert (await client.open("s1")).status_code == 201
            assert (await client.submit("s1", "c1")).status_code == 201
            await door.work("c1", session_id="s1")
            await acl.note_refusals(door.admin)
            assert refused == set()
            for connection in (door.runtime.connection, door.worker.connection):
                with pytest.raises(ReplyError, match="NOPERM"):
                    await connection.call("FLUSHALL")
        assert refused == {f"command flushall to {role}" for role in (Role.ADMISSION, Role.SIDECAR)}


async def test_a_key_out_of_reach_is_named_too(redis_url: str) -> None:
    with acl.services(restricted=True) as refused:
        async with Host.create(redis_url, contract()) as host:
            assert refused == set()
            with pytest.raises(ReplyError):
                await host.runtime.connection.call("HGET", "lg:{acme}:tokens", "x")
            with pytest.raises(ReplyError):
                await host.runtime.connection.call("EVAL", "return redis.call('HGET', 'lg:{b}:meta', 'x')", 0)
        assert refused == {"key lg:{acme}:tokens to sidecar", "key lg:{b}:meta to sidecar"}


async def test_services_are_as_before_unless_a_test_is_run_for_that(redis_url: str) -> None:
    assert acl.login(redis_url, Role.SIDECAR) == redis_url
    assert acl.declared() is None
    async with Connection(redis_url) as admin:
        await acl.grant(admin, Role.SIDECAR, "acme")
        assert await admin.call("ACL", "USERS") == [b"default"]
