"""A store that was lost is never mistaken for a new one: every way to lose it, under everything that runs.

The services have served from it and remember tokens, sessions and snapshots; a command is at work in the copy
that is put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from shared.store.connection import Connection
from shared.store.contracts import Contracts
from shared.store.embedded import EmbeddedStore
from shared.store.keys import TENANTS
from shared.store.registry import PeerRecord, create_token, register_peer
from shared.store.wake import EVERYBODY, GIVEN_UP
from tests.cli.conftest import run_cli
from tests.faults.asking import SSE, Ask, assert_unavailable, everything
from tests.faults.client import Client, Command
from tests.faults.contracts import CONCURRENT, PEER, contract
from tests.faults.system import LEASE_MS, TENANT, TIMEOUT_MS, System, free_port
from tests.faults.worker import Worker
from tests.support.polling import wait_until
from tests.support.processes import Process, Processes

_NOTICED_S: Final = 40.0


class Served:
    """A tenant that was served for a while, and a copy of its store from the middle of it."""

    def __init__(self, system: System, worker: Worker, client: Client, folder: Path) -> None:
        self.system = system
        self.worker = worker
        self.client = client
        self.folder = folder
        self.ask = Ask(system.door_url)
        self.processes: dict[str, Process] = {}
        self.values: dict[bytes, Any] = {}

    async def start(self) -> None:
        self.processes["door"], self.processes["central"] = await asyncio.gather(
            self.system.door(), self.system.central()
        )
        self.processes["sidecar"] = await self.system.sidecar(self.worker.url)

    async def work(self) -> None:
        """c1 ends before the copy is made, c2 is at work then, c3 comes after it."""
        await self.client.open("s1", CONCURRENT)
        await self.client.submit(Command("c1", "s1", "keyed"))
        await self.client.settled(Command("c1", "s1", "keyed"))
        hold = self.worker.hold("before the effect")
        await self.client.submit(Command("c2", "s1", "keyed"))
        await hold.wait()
        self.values = everything(self.system.raw)
        shutil.copytree(self._aof, self.folder)
        hold.released.set()
        await self.client.submit(Command("c3", "s1", "keyed"))
        for name in ("c2", "c3"):
            await self.client.settled(Command(name, "s1", "keyed"))

    @property
    def _aof(self) -> Path:
        return self.system.store.directory / "appendonlydir"

    # The ways to lose it

    async def emptied(self) -> None:
        self.system.raw.flushall()

    async def restarted_empty(self) -> None:
        await self._restart(lambda: shutil.rmtree(self._aof))

    async def restarted_older(self) -> None:
        def swap() -> None:
            shutil.rmtree(self._aof)
            shutil.copytree(self.folder, self._aof)

        await self._restart(swap)

    async def put_back_older(self) -> None:
        """Without a restart, as by a tool that copies keys. Whoever went on with it now would hide that it is
        older.
        """
        for process in ("central", "sidecar"):
            self.processes[process].pause()
        with self.system.raw.pipeline(transaction=True) as at_once:
            at_once.flushall()
            for name, value in self.values.items():
                at_once.restore(name, 0, value)
            at_once.execute()

    async def record_deleted(self) -> None:
        self.system.raw.delete(self.system.keys.meta)

    async def authority_changed(self) -> None:
        self.system.raw.hset(self.system.keys.meta.decode(), "authority", "f" * 32)

    async def registry_emptied(self) -> None:
        self.system.raw.delete(TENANTS)

    async def _restart(self, meanwhile: Callable[[], object]) -> None:
        await asyncio.to_thread(self.system.store.kill)
        meanwhile()
        await asyncio.to_thread(self.system.store.start)

    # Looking

    async def is_refused(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            answer = await self.ask.get("/v1/authority", self.system.token)
            return answer.status_code == 503
        return False

    def lockgate(self, *arguments: str, status: int = 0) -> Awaitable[Any]:
        return asyncio.to_thread(run_cli, self.system.store.url, *arguments, status=status)


Loss = Callable[[Served], Awaitable[None]]
LIVE: Final = (
    Served.emptied,
    Served.record_deleted,
    Served.authority_changed,
    Served.registry_emptied,
    Served.put_back_older,
)
RESTARTED: Final = (Served.restarted_empty, Served.restarted_older)


@pytest.fixture
async def served(own_store: EmbeddedStore, processes: Processes, tmp_path: Path) -> AsyncIterator[Served]:
    async with (
        System.create(own_store, processes, tmp_path) as system,
        Worker(system.ledger) as worker,
        system.client() as client,
    ):
        made = Served(system, worker, client, tmp_path / "copy")
        await made.start()
        await made.work()
        yield made
        await made.ask.close()


@pytest.mark.requirement("DASP-CORE-012g", "DASPX-09", "RT-STORE-15", "KEYX-24")
@pytest.mark.case(70)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("lose", [*LIVE, *RESTARTED], ids=lambda loss: loss.__name__)
async def test_a_lost_store_serves_nobody_until_it_is_adopted(served: Served, lose: Loss) -> None:
    system, ask = served.system, served.ask
    stranger = "Bearer " + ".".join([*system.token.split(".")[:-2], "0" * 16, "A" * 43])
    calls = len(system.ledger.read())
    async with watched(served) as told:
        await lose(served)
        await wait_until(served.is_refused, _NOTICED_S, every=0.05)
    assert told() == [1, 2, 3, 4, 5, 6]
    fresh = Ask(f"http://127.0.0.1:{await fresh_door(served)}")
    await workers_found_out(served, lose)
    held = everything(system.raw)
    for door in (ask, fresh):
        for authorization in (f"Bearer {system.token}", stranger):
            assert_unavailable(await door.every(authorization))
    assert everything(system.raw) == held
    assert len(system.ledger.read()) == calls

    await told_and_adopted(served, lose)
    for door in (ask, fresh):
        answers = await door.every(f"Bearer {system.token}")
        assert {answer.status_code for answer in answers} == {401}
    await begins_anew(served)
    await fresh.close()


@contextlib.asynccontextmanager
async def watched(served: Served) -> AsyncIterator[Callable[[], list[int]]]:
    """An open stream, which has to end by itself; gives the sequences that it told."""
    told: list[int] = []

    async def follow() -> None:
        headers = {"authorization": f"Bearer {served.system.token}", **SSE}
        url = f"{served.system.door_url}/v1/sessions/s1/updates"
        async with httpx.AsyncClient(timeout=60) as http, http.stream("GET", url, headers=headers) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: ") and "dasp.v1.update" in line:
                    told.append(json.loads(line.removeprefix("data: "))["data"]["sequence"])

    following = asyncio.create_task(follow())
    await wait_until(lambda: len(told) == 6)
    yield lambda: told
    async with asyncio.timeout(_NOTICED_S):
        await following


async def fresh_door(served: Served) -> int:
    """A door that has never seen the tenant."""
    port = free_port()
    await served.system.door(port=port)
    return port


async def workers_found_out(served: Served, lose: Loss) -> None:
    """Wait until the workers' side knows as well. A hint lets it look now rather than some time later."""
    if lose is Served.registry_emptied:
        # Its own store is whole: nothing of it may be new, and there is nothing left to do.
        return
    sidecar = served.processes["sidecar"]
    for name in ("central", "sidecar"):
        served.processes[name].resume()
    served.system.raw.publish(served.system.keys.wake.decode(), f"{EVERYBODY} {GIVEN_UP}")
    await wait_until(lambda: "settling waits" in sidecar.output, _NOTICED_S)
    await wait_until(lambda: "reading waits" in sidecar.output, _NOTICED_S)


