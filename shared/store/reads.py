"""Reads of one tenant's keys. Each that serves a caller also reads the authority and policy revision, in the
same pipeline and after all else, so that what is disclosed was still permitted when it was read (RT-AUTH-08,
DESIGN section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.domain.errors import Unavailable
from shared.domain.limits import TenantUsage
from shared.domain.records import (
    Admission,
    Branch,
    Decision,
    FactKind,
    Operation,
    Phase,
    SessionSeat,
    StoredAnswer,
    Tallies,
)
from shared.store.connection import Connection, ReplyError
from shared.store.keys import Keys
from shared.store.replies import Revisions, SessionRecord, StoreRefusal, TenantLost

_SESSION_FIELDS = (
    "phase",
    "actor",
    "profile",
    "profile_version",
    "owner",
    "contract",
    "head",
    "state",
    "state_rev",
    "busy",
    "halted",
    "pending",
    "commands",
)
_OP_FIELDS = (
    "admission",
    "at",
    "rev",
    "phase",
    "reservation",
    "state",
    "decision",
    "outcome_seq",
    "tombstone",
    "b:0",
    "r:0",
)

_admission_decoder = msgspec.json.Decoder(Admission)
_tallies_decoder = msgspec.json.Decoder(Tallies)
_decision_decoder = msgspec.json.Decoder(Decision)

Row = Sequence[bytes | None]


class SnapshotMoved(StoreRefusal):
    """The policy revision moved since the snapshot: reload, authorize again, repeat at once."""


class StoredFact(msgspec.Struct, frozen=True):
    """One session update as stored, with the sequence of its entry id and its commit instant in ms."""

    sequence: int
    kind: FactKind
    command_id: str
    payload: bytes
    at_ms: int


class Page(msgspec.Struct, frozen=True):
    """Updates after a cursor with the head they were read under, contiguous and ascending (DASPX-03)."""

    session: SessionRecord
    facts: tuple[StoredFact, ...]

    @property
    def head(self) -> int:
        return self.session.head


def unrefused(replies: Sequence[Any]) -> list[Any]:
    """The replies of a pipeline, each looked at: the first refusal among them is raised."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise reply
    return list(replies)


class CommandState(msgspec.Struct, frozen=True):
    """A command as its session's clients may know it; ``outcome_sequence`` is None while it is pending."""

    session: SessionRecord
    outcome_sequence: int | None


def _text(value: bytes | None) -> str:
    return value.decode() if value is not None else ""


def read_session(session_id: str, row: Row) -> SessionRecord | None:
    """A session from its fields, None where there is none."""
    if row[0] is None:
        return None
    (
        phase,
        actor,
        profile,
        version,
        owner,
        contract,
        head,
        state,
        state_rev,
        busy,
        halted,
        pending,
        commands,
    ) = row
    return SessionRecord(
        session_id=session_id,
        phase=_text(phase),
        actor=_text(actor),
        profile=_text(profile),
        profile_version=_text(version),
        owner=_text(owner),
        contract=_text(contract),
        head=int(head or 0),
        state=state or b"",
        state_revision=_text(state_rev) or "0",
        busy=_text(busy),
        halted=_text(halted),
        pending=int(pending or 0),
        commands=int(commands or 0),
    )


def read_fact(entry: Sequence[object]) -> StoredFact:
    """A fact from a stream entry [id, [k, v, ...]]."""
    entry_id, flat = entry
    assert isinstance(entry_id, bytes)
    assert isinstance(flat, list)
    values = dict(zip(flat[::2], flat[1::2], strict=True))
    return StoredFact(
        sequence=int(entry_id.split(b"-")[0]),
        kind=values[b"k"].decode(),
        command_id=values[b"c"].decode(),
        payload=values[b"p"],
        at_ms=int(values[b"t"]),
    )


