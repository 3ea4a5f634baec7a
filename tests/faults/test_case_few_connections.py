"""Many more requests at a time than there are connections, or room on them, to the store."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import pytest
import redis

from admission_svc import commands
from shared.store import runtime
from shared.store.link import Limits
from tests.admission.house import Client, House, house
from tests.admission.looking import plain, read_reply
from tests.faults.contracts import CONCURRENT
from tests.faults.system import System
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy

REQUESTS: Final = 500
BATCH: Final = 100
ROOM: Final = 5
TIMEOUT_S: Final = 0.3
HANGS_S: Final = 30.0
"""A request that takes longer hangs: its answer is due after a few times ``TIMEOUT_S``."""
NAMES: Final = [f"c{i}" for i in range(REQUESTS)]


class Answer(msgspec.Struct, frozen=True):
    """What came back for one command."""

    command_id: str
    status: int
    headers: dict[str, str]
    body: dict[str, Any]


async def submit(port: int, token: str, command: dict[str, Any]) -> Answer:
    """Submit a command on a connection of its own."""
    body = json.dumps(command).encode()
    auth = f"authorization: Bearer {token}".encode()
    length = f"content-length: {len(body)}".encode()
    request = plain(
        "POST", "/v1/sessions/s1/commands", auth, length, b"content-type: application/json", body=body
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        status, headers, said = read_reply(await reader.read())
    finally:
        writer.close()
    return Answer(command["command_id"], status, headers, json.loads(said))


async def submit_all(port: int, token: str, name: str = "note.write", **given: Any) -> list[Answer]:
    """Every command at once; none may hang, and all that is refused says when to come again."""
    async with asyncio.timeout(HANGS_S):
        answers = await asyncio.gather(
            *(submit(port, token, {"command_id": c, "name": name, "input": given}) for c in NAMES)
        )
    for answer in answers:
        assert answer.status in (200, 201, 503), answer
        assert answer.status != 503 or int(answer.headers["retry-after"]) >= 1
    return answers


@pytest.mark.case(95)
async def test_500_requests_at_once_through_one_process_are_all_admitted(system: System) -> None:
    """A real door, whose connections to the store are a handful however many ask."""
    door = await system.door()
    async with system.client() as client:
        await client.open("s1", CONCURRENT)
    port = int(system.door_url.rpartition(":")[2])
    answers = await submit_all(port, system.token, "fault.safe", id="x", amount=1, refuse=False)
    clients: Any = system.raw.info("clients")
    assert door.running
    assert Counter(answer.status for answer in answers) == {201: REQUESTS}
    assert {answer.body["admission_sequence"] for answer in answers} == set(range(1, REQUESTS + 1))
    assert len(system.outbox()) == REQUESTS
    assert clients["connected_clients"] <= ROOM


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection to the store carries a handful of calls at a time and waits shortly for replies."""
    _, _, size = Limits.__init__.__defaults__ or ()
    monkeypatch.setattr(Limits.__init__, "__defaults__", (TIMEOUT_S, ROOM, size))
    monkeypatch.setattr(runtime, "_BULK_LIMITS", Limits())
    monkeypatch.setattr(commands, "_RESOLVE_PAUSES_S", (0.0,))
    assert Limits() == Limits(TIMEOUT_S, ROOM, size)


@asynccontextmanager
async def behind_proxy(redis_url: str) -> AsyncIterator[tuple[FaultProxy, House, Client]]:
    """A door behind a proxy, and a caller of it with a session, known to that door already."""
    async with FaultProxy(redis_url) as proxy, house(redis_url) as near:
        alice = await near.client("alice")
        await alice.open("s1")
        async with house(proxy.url, tenants=()) as far:
            client = far.client_with(alice.token)
            assert (await client.submit("s1", "warm")).status_code == 201
            yield proxy, far, client


async def admit_the_rest(client: Client, names: Iterable[str]) -> None:
    """Repeat what was refused, unchanged, until it is admitted."""
    todo = [{"command_id": name, "name": "note.write", "input": {}} for name in names]

    for at in range(0, len(todo), BATCH):
        batch = {"commands": todo[at : at + BATCH]}

        async def admitted(batch: dict[str, Any] = batch) -> bool:
            answer = await client.http.post("/v1/sessions/s1/commands:batch", json=batch)
            return answer.status_code == 200

        await wait_until(admitted, HANGS_S)


async def assert_each_was_admitted_once(client: Client, raw: redis.Redis) -> None:
    assert raw.xlen("lg:{acme}:outbox:alfa") == REQUESTS + 1
    assert (await client.http.get("/v1/sessions/s1")).json()["cursor"] == REQUESTS + 1


@pytest.mark.case(95)
async def test_what_has_no_room_is_refused_and_what_is_refused_can_be_repeated(
    redis_url: str, raw: redis.Redis, narrow: None
) -> None:
    async with behind_proxy(redis_url) as (_, far, client):
        answers = await submit_all(far.port, client.token)
        refused = [answer.command_id for answer in answers if answer.status == 503]
        assert 0 < len(refused) < REQUESTS, "some find room and some do not"
        await admit_the_rest(client, refused)
        await assert_each_was_admitted_once(client, raw)


@pytest.mark.case(95)
@pytest.mark.parametrize("fault", ["hold", "drop_replies", "refuse", "late"])
async def test_no_request_hangs_on_a_store_that_does_not_answer(
    redis_url: str, raw: redis.Redis, narrow: None, fault: str
) -> None:
    async with behind_proxy(redis_url) as (proxy, far, client):
        if fault == "late":
            proxy.delay(2 * TIMEOUT_S)
        else:
            getattr(proxy, fault)()
        answers = await submit_all(far.port, client.token)
        proxy.pass_on()
        assert Counter(answer.status for answer in answers) == {503: REQUESTS}
        await admit_the_rest(client, NAMES)
        await assert_each_was_admitted_once(client, raw)
