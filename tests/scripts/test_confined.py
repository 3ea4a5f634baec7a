"""Every script touches its declared keys only: run by a user who may see nothing else."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from shared.store.address import Address
from shared.store.codes import Code
from shared.store.connection import Connection, ReplyError
from shared.store.keys import Keys
from tests.scripts.scenes import CALLS, DONE, code_of, meta
from tests.support.world import CLOCK_KEY, World

USER = ("confined", "secret")


class Confined(Connection):
    """Lets each script see the keys that its call declares, the test's clock, and the wake channel to publish
    to; everything else goes to the server as before.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        address = Address.parse(url)
        self.inside = Connection(replace(address, username=USER[0], password=USER[1]))
        self.declared: list[list[bytes]] = []

    async def close(self) -> None:
        await self.inside.close()
        await super().close()

    async def call(self, *args: Any) -> Any:
        if args[0] != "EVALSHA":
            return await super().call(*args)
        keys = list(args[3 : 3 + int(args[2])])
        self.declared.append(keys)
        patterns: list[bytes] = [
            b"~" + re.sub(rb"([\[\]*?\\])", rb"\\\1", key) for key in [*keys, CLOCK_KEY.encode()]
        ]
        rules: list[str | bytes] = ["resetkeys", *patterns, "resetchannels", b"&" + Keys("acme").wake]
        await super().call("ACL", "SETUSER", USER[0], "on", f">{USER[1]}", "+@all", *rules)
        return await self.inside.call(*args)


@pytest.fixture
async def confined(redis_url: str) -> AsyncIterator[World]:
    async with Confined(redis_url) as connection:
        await connection.call("ACL", "SETUSER", USER[0], "on", f">{USER[1]}", "+@all", "~*", "&*")
        yield await World.create(connection)
        await connection.call("ACL", "DELUSER", USER[0])


@pytest.mark.parametrize("verb", CALLS)
async def test_a_script_touches_nothing_it_did_not_declare(confined: World, verb: str) -> None:
    call = await CALLS[verb](confined)
    assert code_of(await call()) is DONE.get(verb, Code.OK)
    await meta(confined, replid="0" * 40)
    await call()
    assert confined.epochs_moved == 1


async def test_every_declared_key_carries_the_tenants_tag(confined: World) -> None:
    for verb in ("admit", "claim", "replace", "turn", "purge", "cursor"):
        await confined.connection.call("FLUSHALL")
        world = await World.create(confined.connection)
        await (await CALLS[verb](world))()
    assert isinstance(confined.connection, Confined)
    declared = {key for keys in confined.connection.declared for key in keys}
    assert len(declared) > 10
    assert all(key.startswith(b"lg:{acme}:") for key in declared)


async def test_the_confinement_confines(confined: World) -> None:
    """A key that was not declared is refused, so the tests above could fail."""
    assert isinstance(confined.connection, Confined)
    await (await CALLS["lookup"](confined))()
    with pytest.raises(ReplyError) as refused:
        await confined.connection.inside.call("HGETALL", confined.keys.due)
    assert refused.value.code == "NOPERM"
