"""What a person looks at: one record whole, and lists made by a bounded scan.

Meant for records that went wrong as much as for healthy ones: what cannot be read is shown as unreadable,
with its bytes, and never stops a list. Nothing here serves a caller of the services, hence no policy is
asked; whoever has the store's credentials may read everything in it anyway. Instants are store milliseconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from shared.domain.ids import IdKind, check, command_operation_id, reservation_id
from shared.domain.records import Admission, Branch
from shared.store.connection import Connection, ReplyError
from shared.store.keys import Keys
from shared.store.parked import Parked, ParkedItem
from shared.store.reads import read_answer, read_decision, read_fact
from shared.store.registry import store_now_ms
from shared.store.replies import TenantLost

_STEP: Final = 500
_ROW_FIELDS: Final = ("admission", "at", "phase", "decision", "reservation", "tombstone")
_OTHER_TYPE: Final = "the key holds another type of value"
_DIGESTS: Final = frozenset({"intent"})
_admissions = msgspec.json.Decoder(Admission)
_parked = msgspec.json.Decoder(ParkedItem)

T = TypeVar("T")


class Window(msgspec.Struct, frozen=True):
    """How far one list goes: to about ``limit`` rows or ``keys`` keys, from a former list's cursor on."""

    limit: int = 100
    keys: int = 100_000
    cursor: str = "0"


class Found(msgspec.Struct, Generic[T], frozen=True):
    """Rows of one list; ``cursor`` goes on where it stopped, None where everything was looked at."""

    rows: tuple[T, ...]
    looked_at: int
    cursor: str | None


class DecisionView(msgspec.Struct, frozen=True, rename="camel"):
    """How an operation closed."""

    outcome: str
    reason: str
    settlement: str
    at_ms: int


class ParkedView(msgspec.Struct, frozen=True, rename="camel"):
    """Why settling failed on something, since when, how often it was tried, and when it is tried next."""

    reason: str
    since_ms: int
    tries: int
    next_ms: int

    @classmethod
    def of(cls, item: ParkedItem) -> ParkedView:
        """The same, named for JSON."""
        return cls(item.reason, item.since_ms, item.tries, item.next_ms)


class OperationRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One operation in a list. ``phase`` is ``tombstone`` for an id that only stays unusable.

    ``unreadable`` says what is wrong with a record that cannot be read; the other fields are empty then.
    """

    operation_id: str
    phase: str = ""
    session_id: str = ""
    command_id: str = ""
    interaction: str = ""
    principal: str = ""
    admitted_at_ms: int = 0
    deadline_ms: int = 0
    decision: DecisionView | None = None
    reservation: str = ""
    unreadable: str | None = None

    @property
    def open(self) -> bool:
        """Whether it is still owed a decision."""
        return self.phase not in ("settled", "tombstone", "")

    @property
    def uncertain(self) -> bool:
        """Whether a person has to find out what its work did: its key is quarantined for ever."""
        return self.reservation == "quarantined"


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One session, named as the API names its parts; a closed one keeps its tuple only."""

    session_id: str
    phase: str = ""
    owner: str = ""
    actor_id: str = ""
    profile: dict[str, str] = {}
    contract_digest: str = ""
    cursor: int = 0
    state: msgspec.Raw | None = None
    state_revision: str = ""
    busy: str = ""
    halted: str = ""
    pending: int = 0
    commands: int = 0
    opened_at_ms: int = 0
    unreadable: str | None = None


class BranchView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One branch with its lease; ``answer`` is stored evidence that no decision has taken up yet."""

    branch_id: str
    peer: str
    attempt: int
    status: str
    epoch: int
    fence: int
    holder: str | None
    until_ms: int
    gate: str
    claims: int
    next_at_ms: int
    outbox_entry: str | None
    answer: msgspec.Raw | None = None
    answer_stored_at_ms: int | None = None


class OperationView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One operation whole. ``fields`` are the stored bytes as text, digests in hex."""

    summary: OperationRow
    contract: dict[str, str] = {}
    candidates: tuple[str, ...] = ()
    reservation_id: str = ""
    revision: str = ""
    sequence: int = 0
    outcome_sequence: int | None = None
    outcome: msgspec.Raw | None = None
    input: msgspec.Raw | None = None
    branches: tuple[BranchView, ...] = ()
    wakes_at_ms: int | None = None
    seat: str = ""
    parked: ParkedView | None = None
    fields: dict[str, str] = {}


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """One session whole: beside its record what waits, in admission order, and every client's cursor."""

    session: SessionRow
    queue: tuple[str, ...] = ()
    cursors: dict[str, int] = {}
    turn_at_ms: int | None = None
    fields: dict[str, str] = {}


class DueRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One wake-up: an operation, or a session's next serial command (``turn:<session>``)."""

    member: str
    at_ms: int
    in_ms: int
    parked: ParkedView | None = None


class Inspector:
    """Looks at one tenant's keys. Raises as a connection does; single bad records never raise."""

    def __init__(self, connection: Connection, tenant: str) -> None:
        self.tenant = tenant
        self.keys = Keys(tenant)
        self._connection = connection

    async def command_operation(self, command_id: str) -> str:
        """The operation id of a session command. Raises TenantLost where the tenant has no authority."""
        authority = await self._connection.call("HGET", self.keys.meta, "authority")
        if authority is None:
            raise TenantLost(f"tenant {self.tenant} has no store")
        return command_operation_id(authority.decode(), check(IdKind.COMMAND, command_id))

    async def operations(
        self, window: Window, wanted: Callable[[OperationRow], bool] = lambda _: True
    ) -> Found[OperationRow]:
        """Operations in no particular order of the store, sorted by admission within one list."""
        found = await self._scan("op:", window, self._operation_rows, wanted)
        return msgspec.structs.replace(
            found, rows=tuple(sorted(found.rows, key=lambda row: (row.admitted_at_ms, row.operation_id)))
        )

    async def overdue(self, window: Window) -> Found[OperationRow]:
        """Operations past their deadline that are not settled: settling stands still, or failed on them."""
        now = await store_now_ms(self._connection)
        return await self.operations(
            window, lambda row: row.unreadable is not None or (row.open and row.deadline_ms <= now)
        )

    async def sessions(self, window: Window) -> Found[SessionRow]:
        """Sessions, open, closing and closed ones, sorted by id within one list."""
        found = await self._scan("session:", window, self._session_rows, lambda _: True)
        return msgspec.structs.replace(found, rows=tuple(sorted(found.rows, key=lambda row: row.session_id)))

    async def due(self, limit: int) -> list[DueRow]:
        """The next wake-ups, the earliest first."""
        now = await store_now_ms(self._connection)
        flat = await self._connection.call("ZRANGE", self.keys.due, 0, limit - 1, "WITHSCORES")
        parked = await self.parked()
        return [
            DueRow(
                member=_text(member),
                at_ms=(at := int(float(score))),
                in_ms=at - now,
                parked=parked.get(_text(member)),
            )
            for member, score in zip(flat[::2], flat[1::2], strict=True)
        ]

    async def parked(self) -> dict[str, ParkedView]:
        """What settling could not decide, by its member of ``due``."""
        found = await Parked(self._connection, self.tenant).items()
        return {member: ParkedView.of(item) for member, item in found.items()}

    async def operation(self, operation_id: str) -> OperationView | None:
        """One operation whole, None where the key is unused."""
        check(IdKind.OPERATION, operation_id)
        flat, score, parked = await self._connection.pipeline(
            ("HGETALL", self.keys.op(operation_id)),
            ("ZSCORE", self.keys.due, operation_id),
            ("HGET", self.keys.parked, operation_id),
        )
        if not flat:
            return None
        stored = _fields(flat)
        values = flat if isinstance(flat, ReplyError) else [stored.get(name) for name in _ROW_FIELDS]
        row = _operation_row(operation_id, values)
        view = OperationView(
            summary=row,
            reservation_id=str(reservation_id(operation_id)),
            wakes_at_ms=_score(score),
            parked=_tolerant(lambda: ParkedView.of(_parked.decode(parked)))
            if isinstance(parked, bytes)
            else None,
            fields={name: _shown(name, value) for name, value in stored.items()},
        )
        if row.unreadable is not None or row.phase == "tombstone":
            return view
        return await self._whole(view, stored)

    async def session(self, session_id: str) -> SessionView | None:
        """One session whole, None where the id was never used."""
        k = self.keys
        check(IdKind.SESSION, session_id)
        flat, queue, cursors, turn = await self._connection.pipeline(
            ("HGETALL", k.session(session_id)),
            ("ZRANGE", k.queue(session_id), 0, -1),
            ("HGETALL", k.cursors(session_id)),
            ("ZSCORE", k.due, "turn:" + session_id),
        )
        if not flat:
            return None
        stored = _fields(flat)
        held = [] if isinstance(cursors, ReplyError) else cursors
        return SessionView(
            session=_session_row(session_id, flat),
            queue=tuple(map(_text, [] if isinstance(queue, ReplyError) else queue)),
            cursors={_text(name): int(at) for name, at in zip(held[::2], held[1::2], strict=True)},
            turn_at_ms=_score(turn),
            fields={name: _shown(name, value) for name, value in stored.items()},
        )

    async def operation_of_reservation(self, wanted: str, window: Window) -> tuple[str | None, Found[str]]:
        """The operation whose key reservation has this id, by a scan: the id is derived one way only."""
        check(IdKind.UUID, wanted, "reservation")

        async def ids(names: Sequence[str]) -> dict[str, str]:
            return {name: name for name in names if str(reservation_id(name)) == wanted}

        found = await self._scan("op:", msgspec.structs.replace(window, limit=1), ids, lambda _: True)
        return (found.rows[0] if found.rows else None), found

    async def stored_bytes(self, sample: int) -> tuple[int, int]:
        """How many operations were measured, up to ``sample``, and the bytes they take together."""
        found = await self.operations(Window(limit=sample, keys=4 * _STEP))
        ids = [row.operation_id for row in found.rows[:sample]]
        if not ids:
            return 0, 0
        sizes = await self._connection.pipeline(*(("MEMORY", "USAGE", self.keys.op(name)) for name in ids))
        known = [size for size in sizes if isinstance(size, int)]
        return len(known), sum(known)

    async def _whole(self, view: OperationView, stored: dict[str, bytes]) -> OperationView:
        admission = _admissions.decode(stored["admission"])
        outcome_sequence = _number(stored.get("outcome_seq"))
        session_id, seat, outcome = admission.session_id, "", None
        if session_id:
            k = self.keys
            busy, queued, entries = await self._connection.pipeline(
                ("HGET", k.session(session_id), "busy"),
                ("ZSCORE", k.queue(session_id), view.summary.operation_id),
                ("XRANGE", k.updates(session_id), *([f"{outcome_sequence or 0}-0"] * 2)),
            )
            seat = "busy" if busy == view.summary.operation_id.encode() else "queued" if queued else "none"
            if outcome_sequence and isinstance(entries, list) and entries:
                outcome = msgspec.Raw(read_fact(entries[0]).payload)
        return msgspec.structs.replace(
            view,
            contract={
                "id": admission.contract,
                "version": admission.version,
                "digest": admission.digest,
                "interaction": admission.interaction,
            },
            candidates=admission.candidates,
            revision=_text(stored.get("rev", b"")),
            sequence=_instants(stored["at"])[2],
            outcome_sequence=outcome_sequence,
            outcome=outcome,
            input=_raw_json(stored.get("input")),
            branches=tuple(_branches(admission, stored)),
            seat=seat,
        )

    async def _operation_rows(self, names: Sequence[str]) -> dict[str, OperationRow]:
        commands = [("HMGET", self.keys.op(name), *_ROW_FIELDS) for name in names]
        replies = await self._connection.pipeline(*commands)
        return {name: _operation_row(name, reply) for name, reply in zip(names, replies, strict=True)}

    async def _session_rows(self, names: Sequence[str]) -> dict[str, SessionRow]:
        commands = [("HGETALL", self.keys.session(name)) for name in names]
        replies = await self._connection.pipeline(*commands)
        return {name: _session_row(name, reply) for name, reply in zip(names, replies, strict=True)}

    async def _scan(
        self,
        kind: str,
        window: Window,
        rows_of: Callable[[Sequence[str]], Awaitable[dict[str, T]]],
        wanted: Callable[[T], bool],
    ) -> Found[T]:
        """Whole steps of SCAN only: a step that was begun is shown in full, so its cursor loses nothing."""
        prefix = f"lg:{{{self.tenant}}}:{kind}"
        cursor, looked_at = window.cursor.encode(), 0
        seen: dict[str, T] = {}
        while True:
            cursor, keys = await self._connection.call("SCAN", cursor, "MATCH", prefix + "*", "COUNT", _STEP)
            names = [name for name in (_text(key)[len(prefix) :] for key in keys) if name not in seen]
            if names:
                seen.update((name, row) for name, row in (await rows_of(names)).items() if wanted(row))
            looked_at += _STEP
            if cursor == b"0" or len(seen) >= window.limit or looked_at >= window.keys:
                return Found(tuple(seen.values()), looked_at, None if cursor == b"0" else cursor.decode())


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")


