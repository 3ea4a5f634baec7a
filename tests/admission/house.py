"""A door on a real socket over a real store, its tenants, and a worker that is a few store calls."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
from uvicorn.server import ServerState

from admission_svc.app import Door
from admission_svc.server import configuration
from shared.config import AdmissionSettings
from shared.domain.contract import Contract, parse_bundle
from shared.domain.decide import apply
from shared.domain.ids import command_operation_id
from shared.domain.records import Answer, NamedData, Refusal, answer_digest, encode
from shared.serving.protocol import BoundedProtocol
from shared.store.acl import Role
from shared.store.codes import Code
from shared.store.connection import Connection
from shared.store.contracts import Contracts
from shared.store.inspection import Boundary
from shared.store.registry import PeerRecord, create_tenant, create_token, register_peer
from shared.store.replies import Claim, Grant
from shared.store.runtime import Runtime, TenantHandle
from tests.support import acl
from tests.support.world import anyone, terms

COUNTER = {"id": "urn:example:dasp:counter", "version": "1"}
NOTES = {"id": "urn:example:notes", "version": "1"}
_OBJECT = {"type": "object"}
_ONE = {
    "delivery": "one-eligible",
    "completion": {"mode": "first-success"},
    "effects": "none",
    "result": _OBJECT,
}


def counter_bundle(**changes: Any) -> bytes:
    """The running example: a serial counter whose input is bounded."""
    amount = {"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000}
    add = {
        **_ONE,
        "input": {
            "type": "object",
            "properties": {"amount": amount},
            "required": ["amount"],
            "additionalProperties": False,
        },
        "audience": {"peers": ["counter"]},
        "timeoutMs": 30_000,
    }
    session = {
        "id": COUNTER["id"],
        "profileVersion": COUNTER["version"],
        "execution": "serial",
        "commands": {"counter.add": "add"},
        "updates": {"counter.changed": _OBJECT},
        "state": _OBJECT,
        "initial": {"value": 0},
        **changes,
    }
    return json.dumps(
        {"contract": "demo.counter", "version": "1", "interactions": {"add": add}, "session": session}
    ).encode()


def notes_bundle() -> bytes:
    """A concurrent profile that takes any object under two names."""
    write = {**_ONE, "input": _OBJECT, "audience": {"peers": ["bravo", "alfa"]}}
    session = {
        "id": NOTES["id"],
        "profileVersion": NOTES["version"],
        "execution": "concurrent",
        "commands": {"note.write": "write", "note.erase": "write"},
        "updates": {"note.written": _OBJECT},
    }
    return json.dumps(
        {"contract": "demo.notes", "version": "1", "interactions": {"write": write}, "session": session}
    ).encode()


class Client:
    """An HTTP client with one token."""

    def __init__(self, base_url: str, token: str) -> None:
        self.token = token
        self.auth = {"authorization": f"Bearer {token}"}
        self.http = httpx.AsyncClient(base_url=base_url, headers=self.auth, timeout=20)

    async def open(
        self, session_id: str, profile: Mapping[str, str] = NOTES, actor: str = "a1"
    ) -> httpx.Response:
        body = {"actor_id": actor, "profile": dict(profile)}
        return await self.http.put(f"/v1/sessions/{session_id}", json=body)

    async def submit(
        self,
        session_id: str,
        command_id: str,
        value: Any = None,
        *,
        name: str = "note.write",
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        body = {"command_id": command_id, "name": name, "input": {} if value is None else value}
        return await self.http.post(f"/v1/sessions/{session_id}/commands", json=body, headers=headers)

    async def raw(
        self, session_id: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """POST a command whose body is these bytes."""
        return await self.http.post(
            f"/v1/sessions/{session_id}/commands",
            content=body,
            headers={"content-type": "application/json", **(headers or {})},
        )

    async def outcome(self, session_id: str, command_id: str, wait: int | None = None) -> httpx.Response:
        headers = {} if wait is None else {"prefer": f"wait={wait}"}
        return await self.http.get(f"/v1/sessions/{session_id}/commands/{command_id}", headers=headers)

    async def page(self, session_id: str, wait: int | None = None, **query: Any) -> httpx.Response:
        headers = {} if wait is None else {"prefer": f"wait={wait}"}
        return await self.http.get(f"/v1/sessions/{session_id}/updates", params=query, headers=headers)

    async def close(self, session_id: str) -> httpx.Response:
        return await self.http.delete(f"/v1/sessions/{session_id}")


class Listening:
    """The door on a loopback port, in the test's own event loop."""

    def __init__(self, door: Door, settings: AdmissionSettings) -> None:
        self._door = door
        self._config = configuration(door, settings)
        self.state = ServerState()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._config.load()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: BoundedProtocol(config=self._config, server_state=self.state, app_state={}),
            "127.0.0.1",
            0,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._door.drain()
        self._server.close()
        for connection in list(self.state.connections):
            connection.transport.close()
        if self.state.tasks:
            _, late = await asyncio.wait(set(self.state.tasks), timeout=10)
            assert not late, "requests outlived the drain"
        await self._server.wait_closed()


