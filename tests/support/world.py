"""A tenant at store level, with the store's clock moved at its source: the scripts' clock include reads a key
that the test sets, so boundary instants are exact and nothing trusts the caller.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lua
from shared.domain.decide import Change, Event, Rights, Terms, apply
from shared.domain.guard import MAX_SAFE_INTEGER, TimeGuard
from shared.domain.ids import MessageKind, command_operation_id, intent_digest, message_id, operation_id
from shared.domain.policy import Action, Authorization
from shared.domain.records import (
    Admission,
    Answer,
    Operation,
    accepted_payload,
    answer_digest,
    encode,
)
from shared.store.clock import StoreClock
from shared.store.connection import Connection
from shared.store.reads import TenantReads
from shared.store.registry import PeerRecord, create_tenant, register_peer
from shared.store.replies import Claim, Grant, Lease, NewOperation, NewSession, Offer, Reply, Revisions
from shared.store.scripts import TenantStore

TENANT = "acme"
DIGEST = "sha256:" + "0" * 64
CLOCK_KEY = "test:clock"
MOVED_CLOCK = f"""
local function now_ms()
  local set = redis.call('GET', '{CLOCK_KEY}')
  if set then
    return tonumber(set)
  end
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
"""


OVERLAY = "LOCKGATE_TEST_LUA"
"""Names a folder whose files stand in for those under ``lua/``: the mutants of tests.mutants."""


@contextmanager
def _overlaid() -> Iterator[None]:
    folder = os.environ.get(OVERLAY)
    if not folder:
        yield
        return
    shipped = lua._read

    def read(path: str) -> str:
        other = Path(folder) / path
        return other.read_text() if other.exists() else shipped(path)

    with patch.object(lua, "_read", read):
        yield


def moved_scripts(replacements: Mapping[str, str] | None = None) -> dict[str, lua.Script]:
    """Every script with the test's clock, and with further includes replaced."""
    parts = {"time": MOVED_CLOCK, **(replacements or {})}
    with _overlaid():
        return {name: lua.pin(name, lua.expand(name, parts)) for name in lua.NAMES}


class BelievingClock(StoreClock):
    """Believes every time: these tests move the store's clock, the estimate has tests of its own."""

    bound = MAX_SAFE_INTEGER
    """The upper bound of every guard (ms)."""

    def observe(self, store_ms: int, sent_at: float, received_at: float) -> None:
        pass

    def not_after(self, limit: int = 0) -> int:
        return self.bound


def terms(**changes: Any) -> Terms:
    """Terms of a contract with small, distinct durations."""
    values: dict[str, Any] = {
        "effects": "none",
        "claim_timeout_ms": 1000,
        "max_claims": 3,
        "max_attempts": 3,
        "backoff_ms": 200,
        "replay_ms": 86_400_000,
        "halt_on_uncertain": False,
        "succeeds": lambda _: True,
        "retryable": lambda value: isinstance(value, dict) and value.get("again") is True,
    }
    return Terms(**{**values, **changes})


def anyone(_action: Action, _branch: int, _peer: str, _attempt: int) -> Authorization:
    """Everybody may do everything, for ever."""
    return Authorization(True, "1", MAX_SAFE_INTEGER)