def _fields(flat: Any) -> dict[str, bytes]:
    """A hash by field name; empty where the key held another type."""
    if isinstance(flat, ReplyError):
        return {}
    return {_text(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _score(reply: Any) -> int | None:
    return int(float(reply)) if isinstance(reply, bytes) else None


def _number(value: bytes | None) -> int | None:
    return int(value) if value else None


def _shown(name: str, value: bytes) -> str:
    return value.hex() if name in _DIGESTS else _text(value)


def _instants(stored: bytes) -> tuple[int, int, int]:
    admitted, deadline, sequence, _reserve = map(int, stored.split(b" "))
    return admitted, deadline, sequence


def _raw_json(value: bytes | None) -> msgspec.Raw | None:
    """Stored JSON as it is, None where there is none; bytes that are no JSON are left to ``fields``."""
    if value is None or _tolerant(lambda: msgspec.json.decode(value)) is None:
        return None
    return msgspec.Raw(value)


def _tolerant(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (ValueError, KeyError, msgspec.MsgspecError):
        return None


def _operation_row(operation_id: str, reply: Any) -> OperationRow:
    if isinstance(reply, ReplyError):
        return OperationRow(operation_id=operation_id, unreadable=_OTHER_TYPE)
    admission, at, phase, decision, reservation, tombstone = reply
    if tombstone is not None:
        return OperationRow(operation_id=operation_id, phase="tombstone", session_id=_text(tombstone))
    try:
        frozen = _admissions.decode(admission or b"")
        admitted, deadline, _ = _instants(at or b"")
        return OperationRow(
            operation_id=operation_id,
            phase=(phase or b"").decode(),
            session_id=frozen.session_id,
            command_id=frozen.command_id,
            interaction=frozen.name or frozen.interaction,
            principal=frozen.principal,
            admitted_at_ms=admitted,
            deadline_ms=deadline,
            decision=_decision(decision) if decision else None,
            reservation=(reservation or b"").decode().split(" ")[0],
        )
    except (ValueError, msgspec.MsgspecError) as error:
        return OperationRow(operation_id=operation_id, unreadable=f"the record does not read: {error}")


def _decision(stored: bytes) -> DecisionView:
    found = read_decision(stored)
    return DecisionView(found.outcome, found.reason, found.settlement, found.at_ms)


def _session_row(session_id: str, reply: Any) -> SessionRow:
    if isinstance(reply, ReplyError):
        return SessionRow(session_id=session_id, unreadable=_OTHER_TYPE)
    stored = _fields(reply)

    def text(name: str) -> str:
        return _text(stored.get(name, b""))

    try:
        return SessionRow(
            session_id=session_id,
            phase=text("phase"),
            owner=text("owner"),
            actor_id=text("actor"),
            profile={"id": text("profile"), "version": text("profile_version")},
            contract_digest=text("contract"),
            cursor=_number(stored.get("head")) or 0,
            state=_raw_json(stored.get("state") or None),
            state_revision=text("state_rev"),
            busy=text("busy"),
            halted=text("halted"),
            pending=_number(stored.get("pending")) or 0,
            commands=_number(stored.get("commands")) or 0,
            opened_at_ms=_number(stored.get("opened_ms")) or 0,
        )
    except ValueError as error:
        return SessionRow(session_id=session_id, unreadable=f"the record does not read: {error}")


def _branches(admission: Admission, stored: dict[str, bytes]) -> list[BranchView]:
    views = []
    for index, branch_id in enumerate(admission.branches):
        words = stored.get(f"b:{index}", b"")
        branch = _tolerant(lambda words=words: Branch.parse(words.decode()))  # type: ignore[misc]
        if branch is None:
            continue
        raw = stored.get(f"r:{index}")
        answer = _tolerant(lambda raw=raw: read_answer(raw)) if raw is not None else None  # type: ignore[misc]
        views.append(
            BranchView(
                branch_id=branch_id,
                peer=branch.peer,
                attempt=branch.attempt,
                status=branch.status,
                epoch=branch.epoch,
                fence=branch.fence,
                holder=branch.holder,
                until_ms=branch.until_ms,
                gate=branch.gate,
                claims=branch.claims,
                next_at_ms=branch.next_ms,
                outbox_entry=branch.outbox,
                answer=_raw_json(answer.body) if answer is not None else None,
                answer_stored_at_ms=answer.stored_ms if answer is not None else None,
            )
        )
    return views
