"""The door as a process: settings, restarts, and an end that lets its callers go."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import httpx
import pytest

from shared.store.embedded import EmbeddedStore
from tests.admission.house import COUNTER, Client, house
from tests.admission.looking import streaming
from tests.support.polling import wait_until
from tests.support.processes import Process, Processes

LISTENING = r'"event": "listening"'


def start(processes: Processes, url: str, **settings: str) -> Process:
    """A door on a free port, and its metrics on another."""
    env = {"LOCKGATE_REDIS_URL": url, "LOCKGATE_PORT": "0", "LOCKGATE_METRICS_PORT": "0"}
    given = {f"LOCKGATE_{name.upper()}": value for name, value in settings.items()}
    return processes.python("-m", "admission_svc", env={**env, **given})


def listening(process: Process) -> dict[str, Any]:
    """What the process said of its ports."""
    process.wait_for(LISTENING)
    line = next(line for line in process.output.splitlines() if re.search(LISTENING, line))
    said: dict[str, Any] = json.loads(line)
    return said


async def started(processes: Processes, url: str, **settings: str) -> tuple[Process, str]:
    process = start(processes, url, **settings)
    said = await asyncio.to_thread(listening, process)
    return process, f"http://127.0.0.1:{said['port']}"


@pytest.mark.requirement("DASP-CORE-012a", "DASP-CORE-012c", "DASP-CORE-009c")
async def test_everything_survives_a_killed_door(own_store: EmbeddedStore, processes: Processes) -> None:
    """Sessions, retry records, updates, outcomes and cursors: as before, byte for byte, in a new process."""
    async with house(own_store.url) as arranged:
        token = await arranged.token("alice")
        first, base = await started(processes, own_store.url)
        alice = Client(base, token)
        await alice.open("s1", COUNTER)
        for i in range(1, 4):
            await alice.submit("s1", f"c{i}", {"amount": i}, name="counter.add")
        await arranged.work(
            "c1", {"value": 1}, session_id="s1", updates={"counter.changed": {"value": 1}}, state={"value": 1}
        )
        await alice.http.put("/v1/sessions/s1/cursors/app", json={"cursor": 2})
        before = await everything_told(alice)
        first.kill()
        await alice.http.aclose()

        _, base = await started(processes, own_store.url)
        again = Client(base, token)
        assert await everything_told(again) == before
        retried = await again.submit("s1", "c1", {"amount": 1}, name="counter.add")
        assert (retried.status_code, retried.json()["admission_sequence"]) == (200, 1)
        changed = await again.submit("s1", "c1", {"amount": 2}, name="counter.add")
        assert changed.status_code == 409
        following = await again.submit("s1", "c4", {"amount": 4}, name="counter.add")
        assert following.json()["admission_sequence"] == before["head"] + 1
        await again.http.aclose()


async def everything_told(client: Client) -> dict[str, Any]:
    page = await client.page("s1")
    return {
        "head": page.json()["head"],
        "page": page.content,
        "view": (await client.http.get("/v1/sessions/s1")).content,
        "outcomes": [(await client.outcome("s1", f"c{i}")).content for i in range(1, 4)],
        "cursor": (await client.http.get("/v1/sessions/s1/cursors/app")).content,
        "authority": (await client.http.get("/v1/authority")).json()["authority"],
    }


@pytest.mark.requirement("DASP-CORE-012c", "DASP-CORE-012g")
async def test_a_restarted_store_is_served_on_under_the_same_authority(
    own_store: EmbeddedStore, processes: Processes
) -> None:
    async with house(own_store.url) as arranged:
        token = await arranged.token("alice")
    _, base = await started(processes, own_store.url)
    alice = Client(base, token)
    await alice.open("s1")
    await alice.submit("s1", "c1")
    before = (await alice.page("s1")).content
    own_store.kill()
    down = await alice.submit("s1", "c2")
    assert (down.status_code, down.json()["kind"]) == (503, "unavailable")
    own_store.start()

    async def back() -> bool:
        return (await alice.submit("s1", "c1")).status_code == 200

    await wait_until(back, timeout=30)
    assert (await alice.page("s1")).content == before
    assert (await alice.submit("s1", "c2")).json()["admission_sequence"] == 2
    await alice.http.aclose()


async def test_a_signal_lets_waits_and_streams_go_and_ends_in_order(
    redis_url: str, processes: Processes
) -> None:
    async with house(redis_url) as arranged:
        token = await arranged.token("alice")
        process, base = await started(processes, redis_url)
        metrics = f"http://127.0.0.1:{listening(process)['metrics_port']}/metrics"
        alice = Client(base, token)
        await alice.open("s1")
        await alice.submit("s1", "c1")
        async with streaming(alice, "s1") as feed:
            assert len(await feed.updates(1)) == 1
            held = asyncio.create_task(alice.outcome("s1", "c1", wait=30))

            async def both() -> bool:
                return await under_way(metrics) == 2

            await wait_until(both)
            process.terminate()
            rest = [frame for frame in await feed.rest() if not frame.comment]
            answer = await held
        assert rest == []
        assert (answer.status_code, answer.json()["state"]) == (200, "pending")
        assert await asyncio.to_thread(process.wait) == 0
        assert '"event": "ended"' in process.output
        with pytest.raises(httpx.ConnectError):
            await alice.http.get("/healthz")
        await alice.http.aclose()


async def under_way(metrics: str) -> int:
    """How many requests the door says it is serving."""
    async with httpx.AsyncClient() as anyone:
        page = (await anyone.get(metrics)).text
    found = re.search(r'^lockgate_http_requests_under_way\{service="admission"\} (\d+)', page, re.MULTILINE)
    assert found, page
    return int(found[1])


async def test_metrics_have_a_port_of_their_own(redis_url: str, processes: Processes) -> None:
    process = start(processes, redis_url)
    said = await asyncio.to_thread(listening, process)
    async with httpx.AsyncClient() as anyone:
        page = await anyone.get(f"http://127.0.0.1:{said['metrics_port']}/metrics")
        assert "lockgate_http_requests_total" in page.text
        assert (await anyone.get(f"http://127.0.0.1:{said['port']}/metrics")).status_code == 404


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"redis_url": ""}, "LOCKGATE_REDIS_URL must be set"),
        ({"redis_url": "http://nowhere"}, "LOCKGATE_REDIS_URL"),
        ({"prot": "8080"}, "LOCKGATE_PROT is not a setting"),
        ({"port": "65536"}, "LOCKGATE_PORT must be a whole number"),
        ({"declared_durability": "forever"}, "LOCKGATE_DECLARED_DURABILITY must be one of"),
    ],
)
def test_wrong_settings_are_told_and_nothing_starts(
    processes: Processes, settings: dict[str, str], said: str
) -> None:
    process = start(processes, "redis://secret:word@127.0.0.1:1", **settings)
    assert process.wait() == 2
    assert said in process.output
    assert "word" not in process.output


def test_a_port_in_use_is_told(processes: Processes) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(processes, "redis://127.0.0.1:1", port=str(port))
        assert process.wait() != 0
        assert str(port) in process.output


@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_door_starts_without_its_store_and_serves_when_it_comes(
    own_store: EmbeddedStore, processes: Processes
) -> None:
    async with house(own_store.url) as arranged:
        token = await arranged.token("alice")
    own_store.stop()
    _, base = await started(processes, own_store.url)
    alice = Client(base, token)
    assert (await alice.http.get("/healthz")).status_code == 200
    assert (await alice.http.get("/readyz")).status_code == 503
    assert (await alice.open("s1")).status_code == 503
    own_store.start()

    async def serves() -> bool:
        return (await alice.open("s1")).status_code == 201

    await wait_until(serves, timeout=30)
    await alice.http.aclose()
