"""A tenant at all its limits at once, and a store whose memory is out, with real processes: nothing new is
promised, and everything that was is kept (DASP-CORE-012b).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import httpx
import pytest

from shared.domain.limits import TenantLimits
from shared.domain.policy import read_policy
from shared.store.connection import Connection
from shared.store.policies import apply_policy
from shared.store.registry import create_token, revoke_token, set_limits
from tests.faults.audit import Audit
from tests.faults.client import ACTOR, Client, Command, Reply
from tests.faults.contracts import CONCURRENT
from tests.faults.load import Load
from tests.faults.system import TENANT, System
from tests.faults.worker import Worker
from tests.support.polling import wait_until

COMMANDS: Final = 40
NOTHING: Final = TenantLimits(
    operations=0,
    bytes=0,
    open_operations=0,
    sessions=0,
    record_bytes=0,
    outbox_depth=0,
    admissions_per_second=1,
    burst=1,
    streams=0,
    waiters=0,
)
Full = Callable[[System, Connection], Awaitable[None]]


async def memory_out(system: System, _: Connection) -> None:
    """The store takes no byte more."""
    system.raw.config_set("maxmemory", 1)


async def all_limits(system: System, admin: Connection) -> None:
    """The tenant may keep nothing of what it keeps already."""
    await set_limits(admin, TENANT, NOTHING)


async def room_again(system: System, admin: Connection) -> None:
    system.raw.config_set("maxmemory", 0)
    await set_limits(admin, TENANT, TenantLimits())


async def refused_everything(http: httpx.AsyncClient, session: str) -> None:
    """Every kind of new work is declined, and says when to come again where that helps."""
    body = Command("new", session, "safe").body()
    profile = {"id": CONCURRENT.id, "version": CONCURRENT.version}
    alone = await http.post(f"/v1/sessions/{session}/commands", json=body)
    batch = await http.post(f"/v1/sessions/{session}/commands:batch", json={"commands": [body]})
    opening = await http.put("/v1/sessions/new", json={"actor_id": ACTOR, "profile": profile})
    assert alone.status_code in (413, 429, 503), alone.text
    assert (alone.json()["disposition"], alone.json()["error"]["code"]) == ("rejected", "limit_exceeded")
    (receipt,) = batch.json()["receipts"]
    assert (receipt["disposition"], receipt["error"]["code"]) == ("rejected", "limit_exceeded")
    assert opening.status_code in (429, 503), opening.text
    assert int(opening.headers["retry-after"]) >= 1


async def retried(client: Client, replies: list[Reply], commands: dict[str, Command]) -> None:
    """Every equal retry gets the first answer; every changed one is a conflict."""
    for reply in replies:
        command = commands[reply.command]
        again = await client.once(command)
        assert (again.status, again.disposition, again.sequence) == (200, "duplicate", reply.sequence)
        changed = await client.once(command, amount=command.amount + 1)
        assert (changed.status, changed.error) == (409, "conflict")


async def closed(http: httpx.AsyncClient, session: str) -> None:
    """The session is closed for good, its commands are tombstones, its ids stay used up."""

    async def gone() -> bool:
        return (await http.delete(f"/v1/sessions/{session}")).status_code == 204

    await wait_until(gone, 30.0, every=0.05)
    assert (await http.get(f"/v1/sessions/{session}")).status_code == 404


@pytest.mark.requirement("DASP-CORE-012b")
@pytest.mark.parametrize("fill", [memory_out, all_limits])
async def test_at_its_limits_a_tenant_gets_everything_but_new_work(system: System, fill: Full) -> None:
    """Retries, reads, work, settling, closing, and taking permissions away; also by processes that are
    started only then.
    """
    rng = random.Random(12)
    await system.door()
    auth = {"authorization": f"Bearer {system.token}"}
    async with (
        Connection(system.store.url) as admin,
        httpx.AsyncClient(base_url=system.door_url, headers=auth, timeout=20.0) as http,
        system.client() as client,
        Worker(system.ledger, lambda: rng.uniform(0.0, 0.02)) as worker,
    ):
        load = Load(client, rng)
        await load.open()
        replies = await load.submit(COMMANDS, 6)
        other = (await create_token(admin, TENANT, "alice", ["caller"])).text()
        await fill(system, admin)
        keys: Any = system.raw.dbsize()
        await refused_everything(http, replies[0].command.rpartition("-")[0])
        assert system.raw.dbsize() == keys
        await retried(client, replies, system.journal.commands)
        await asyncio.gather(system.central(), system.sidecar(worker.url))
        audit = await Audit.of(system, client)
        assert audit.outcomes.keys() >= {reply.command for reply in replies}
        await retried(client, replies, system.journal.commands)
        for session in ("serial-0", "concurrent-0"):
            await closed(http, session)
        await taken_away(admin, http, other)
        await room_again(system, admin)
        assert (await http.get("/v1/sessions/serial-1")).status_code == 200
        assert (await client.submit(Command("after", "serial-1", "safe"))).status == 201


async def taken_away(admin: Connection, http: httpx.AsyncClient, token: str) -> None:
    """A token and a permission can be revoked whatever is full."""
    path, other = "/v1/sessions/serial-1", {"authorization": f"Bearer {token}"}
    assert (await http.get(path, headers=other)).status_code == 200
    await revoke_token(admin, TENANT, token.split(".")[3])
    assert (await http.get(path, headers=other)).status_code == 401
    actions = ["session.open", "session.read", "session.close", "command.submit"]
    denies = {"principals": ["alice"], "actions": ["session.read"], "effect": "deny"}
    allows = {"principals": ["alice"], "actions": actions, "effect": "allow"}
    for rules, status in (([denies, allows], 404), ([allows], 200)):
        document = read_policy(json.dumps({"rules": rules}).encode())
        await apply_policy(admin, TENANT, document, "olga")
        assert (await http.get(path)).status_code == status