async def told_and_adopted(served: Served, lose: Loss) -> None:
    """The operator is told, and takes the one way on."""
    old = served.system.authority
    if lose in (Served.emptied, Served.restarted_empty):
        # Nothing is left to know the tenant by: the operator says which authority there was.
        said = await served.lockgate("tenant", "adopt", TENANT, "--yes", status=1)
        assert "does not exist" in said.stderr
        await served.lockgate("tenant", "create", TENANT, "--retire", old)
        async with Connection(served.system.store.url) as connection:
            await register_peer(connection, TENANT, PeerRecord(PEER))
            await Contracts(TENANT, connection).register(contract(CONCURRENT, LEASE_MS, TIMEOUT_MS))
        return
    listed = await served.lockgate("tenant", "list")
    assert "LOST" in listed.stdout
    shown = await served.lockgate("tenant", "show", TENANT)
    assert "lost: " in shown.stdout
    doctor = await served.lockgate("doctor", "--no-measure", status=1)
    assert f"tenant {TENANT} is lost" in doctor.stdout
    if lose in (Served.restarted_older, Served.put_back_older):
        assert "older copy" in doctor.stdout
    for more in ([], ["--new-authority"]):
        if lose is not Served.registry_emptied or not more:
            await served.lockgate("tenant", "create", TENANT, *more, status=1)
    await served.lockgate("tenant", "adopt", TENANT, "--yes")


