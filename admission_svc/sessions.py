"""Sessions as any carrier serves them: open, view, replay, outcomes, cursors, closing.

Every answer is read together with the revisions it was authorized under, so nothing is disclosed that was
no longer permitted when it was read. A session that is missing, closed or somebody else's is NotFound, the
same in every case.
"""

from __future__ import annotations

from typing import Final

import msgspec

from admission_svc.auth import SessionRef, Visit, authorize
from admission_svc.messages import SessionOpen
from admission_svc.problems import exceeded
from shared.domain.canonical import MAX_MESSAGE_BYTES
from shared.domain.errors import Conflict, InputFault, InvalidInput, NotFound, Unavailable, Unsupported
from shared.domain.events import Renderer
from shared.domain.guard import TimeGuard
from shared.domain.ids import command_operation_id
from shared.domain.policy import Authorization
from shared.store.codes import Code
from shared.store.connection import ReplyLost
from shared.store.inspection import refusal
from shared.store.keys import cursor_field
from shared.store.reads import Page, SnapshotMoved
from shared.store.replies import NewSession, Reply, SessionRecord
from shared.store.runtime import Runtime
from shared.store.scripts import CLIENTS_PER_SESSION

OPENING_WINDOW_MS: Final = 10_000
_PAGE_ENVELOPE_BYTES: Final = 512


class Opened(msgspec.Struct, frozen=True):
    """A session that is open, its head, and whether this call made it."""

    session_id: str
    asked: SessionOpen
    head: int
    created: bool


class Replay(msgspec.Struct, frozen=True):
    """Rendered updates after ``after``; ``next`` is the last of them, or ``after`` where there are none."""

    after: int
    next: int
    head: int
    events: tuple[bytes, ...]


class Settled(msgspec.Struct, frozen=True):
    """A command's terminal update: its sequence and its payload as stored."""

    sequence: int
    outcome: bytes