class TenantReads:
    """The reads of one tenant over one shared connection; pages go over their own, so that they hold up
    nobody.
    """

    def __init__(self, tenant: str, connection: Connection, bulk: Connection) -> None:
        self.keys = Keys(tenant)
        self._connection = connection
        self._bulk = bulk

    def _check(self, row: object, revisions: Revisions) -> None:
        if isinstance(row, ReplyError):
            raise row
        assert isinstance(row, list)
        if row[0] is None or row[0].decode() != revisions.authority:
            raise TenantLost("the tenant's store is not the one its authority was recorded in")
        if row[1].decode() != revisions.policy:
            raise SnapshotMoved("the policy moved")

    async def _guarded(
        self, connection: Connection, revisions: Revisions, *commands: Sequence[bytes | str | int]
    ) -> list[Any]:
        # Revisions only grow: those that hold after a reading held during it. Others' commands may come in
        # between the commands of a pipeline.
        held = ("HMGET", self.keys.meta, "authority", "policy_rev")
        *found, last = await connection.pipeline(*commands, held)
        self._check(last, revisions)
        return unrefused(found)

    async def check(self, revisions: Revisions) -> None:
        """Return only while ``revisions`` hold: raises TenantLost or SnapshotMoved."""
        await self._guarded(self._connection, revisions)

    async def usage(self, revisions: Revisions) -> TenantUsage:
        """What the tenant keeps."""
        (stored,) = await self._guarded(self._connection, revisions, ("HGET", self.keys.meta, "usage"))
        return TenantUsage.parse(_text(stored))

    async def session(self, session_id: str, revisions: Revisions) -> SessionRecord | None:
        """One coherent reading of a session: its state includes every fact through its head and none after
        it.
        """
        command = ("HMGET", self.keys.session(session_id), *_SESSION_FIELDS)
        (row,) = await self._guarded(self._connection, revisions, command)
        return read_session(session_id, row)

    async def page(self, session_id: str, after: int, limit: int, revisions: Revisions) -> Page | None:
        """Up to ``limit`` facts after ``after``; None where the session does not exist or is closed."""
        row, entries = await self._guarded(
            self._bulk,
            revisions,
            ("HMGET", self.keys.session(session_id), *_SESSION_FIELDS),
            ("XRANGE", self.keys.updates(session_id), f"{after + 1}-0", "+", "COUNT", limit),
        )
        session = read_session(session_id, row)
        if session is None or session.phase == "closed":
            return None
        facts = tuple(fact for fact in map(read_fact, entries) if fact.sequence <= session.head)
        return Page(session, facts)

    async def command(self, session_id: str, operation_id: str, revisions: Revisions) -> CommandState | None:
        """A command of this session; None where it has none such, or the session is absent or closed."""
        row, op = await self._guarded(
            self._connection,
            revisions,
            ("HMGET", self.keys.session(session_id), *_SESSION_FIELDS),
            ("HMGET", self.keys.op(operation_id), "admission", "outcome_seq"),
        )
        assert isinstance(row, list)
        assert isinstance(op, list)
        session = read_session(session_id, row)
        # A tombstone keeps no admission: what was in it is gone with its session.
        if session is None or session.phase == "closed" or op[0] is None:
            return None
        if _admission_decoder.decode(op[0]).session_id != session_id:
            return None
        return CommandState(session, int(op[1]) if op[1] is not None else None)

    async def fact(self, session_id: str, sequence: int) -> StoredFact | None:
        """The fact at ``sequence``; the outcome a command settled with is read back from here
        (DASP-CORE-006c).
        """
        entries = await self._bulk.call(
            "XRANGE", self.keys.updates(session_id), f"{sequence}-0", f"{sequence}-0"
        )
        return read_fact(entries[0]) if entries else None

    async def cursor(self, session_id: str, client: str) -> int | None:
        """The server-held cursor of one client key, None before it was first put."""
        value = await self._connection.call("HGET", self.keys.cursors(session_id), client)
        return int(value) if value is not None else None

    async def due(self, now_ms: int, limit: int) -> list[tuple[str, int]]:
        """Members whose wake-up has come, earliest first, with the wake-up that was seen (ms)."""
        flat = await self._connection.call(
            "ZRANGEBYSCORE", self.keys.due, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, limit
        )
        return [(m.decode(), int(float(s))) for m, s in zip(flat[::2], flat[1::2], strict=True)]

    async def count_due(self, now_ms: int) -> int:
        """How many members' wake-up has come."""
        return int(await self._connection.call("ZCOUNT", self.keys.due, "-inf", now_ms))

    async def next_due_ms(self) -> int | None:
        """The earliest wake-up of the tenant."""
        flat = await self._connection.call("ZRANGE", self.keys.due, 0, 0, "WITHSCORES")
        return int(float(flat[1])) if flat else None

    async def queued(self, session_id: str, count: int = 1) -> list[str]:
        """Serial commands waiting, in admission order."""
        members = await self._connection.call("ZRANGE", self.keys.queue(session_id), 0, count - 1)
        return [m.decode() for m in members]

    async def operation(self, operation_id: str, session_id: str | None = None) -> Operation | None:
        """One operation with what a decision about it depends on; None for unused keys and tombstones.

        ``session_id`` saves a round trip where it is known ("" means none).
        """
        k = self.keys
        commands: list[Sequence[bytes | str | int]] = [
            ("HMGET", k.op(operation_id), *_OP_FIELDS),
            ("ZSCORE", k.due, operation_id),
        ]
        if session_id:
            commands += self._seat_commands(operation_id, session_id)
        row, score, *seat = unrefused(await self._connection.pipeline(*commands))
        if row[0] is None or row[8] is not None:
            return None
        admission = _admission_decoder.decode(row[0])
        if admission.session_id and not seat:
            more = self._seat_commands(operation_id, admission.session_id)
            seat = unrefused(await self._connection.pipeline(*more))
        return _operation(operation_id, admission, row, score, seat)

    def _seat_commands(self, operation_id: str, session_id: str) -> list[Sequence[bytes | str | int]]:
        k = self.keys
        return [
            ("HMGET", k.session(session_id), "phase", "busy", "state_rev", "state"),
            ("ZSCORE", k.queue(session_id), operation_id),
        ]