async def begins_anew(served: Served) -> None:
    """The same processes serve the new authority; nothing of the old one is told, or means anything."""
    system = served.system
    async with Connection(system.store.url) as connection:
        token = (await create_token(connection, TENANT, "alice", ["caller"])).text()
    system.authority = (await served.ask.get("/v1/authority", token)).json()["authority"]
    assert (await served.ask.get("/v1/sessions/s1", token)).status_code == 404
    body = {"actor_id": "a2", "profile": {"id": CONCURRENT.id, "version": CONCURRENT.version}}
    assert (await served.ask.put("/v1/sessions/s1", token, body)).status_code == 201
    updates = "/v1/sessions/s1/updates"
    old8 = system.token.split(".")[2]
    for cursor in (0, 3, 6):
        resumed = await served.ask.get(updates, token, accept=SSE["accept"], last_event_id=f"{old8}-{cursor}")
        assert resumed.status_code == 410
    beyond = await served.ask.get(f"{updates}?after=6", token)
    assert (beyond.status_code, "after" in beyond.json()["description"]) == (400, True)
    async with Client(token, [system.door_url], system.journal) as again:
        reply = await again.submit(Command("c1", "s1", "keyed"))
        assert (reply.disposition, reply.sequence) == ("accepted", 1)
        assert (await again.settled(Command("c1", "s1", "keyed"))).status == "completed"


@pytest.mark.requirement("DASP-CORE-012g")
@pytest.mark.timeout(180)
async def test_an_older_copy_is_found_out_also_where_somebody_who_knew_nothing_went_on_with_it(
    served: Served,
) -> None:
    """A door that starts with the copy takes it for the store; one that knows better ends that for both."""
    door, system = served.processes["door"], served.system
    for name in ("central", "sidecar"):
        served.processes[name].kill()
    door.pause()
    await served.restarted_older()
    fresh = Ask(f"http://127.0.0.1:{await fresh_door(served)}")
    async with Client(system.token, [fresh.url], system.journal) as deceived:
        assert (await deceived.once(Command("c7", "s1", "keyed"))).acknowledged
    door.resume()
    await wait_until(served.is_refused, _NOTICED_S)

    async def all_are() -> bool:
        answers = await fresh.every(f"Bearer {system.token}")
        return all(answer.status_code == 503 for answer in answers)

    await wait_until(all_are, _NOTICED_S)
    held = everything(system.raw)
    for ask in (served.ask, fresh):
        assert_unavailable(await ask.every(f"Bearer {system.token}"))
    assert everything(system.raw) == held
    await fresh.close()