class House:
    """Tenant ``acme`` (and others on demand) behind one door."""

    def __init__(
        self, runtime: Runtime, door: Door, listening: Listening, admin: Connection, worker: Runtime
    ) -> None:
        self.runtime = runtime
        self.door = door
        self.listening = listening
        self.admin = admin
        """The test's own way to the store: it may do everything, whatever the door may do."""
        self.worker = worker
        self.clients: list[Client] = []
        self.contracts: dict[str, Contract] = {}

    @property
    def port(self) -> int:
        return self.listening.port

    async def tenant(
        self, name: str = "acme", *, peers: tuple[str, ...] = ("alfa", "bravo", "counter")
    ) -> TenantHandle:
        """Create a tenant with both profiles and these peers."""
        await create_tenant(self.admin, name)
        for role in (Role.ADMISSION, Role.SIDECAR):
            await acl.grant(self.admin, role, name)
        for peer in peers:
            await register_peer(self.admin, name, PeerRecord(peer))
        for bundle in (counter_bundle(), notes_bundle()):
            contract = parse_bundle(bundle)
            self.contracts[contract.id] = contract
            await Contracts(name, self.admin).register(contract)
        return await self.runtime.tenant(name)

    async def handle(self, tenant: str = "acme") -> TenantHandle:
        return await self.runtime.tenant(tenant)

    async def token(self, principal: str, *roles: str, tenant: str = "acme", expires_in_s: int = 0) -> str:
        made = await create_token(self.admin, tenant, principal, roles or ("caller",), expires_in_s)
        return made.text()

    async def client(self, principal: str = "alice", *roles: str, tenant: str = "acme") -> Client:
        return self.client_with(await self.token(principal, *roles, tenant=tenant))

    def client_with(self, token: str) -> Client:
        client = Client(f"http://127.0.0.1:{self.port}", token)
        self.clients.append(client)
        return client

    async def raw_http(self, request: bytes, *, end: bool = False) -> bytes:
        """Send bytes on a connection of their own; everything that comes back until it is closed.

        The request must make the server close (``Connection: close``), or be so bad that it does.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            if end:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()

    # The worker

    async def _working(self, tenant: str) -> TenantHandle:
        """The tenant as a worker sees it: where users are restricted, a process of its own."""
        handle = await self.worker.tenant(tenant)
        if self.worker is not self.runtime:
            handle.snapshots.forget()
        return handle

    async def work(
        self,
        command_id: str,
        result: Mapping[str, Any] | None = None,
        *,
        session_id: str,
        tenant: str = "acme",
        updates: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        refused: tuple[str, str] | None = None,
    ) -> None:
        """Claim, answer and settle one command, as the workers' side does."""
        handle = await self._working(tenant)
        revisions = (await handle.snapshots.get()).revisions
        operation_id = command_operation_id(revisions.authority, command_id)
        op = await handle.reads.operation(operation_id, session_id)
        assert op is not None
        grant = await handle.store.claim(
            Claim(
                operation_id=operation_id,
                branch=0,
                peer=op.branches[0].peer,
                attempt=op.branches[0].attempt,
                holder=secrets.token_hex(8),
                lease_ms=10_000,
                max_claims=5,
                open_gate=True,
                session_id=session_id,
            ),
            revisions,
        )
        assert isinstance(grant, Grant), grant
        answer = Answer(
            result=msgspec.UNSET if refused else msgspec.Raw(msgspec.json.encode(result or {})),
            refused=Refusal(*refused) if refused else None,
            updates=tuple(
                NamedData(n, msgspec.Raw(msgspec.json.encode(d))) for n, d in (updates or {}).items()
            ),
            state=msgspec.Raw(msgspec.json.encode(state)) if state is not None else msgspec.UNSET,
            state_revision=grant.state_revision if state is not None else "",
        )
        body = encode(answer)
        reply = await handle.store.answer(grant.lease, answer_digest(body), body, revisions)
        assert reply.code is Code.OK, reply
        await self.settle(command_id, session_id=session_id, tenant=tenant)

    async def settle(self, command_id: str, *, session_id: str, tenant: str = "acme") -> None:
        """Decide once about a command and commit."""
        handle = await self._working(tenant)
        revisions = (await handle.snapshots.get()).revisions
        operation_id = command_operation_id(revisions.authority, command_id)
        op = await handle.reads.operation(operation_id, session_id)
        assert op is not None
        change = apply(op, terms(), anyone, "due", self.runtime.clock.lower_ms())
        assert change is not None, op
        reply = await handle.store.replace(op, change, revisions, 86_400_000)
        assert reply.code is Code.OK, reply

    async def purge(self, session_id: str, *command_ids: str, tenant: str = "acme") -> None:
        """Settle what is open in a closing session and turn it into tombstones, as the settling loop does."""
        handle = await self._working(tenant)
        revisions = (await handle.snapshots.get()).revisions
        operations = [command_operation_id(revisions.authority, command_id) for command_id in command_ids]
        reply = await handle.store.purge(session_id, operations, True, revisions)
        assert reply.code is Code.OK, reply


@asynccontextmanager
async def house(
    redis_url: str, *, declared: Boundary | None = None, tenants: tuple[str, ...] = ("acme",), **settings: Any
) -> AsyncIterator[House]:
    """A door over the store at ``redis_url``."""
    async with Connection(redis_url) as admin:
        for role in (Role.ADMISSION, Role.SIDECAR):
            await acl.grant(admin, role, *(tenants or ("acme",)))
        url, word = acl.login(redis_url, Role.ADMISSION), acl.declared(declared)
        values = {"redis_url": url, "metrics_port": -1, **settings}
        async with Runtime(url, word) as runtime, _worker(redis_url, runtime) as worker:
            door = Door(runtime, AdmissionSettings(**values))
            await runtime.refresh()
            async with Listening(door, AdmissionSettings(**values)) as listening:
                made = House(runtime, door, listening, admin, worker)
                for tenant in tenants:
                    await made.tenant(tenant)
                try:
                    yield made
                finally:
                    for client in made.clients:
                        await client.http.aclose()
        await acl.note_refusals(admin)


@asynccontextmanager
async def _worker(redis_url: str, runtime: Runtime) -> AsyncIterator[Runtime]:
    url = acl.login(redis_url, Role.SIDECAR)
    if url == redis_url:
        yield runtime
        return
    async with Runtime(url, runtime.declared) as worker:
        await worker.refresh()
        yield worker