class Sessions:
    """The session functions over one store."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def open(self, visit: Visit, session_id: str, asked: SessionOpen) -> Opened:
        """Open or reopen a session for the caller (DASP-CORE-011a, DASPX-11).

        Raises Conflict where the id names another actor or profile, NotFound where it names a session of
        somebody else or a deleted one, Unsupported for a profile that is not registered, Unavailable.
        """
        contract = await visit.handle.contracts.by_profile(asked.profile.id, asked.profile.version)
        named = SessionRef(session_id, profile=asked.profile.id, contract=contract.id if contract else "")
        # Judged on what was sent alone first: a refusal says nothing about whether the session is there.
        permission = authorize(visit, "session.open", named)
        record = await visit.handle.reads.session(session_id, visit.revisions)
        if record is not None:
            return await _reopened(visit, record, asked)
        if contract is None or contract.session is None:
            raise Unsupported("no such session profile is registered here")
        await self._check_may_promise()
        new = NewSession(
            session_id=session_id,
            actor_id=asked.actor_id,
            profile_id=asked.profile.id,
            profile_version=asked.profile.version,
            digest=contract.digest,
            owner=visit.caller.principal,
            state=contract.session.initial,
        )
        reply = await self._open(visit, new, permission.expires_ms)
        if reply.code is Code.OK:
            return Opened(session_id, asked, 0, created=True)
        if reply.code in (Code.DUPLICATE, Code.CONFLICT):
            # Somebody was faster, or this call's own lost reply was: it is judged as the one it has become.
            record = await visit.handle.reads.session(session_id, visit.revisions)
            if record is None:
                raise NotFound
            return await _reopened(visit, record, asked)
        raise _refused(reply)

    async def view(self, visit: Visit, session_id: str) -> SessionRecord:
        """One coherent reading of a session: its state holds every fact through its head and none after."""
        return await _known(visit, await visit.handle.reads.session(session_id, visit.revisions))

    async def outcome(self, visit: Visit, session_id: str, command_id: str) -> Settled | None:
        """The outcome of a command, None while it is pending. NotFound for a command that this session does
        not have, never a false *pending* (DASPX-04, DASP-CORE-006c).
        """
        operation_id = command_operation_id(visit.revisions.authority, command_id)
        state = await visit.handle.reads.command(session_id, operation_id, visit.revisions)
        if state is None:
            raise NotFound
        await _known(visit, state.session)
        if state.outcome_sequence is None:
            return None
        fact = await visit.handle.reads.fact(session_id, state.outcome_sequence)
        if fact is None:
            # A session that was purged in between has none of its facts left.
            raise NotFound
        return Settled(fact.sequence, fact.payload)

    async def replay(self, visit: Visit, session_id: str, after: int, limit: int) -> Replay:
        """A page of updates: contiguous from ``after`` + 1, at most ``limit`` and 1 MiB encoded (DASPX-03).

        Raises InvalidInput (``invalid_cursor``) where ``after`` is beyond the head.
        """
        page = await visit.handle.reads.page(session_id, after, limit, visit.revisions)
        record = await _known(visit, page.session if page is not None else None)
        assert page is not None, "a session that is known has a page"
        if after > record.head:
            raise InvalidInput("after", "must not be beyond the head of the session", code=InputFault.CURSOR)
        return _rendered(visit, page, after)

    async def held_cursor(self, visit: Visit, session_id: str, client: str) -> int:
        """The cursor held for a client of the caller, 0 before it was first put."""
        field = cursor_field(visit.caller.principal, client)
        held = await visit.handle.reads.cursor(session_id, field)
        # Asked last: what was read before it was permitted when it was read.
        await self.view(visit, session_id)
        return held or 0

    async def put_cursor(self, visit: Visit, session_id: str, client: str, cursor: int) -> int:
        """Move a client's cursor forward and give the one now held; an earlier one changes nothing.

        Raises InvalidInput beyond the head, Unavailable where the session holds no more of them.
        """
        record = await visit.handle.reads.session(session_id, visit.revisions)
        permission = await _may_read(visit, record)
        field = cursor_field(visit.caller.principal, client)
        reply = await visit.handle.store.put_cursor(
            session_id, field, cursor, visit.revisions, permission.expires_ms
        )
        if reply.code is Code.OK:
            return reply.number(0)
        if reply.code is Code.INVALID:
            raise InvalidInput(
                "/cursor", "must not be beyond the head of the session", code=InputFault.CURSOR
            )
        if reply.code is Code.EXHAUSTED:
            raise Unavailable(f"a session holds cursors of {CLIENTS_PER_SESSION} clients at most")
        raise _refused(reply)

    async def close(self, visit: Visit, session_id: str) -> bool:
        """Begin to close a session for good; True once it is closed (DASP-CORE-012f)."""
        record = await visit.handle.reads.session(session_id, visit.revisions)
        if record is None:
            raise NotFound
        permission = authorize(visit, "session.close", await _ref(visit, record))
        if record.phase == "closed":
            return True
        reply = await visit.handle.store.close_session(session_id, visit.revisions, permission.expires_ms)
        if reply.code is Code.OK:
            return False
        if reply.code is Code.NOT_FOUND:
            return True
        raise _refused(reply)

    async def _check_may_promise(self) -> None:
        runtime = self._runtime
        if runtime.durability is None or not runtime.clock.known:
            await runtime.refresh()
        why = refusal(runtime.durability) if runtime.durability is not None else None
        if runtime.clock.suspect:
            why = "the store's clock jumped ahead; new sessions wait until it is believed again"
        if why is not None:
            raise Unavailable(why)

    async def _open(self, visit: Visit, new: NewSession, expires_ms: int) -> Reply:
        """Open within a permission that ends at ``expires_ms`` (RT-AUTH-09).

        A lost reply is resolved by the identical call: it opens at most once, in the same window.
        """
        clock = self._runtime.clock
        started = clock.lower_ms()
        guard = TimeGuard(started, min(started + OPENING_WINDOW_MS, clock.not_after(), expires_ms))
        try:
            return await visit.handle.store.open_session(new, visit.revisions, guard)
        except ReplyLost:
            return await visit.handle.store.open_session(new, visit.revisions, guard)


async def _ref(visit: Visit, record: SessionRecord) -> SessionRef:
    """A session as permissions see it. Only a policy asks for the contract, which is named by its digest."""
    contract = None
    if visit.snapshot.policy.document is not None:
        contract = await visit.handle.contracts.by_digest(record.contract)
    return SessionRef(record.session_id, record.owner, record.profile, contract.id if contract else "")


async def _may_read(visit: Visit, record: SessionRecord | None) -> Authorization:
    if record is None or record.phase == "closed":
        raise NotFound
    return authorize(visit, "session.read", await _ref(visit, record))


async def _known(visit: Visit, record: SessionRecord | None) -> SessionRecord:
    await _may_read(visit, record)
    assert record is not None, "what is missing may not be read"
    return record


async def _reopened(visit: Visit, record: SessionRecord, asked: SessionOpen) -> Opened:
    if record.phase == "closed":
        raise NotFound
    authorize(visit, "session.open", await _ref(visit, record))
    held = record.actor, record.profile, record.profile_version
    if held != (asked.actor_id, asked.profile.id, asked.profile.version):
        raise _other_tuple()
    return Opened(record.session_id, asked, record.head, created=False)


def _other_tuple() -> Conflict:
    return Conflict("the session was opened with another actor or profile")


def _rendered(visit: Visit, page: Page, after: int) -> Replay:
    session_id = page.session.session_id
    renderer = Renderer(visit.tenant, visit.revisions.authority, session_id)
    room = MAX_MESSAGE_BYTES - _PAGE_ENVELOPE_BYTES
    events: list[bytes] = []
    last = after
    for fact in page.facts:
        event = renderer.update(fact.sequence, fact.kind, fact.command_id, fact.payload, fact.at_ms)
        room -= len(event) + 1
        # One update always fits: it is bounded far below a page when it is saved.
        if room < 0 and events:
            break
        events.append(event)
        last = fact.sequence
    return Replay(after, last, page.head, tuple(events))


def _refused(reply: Reply) -> Exception:
    if reply.code is Code.CAPACITY:
        return exceeded(reply).unavailable()
    if reply.code is Code.NOT_FOUND:
        return NotFound()
    if reply.code is Code.STALE_SNAPSHOT:
        return SnapshotMoved("the tenant's policy or directory moved")
    if reply.code is Code.OUTSIDE_WINDOW:
        return Unavailable("the window of the request closed without a commit; repeat it unchanged")
    return Unavailable("the store holds something here that it should not; an operator must look at it")