class World:
    """One tenant with two peers over a real store."""

    def __init__(
        self, connection: Connection, authority: str, scripts: Mapping[str, lua.Script] | None = None
    ) -> None:
        self.connection = connection
        self.revisions = Revisions(authority, "1", "3")
        self.clock = BelievingClock()
        self._pinned = scripts or moved_scripts()
        self.serve_over(connection)
        self.keys = self.store.keys
        self.epochs_moved = 0

    def serve_over(self, connection: Connection) -> None:
        """Let scripts and reads go over a connection of their own; what arranges and looks stays."""
        self.store = TenantStore(TENANT, connection, self.clock, self.epoch_moved, self._pinned)
        self.reads = TenantReads(TENANT, connection, connection)

    @classmethod
    async def create(cls, connection: Connection, scripts: Mapping[str, lua.Script] | None = None) -> World:
        authority = await create_tenant(connection, TENANT)
        for peer in ("alfa", "bravo"):
            await register_peer(connection, TENANT, PeerRecord(peer))
        return cls(connection, authority, scripts)

    async def epoch_moved(self, store: TenantStore, authority: str) -> None:
        self.epochs_moved += 1
        meta = await self.connection.call("HGET", self.keys.meta, "replid")
        info = await self.connection.call("INFO", "replication")
        replid = info.decode().split("master_replid:")[1].split()[0]
        await store.raise_epoch(authority, meta.decode(), replid, "process-restart")

    async def at(self, now_ms: int) -> None:
        """Set the store's clock."""
        await self.connection.call("SET", CLOCK_KEY, now_ms)

    async def start(self) -> int:
        """Fix the store's clock at its present time, so that a test can step it; gives that time in ms."""
        last = int(await self.connection.call("HGET", self.keys.meta, "last_ms"))
        await self.at(last)
        return last

    async def open(self, session_id: str = "s1", state: bytes = b'{"value":0}', **changes: Any) -> Reply:
        values: dict[str, Any] = {
            "session_id": session_id,
            "actor_id": "a1",
            "profile_id": "urn:x:p",
            "profile_version": "1",
            "digest": DIGEST,
            "owner": "alice",
            "state": state,
        }
        return await self.store.open_session(NewSession(**{**values, **changes}), self.revisions, ANY_TIME)

    def command(
        self,
        command_id: str = "c1",
        *,
        session_id: str = "s1",
        input_bytes: bytes = b'{"amount":3}',
        name: str = "counter.add",
        kind: str = "serial",
        timeout_ms: int = 10_000,
        peers: tuple[str, ...] = ("alfa",),
    ) -> NewOperation:
        op = command_operation_id(self.revisions.authority, command_id)
        admission = Admission(
            principal="alice",
            contract="demo.counter",
            version="1",
            digest=DIGEST,
            interaction="add",
            branches=(peers[0],),
            candidates=peers,
            policy_revision=self.revisions.policy,
            directory_revision=self.revisions.directory,
            session_id=session_id,
            command_id=command_id,
            name=name,
        )
        return NewOperation(
            kind=kind,
            operation_id=op,
            intent=intent_digest(session_id, name, input_bytes),
            admission=encode(admission),
            input=input_bytes,
            timeout_ms=timeout_ms,
            claim_timeout_ms=1000,
            offers=(Offer(peers[0], message_id(MessageKind.REQUEST, DIGEST, op, peers[0], 1)),),
            session_id=session_id,
            command_id=command_id,
            accepted=accepted_payload(name),
        )

    def invocation(
        self,
        key: str = "k1",
        *,
        principal: str = "alice",
        digest: str = DIGEST,
        input_bytes: bytes = b"{}",
        peers: tuple[str, ...] = ("alfa", "bravo"),
        timeout_ms: int = 10_000,
    ) -> NewOperation:
        op = operation_id(principal, digest, key)
        admission = Admission(
            principal=principal,
            contract="demo.review",
            version="1",
            digest=digest,
            interaction="review",
            branches=peers,
            candidates=peers,
            policy_revision=self.revisions.policy,
            directory_revision=self.revisions.directory,
            invocation_key=key,
        )
        return NewOperation(
            kind="invocation",
            operation_id=op,
            intent=hashlib.sha256(b"review" + input_bytes).digest(),
            admission=encode(admission),
            input=input_bytes,
            timeout_ms=timeout_ms,
            claim_timeout_ms=1000,
            offers=tuple(Offer(p, message_id(MessageKind.REQUEST, digest, op, p, 1)) for p in peers),
        )

    async def admit(self, new: NewOperation, guard: TimeGuard | None = None) -> Reply:
        return await self.store.admit(new, self.revisions, guard or ANY_TIME)

    async def claim(
        self, new: NewOperation, holder: str | None = None, *, open_gate: bool = True, **changes: Any
    ) -> Grant | Reply:
        values: dict[str, Any] = {
            "operation_id": new.operation_id,
            "branch": 0,
            "peer": "alfa",
            "attempt": 1,
            "holder": holder or secrets.token_hex(8),
            "lease_ms": 1000,
            "max_claims": 3,
            "open_gate": open_gate,
            "session_id": new.session_id,
        }
        return await self.store.claim(Claim(**{**values, **changes}), self.revisions)

    async def granted(self, new: NewOperation, holder: str | None = None, **changes: Any) -> Grant:
        grant = await self.claim(new, holder, **changes)
        assert isinstance(grant, Grant), grant
        return grant

    async def answer(self, lease: Lease, answer: Answer) -> Reply:
        body = encode(answer)
        return await self.store.answer(lease, answer_digest(body), body, self.revisions)

    async def load(self, new: NewOperation) -> Operation:
        op = await self.reads.operation(new.operation_id, new.session_id)
        assert op is not None
        return op

    async def decide(
        self,
        new: NewOperation,
        now_ms: int,
        event: Event = "due",
        *,
        rights: Rights = anyone,
        **changes: Any,
    ) -> Reply | None:
        """Load, decide and commit once; None when there was nothing to do."""
        op = await self.load(new)
        change = apply(op, terms(**changes), rights, event, now_ms)
        return None if change is None else await self.commit(op, change)

    async def commit(self, op: Operation, change: Change) -> Reply:
        return await self.store.replace(op, change, self.revisions, 86_400_000)

    async def dump(self) -> dict[bytes, object]:
        """Everything the store holds, for state comparisons."""
        found: dict[bytes, object] = {}
        for key in sorted(await self.connection.call("KEYS", "lg:*")):
            found[key] = await self.connection.call("DUMP", key)
        return found


ANY_TIME = TimeGuard(0, MAX_SAFE_INTEGER)
