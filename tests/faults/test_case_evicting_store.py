"""A store that drops keys when memory runs short: it would drop promises, so none is made on it."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx
import pytest
import redis

from shared.store.embedded import EmbeddedStore
from tests.admission.house import Client, house
from tests.admission.looking import assert_refused, everything
from tests.faults.contracts import PEER
from tests.faults.system import TENANT, System, free_port
from tests.support.polling import wait_until
from tests.support.processes import Process
from tests.support.raw import raw_client

EVICTING: Final = [
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
]


def names_the_cure(text: str, policy: str) -> bool:
    """Whether a message says what is set and what to set."""
    return f"maxmemory-policy is {policy}" in text and "set it to noeviction" in text


@pytest.mark.case(98)
@pytest.mark.parametrize("policy", EVICTING)
async def test_on_an_evicting_store_nothing_new_is_promised_and_what_was_is_told(
    own_store: EmbeddedStore, policy: str
) -> None:
    with raw_client(own_store.url) as raw:
        async with house(own_store.url) as door:
            alice = await door.client("alice")
            await alice.open("s1")
            first = await alice.submit("s1", "c1")
            raw.config_set("maxmemory-policy", policy)
            ready = await alice.http.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (503, "unready")
            assert names_the_cure(ready.json()["reason"], policy)
            await assert_only_reads(alice, raw, policy, first)
            raw.config_set("maxmemory-policy", "noeviction")

            async def admitted() -> bool:
                await alice.http.get("/readyz")
                return (await alice.submit("s1", "c2")).status_code == 201

            await wait_until(admitted)


async def assert_only_reads(alice: Client, raw: redis.Redis, policy: str, first: httpx.Response) -> None:
    before = everything(raw)
    command = {"command_id": "c2", "name": "note.write", "input": {}}
    refused = [
        await alice.submit("s1", "c2"),
        await alice.http.post("/v1/sessions/s1/commands:batch", json={"commands": [command]}),
        await alice.open("s2"),
    ]
    for answer in refused:
        assert_refused(answer, 503, kind="unavailable")
        assert names_the_cure(answer.json()["description"], policy)
        assert int(answer.headers["retry-after"]) >= 1
    again = await alice.submit("s1", "c1")
    assert (again.status_code, again.json()) == (200, {**first.json(), "disposition": "duplicate"})
    assert (await alice.page("s1")).json()["head"] == 1
    assert (await alice.outcome("s1", "c1")).json()["state"] == "pending"
    assert everything(raw) == before


@pytest.mark.case(98)
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_processes_that_start_on_an_evicting_store_are_not_ready_until_it_is_cured(
    system: System, policy: str
) -> None:
    """Each says by its readiness what is wrong and what to set; none ends, and none needs to be restarted."""
    system.raw.config_set("maxmemory-policy", policy)
    sidecar = {"TENANT": TENANT, "PEER": PEER, "HANDLER_URL": f"http://127.0.0.1:{free_port()}/"}
    kinds: list[tuple[str, dict[str, str]]] = [
        ("admission_svc", {}),
        ("settlement_svc", {}),
        ("settlement_svc", sidecar),
    ]
    started = {(port := free_port()): system._start(module, "", port, **more) for module, more in kinds}
    async with httpx.AsyncClient(timeout=5.0) as http:
        await asyncio.gather(*(unready(http, port, process, policy) for port, process in started.items()))
        system.raw.config_set("maxmemory-policy", "noeviction")
        await asyncio.gather(*(cured(http, port, process, policy) for port, process in started.items()))


async def asked(http: httpx.AsyncClient, port: int, process: Process) -> httpx.Response | None:
    """The readiness of a process, None while it does not listen yet."""
    assert process.running, process.output
    try:
        return await http.get(f"http://127.0.0.1:{port}/readyz")
    except httpx.TransportError:
        return None


async def unready(http: httpx.AsyncClient, port: int, process: Process, policy: str) -> None:
    async def says_why() -> bool:
        answer = await asked(http, port, process)
        if answer is None:
            return False
        assert answer.status_code == 503, "never ready, not even at first"
        return names_the_cure(answer.text, policy)

    await wait_until(says_why, 30.0, every=0.05)


async def cured(http: httpx.AsyncClient, port: int, process: Process, policy: str) -> None:
    async def says_so_no_more() -> bool:
        answer = await asked(http, port, process)
        return answer is not None and policy not in answer.text

    await wait_until(says_so_no_more, 30.0, every=0.05)