def _seat(operation_id: str, admission: Admission, replies: Sequence[object]) -> SessionSeat | None:
    if not admission.session_id:
        return None
    row, queued = replies
    if not isinstance(row, list) or row[0] is None:
        raise Unavailable(f"the session of {operation_id} is missing or unreadable")
    seat = "busy" if _text(row[1]) == operation_id else "queued" if queued is not None else "none"
    return msgspec.convert(
        {
            "seat": seat,
            "phase": _text(row[0]),
            "state_revision": _text(row[2]),
            "state": row[3] or b"",
        },
        SessionSeat,
    )


def _operation(
    operation_id: str, admission: Admission, row: Row, score: bytes | None, seat: Sequence[object]
) -> Operation:
    at, rev, phase, reservation, tallies, decision, outcome_seq = row[1:8]
    admitted, deadline, sequence, _reserve = map(int, _text(at).split(" "))
    words = _text(row[9])
    return Operation(
        id=operation_id,
        admission=admission,
        admitted_ms=admitted,
        deadline_ms=deadline,
        sequence=sequence,
        revision=_text(rev),
        phase=msgspec.convert(_text(phase), Phase),
        reservation=_text(reservation),
        words=(words,),
        branches=(Branch.parse(words),),
        answers={} if row[10] is None else {0: read_answer(row[10])},
        tallies=_tallies_decoder.decode(tallies) if tallies else Tallies(),
        decision=read_decision(decision) if decision else None,
        outcome_sequence=int(outcome_seq) if outcome_seq else None,
        wake_ms=int(float(score)) if score is not None else None,
        seat=_seat(operation_id, admission, seat),
    )


def read_answer(stored: bytes) -> StoredAnswer:
    """``<stored ms> <bytes>``."""
    at, body = stored.split(b" ", 1)
    return StoredAnswer(int(at), body)


def read_decision(stored: bytes) -> Decision:
    """``<committed ms> <json>``."""
    at, body = stored.split(b" ", 1)
    return msgspec.structs.replace(_decision_decoder.decode(body), at_ms=int(at))
