"""A tenant with a contract of one command, admitted into at store level, and what can be read back of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from settlement_svc.handler import Endpoint
from settlement_svc.settle import Settler
from settlement_svc.sidecar import Sidecar
from shared.domain.contract import Contract, parse_bundle
from shared.domain.guard import TimeGuard
from shared.domain.ids import MessageKind, command_operation_id, intent_digest, message_id
from shared.domain.records import Admission, Answer, Operation, accepted_payload, answer_digest, encode
from shared.store import registry
from shared.store.acl import Role
from shared.store.codes import Code
from shared.store.connection import Connection
from shared.store.contracts import Contracts
from shared.store.reads import StoredFact
from shared.store.registry import PeerRecord
from shared.store.replies import Claim, Grant, NewOperation, NewSession, Offer, SessionRecord
from shared.store.runtime import Runtime, TenantHandle
from tests.support import acl
from tests.support.polling import wait_until

TENANT = "acme"
PEER = "worker"
LEASE = {"leaseMs": 10_000, "renewMs": 2_000, "claimTimeoutMs": 10_000, "maxClaims": 3}
"""Longer than a test on a busy machine: what runs out is declared by the test that is about it."""

DONE = Answer(result=msgspec.Raw(b'{"ok":true}'), state=msgspec.Raw(b'{"n":1}'), state_revision="0")


def contract(
    *,
    effects: str = "none",
    execution: str = "serial",
    on_uncertain: str = "continue",
    timeout_ms: int = 60_000,
    lease: dict[str, int] | None = None,
    retry: dict[str, int] | None = None,
    peers: tuple[str, ...] = (PEER,),
) -> Contract:
    """A profile with the command ``work.do``: any object in; ``{"ok": true}`` is success, ``{"again":
    true}`` a retry.
    """
    anything: dict[str, Any] = {"type": "object"}
    session: dict[str, Any] = {
        "id": "urn:x:work",
        "profileVersion": "1",
        "execution": execution,
        "onUncertain": on_uncertain,
        "commands": {"work.do": "do"},
        "updates": {"work.done": anything},
    }
    if execution == "serial":
        session |= {"state": {"type": "object", "required": ["n"]}, "initial": {"n": 0}}
    document = {
        "contract": "test.work",
        "version": "1",
        "interactions": {
            "do": {
                "input": anything,
                "result": {**anything, "properties": {"ok": {"type": "boolean"}}},
                "success": {"pointer": "/ok", "equals": True},
                "retryable": {"pointer": "/again", "equals": True},
                "audience": {"peers": list(peers)},
                "delivery": "one-eligible",
                "completion": {"mode": "first-success"},
                "timeoutMs": timeout_ms,
                "lease": {**LEASE, **(lease or {})},
                "retry": {"maxAttempts": 3, "backoffMs": 30, **(retry or {})},
                "effects": effects,
                "maxResultBytes": 2_000,
            }
        },
        "session": session,
    }
    return parse_bundle(json.dumps(document).encode())


class Host:
    """One tenant of the store at ``url``, seen from a process of the tests."""

    def __init__(
        self, url: str, runtime: Runtime, handle: TenantHandle, terms: Contract, admin: Connection
    ) -> None:
        self.url = url
        self.runtime = runtime
        self.handle = handle
        self.contract = terms
        self.admin = admin
        """The test's own way to the store: it may do everything, whatever the workers may do."""
        self.door = handle
        """The tenant as admission sees it."""
        self.settler = Settler(runtime, handle)

    @classmethod
    @contextlib.asynccontextmanager
    async def create(cls, url: str, terms: Contract, peers: tuple[str, ...] = (PEER,)) -> AsyncIterator[Host]:
        async with Connection(url) as admin:
            await cls._create(admin, TENANT, terms, peers)
            async with cls._at(url, terms, admin) as host:
                yield host
            await acl.note_refusals(admin)

    @classmethod
    async def furnish(
        cls, url: str, runtime: Runtime, tenant: str, terms: Contract, peers: tuple[str, ...] = (PEER,)
    ) -> Host:
        """Create one tenant more, seen from a process that may do everything."""
        await cls._create(runtime.connection, tenant, terms, peers)
        return cls(url, runtime, await runtime.tenant(tenant), terms, runtime.connection)

    @staticmethod
    async def _create(admin: Connection, tenant: str, terms: Contract, peers: tuple[str, ...]) -> None:
        await registry.create_tenant(admin, tenant)
        for peer in peers:
            await registry.register_peer(admin, tenant, PeerRecord(peer))
        await Contracts(tenant, admin).register(terms)
        for role in Role:
            await acl.grant(admin, role, tenant)

    @classmethod
    @contextlib.asynccontextmanager
    async def _at(cls, url: str, terms: Contract, admin: Connection) -> AsyncIterator[Host]:
        """A process of the workers' side; where users are restricted, its admissions are another's."""
        worker, door = acl.login(url, Role.SIDECAR), acl.login(url, Role.ADMISSION)
        async with contextlib.AsyncExitStack() as stack:
            runtime = await stack.enter_async_context(Runtime(worker, acl.declared()))
            await runtime.refresh()
            host = cls(url, runtime, await runtime.tenant(TENANT), terms, admin)
            if worker != door:
                other = await stack.enter_async_context(Runtime(door, acl.declared()))
                await other.refresh()
                host.door = await other.tenant(TENANT)
            yield host

    @contextlib.asynccontextmanager
    async def join(self, url: str) -> AsyncIterator[Host]:
        """The same tenant as another process sees it, perhaps through a proxy."""
        async with self._at(url, self.contract, self.admin) as host:
            yield host

    # Admission, as the door does it

    def _guard(self) -> TimeGuard:
        now = self.runtime.clock.lower_ms()
        return TimeGuard(now - 1_000, now + 5_000)

    async def open(self, session_id: str = "s1") -> None:
        profile = self.contract.session
        assert profile is not None
        new = NewSession(
            session_id, "a1", profile.id, profile.version, self.contract.digest, "alice", profile.initial
        )
        revisions = (await self.door.snapshots.get()).revisions
        reply = await self.door.store.open_session(new, revisions, self._guard())
        assert reply.code is Code.OK, reply

    async def submit(
        self,
        command_id: str,
        payload: object = None,
        *,
        session_id: str = "s1",
        name: str = "work.do",
        timeout_ms: int | None = None,
    ) -> str:
        """Admit a command; gives its operation id."""
        assert self.contract.session is not None
        snapshot = await self.door.snapshots.get()
        interaction = self.contract.command(name)
        body = json.dumps(payload if payload is not None else {}).encode()
        operation = self.operation_id(command_id)
        candidates = tuple(sorted(interaction.audience.peers))
        admission = Admission(
            principal="alice",
            contract=self.contract.id,
            version=self.contract.version,
            digest=self.contract.digest,
            interaction=interaction.name,
            branches=candidates[:1],
            candidates=candidates,
            policy_revision=snapshot.revisions.policy,
            directory_revision=snapshot.revisions.directory,
            session_id=session_id,
            command_id=command_id,
            name=name,
        )
        message = message_id(MessageKind.REQUEST, self.contract.digest, operation, candidates[0], 1)
        new = NewOperation(
            kind="serial" if self.contract.session.serial else "concurrent",
            operation_id=operation,
            intent=intent_digest(session_id, name, body),
            admission=encode(admission),
            input=body,
            timeout_ms=timeout_ms or interaction.timeout_ms,
            claim_timeout_ms=interaction.lease.claim_timeout_ms,
            offers=(Offer(candidates[0], message),),
            session_id=session_id,
            command_id=command_id,
            accepted=accepted_payload(name),
        )
        reply = await self.door.store.admit(new, snapshot.revisions, self._guard())
        assert reply.code is Code.OK, reply
        return operation

    async def close(self, session_id: str = "s1") -> None:
        revisions = (await self.door.snapshots.get()).revisions
        assert (await self.door.store.close_session(session_id, revisions)).code is Code.OK

    # Working by hand, as a worker of the outbox would

    async def grant(
        self,
        operation_id: str,
        *,
        attempt: int = 1,
        lease_ms: int = 60_000,
        holder: str = "h1",
        peer: str = PEER,
    ) -> Grant:
        """Claim with the gate open."""
        claim = Claim(
            operation_id=operation_id,
            branch=0,
            peer=peer,
            attempt=attempt,
            holder=holder,
            lease_ms=lease_ms,
            max_claims=3,
            open_gate=True,
            session_id="s1",
        )
        revisions = (await self.handle.snapshots.get()).revisions
        reply = await self.handle.store.claim(claim, revisions)
        assert isinstance(reply, Grant), reply
        return reply

    async def store_answer(self, granted: Grant, answer: Answer = DONE) -> None:
        body = encode(answer)
        revisions = (await self.handle.snapshots.get()).revisions
        reply = await self.handle.store.answer(granted.lease, answer_digest(body), body, revisions)
        assert reply.code is Code.OK, reply

    async def lost(self, operation_id: str) -> bool:
        """Whether the lease or offer has run out."""
        op = await self.handle.reads.operation(operation_id)
        assert op is not None
        return op.branches[0].until_ms < self.runtime.clock.lower_ms()

    # Reading back

    def operation_id(self, command_id: str) -> str:
        current = self.handle.snapshots._current or self.door.snapshots._current
        assert current is not None
        return command_operation_id(current.revisions.authority, command_id)

    async def operation(self, command_id: str) -> Operation:
        op = await self.handle.reads.operation(self.operation_id(command_id))
        assert op is not None
        return op

    async def session(self, session_id: str = "s1") -> SessionRecord:
        revisions = (await self.handle.snapshots.get()).revisions
        session = await self.handle.reads.session(session_id, revisions)
        assert session is not None
        return session

    async def facts(self, session_id: str = "s1") -> list[StoredFact]:
        revisions = (await self.handle.snapshots.get()).revisions
        page = await self.handle.reads.page(session_id, 0, 1_000, revisions)
        assert page is not None
        return list(page.facts)

    async def outcomes(self, command_id: str, session_id: str = "s1") -> list[dict[str, Any]]:
        """Every terminal fact of a command: one, or none while it is pending."""
        return [
            json.loads(fact.payload)
            for fact in await self.facts(session_id)
            if fact.kind == "outcome" and fact.command_id == command_id
        ]

    async def outcome(self, command_id: str, session_id: str = "s1", within: float = 15.0) -> dict[str, Any]:
        """Wait until a command has settled; its one outcome."""
        found = await wait_until(lambda: self.outcomes(command_id, session_id), within)
        assert len(found) == 1
        only: dict[str, Any] = found[0]
        return only

    # Working in this process

    @contextlib.asynccontextmanager
    async def settling(self, settler: Settler | None = None) -> AsyncIterator[None]:
        """A settling loop in this process."""
        task = asyncio.create_task((settler or self.settler).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def sidecar(
        self, url: str, *, peer: str = PEER, concurrency: int = 4, drain_s: float = 0.2
    ) -> AsyncIterator[Sidecar]:
        """A sidecar and its settling loop in this process; the end of the block drains it."""
        sidecar = Sidecar(
            self.runtime,
            self.handle,
            self.settler,
            peer=peer,
            endpoint=Endpoint.parse(url),
            concurrency=concurrency,
        )
        stop = asyncio.Event()
        running = asyncio.create_task(sidecar.run(stop, drain_s))
        try:
            async with self.settling():
                yield sidecar
                stop.set()
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
