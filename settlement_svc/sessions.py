"""What a session needs besides its commands: the next serial command's turn, and the way from closing to
closed.

Both are woken by the member ``turn:<session>`` of ``due`` and repeat safely: every step is a script that
asserts what it was decided from, so a process that dies in between leaves only work to continue.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from settlement_svc.contention import ROUNDS, Undecidable, Verdict, back_off_s
from shared.domain.decide import right_to_assign
from shared.domain.ids import command_operation_id
from shared.domain.records import Operation
from shared.store.codes import Code
from shared.store.connection import ReplyLost
from shared.store.reads import SnapshotMoved
from shared.store.replies import NEXT_TURN, SessionRecord
from shared.store.runtime import TenantHandle
from shared.store.scripts import TOMBSTONES_PER_CHUNK
from shared.store.snapshot import Snapshot

if TYPE_CHECKING:
    from settlement_svc.settle import Settler

_QUEUE_CHUNK: Final = 64


class Sessions:
    """The turns and closings of one tenant's sessions."""

    def __init__(self, handle: TenantHandle, settler: Settler) -> None:
        self._handle = handle
        self._settler = settler

    async def after(self, op: Operation) -> None:
        """What follows at once when a command was settled: who waits gets its turn, a closing session goes
        on.
        """
        if op.seat is None:
            return
        session_id = op.admission.session_id
        closing = op.seat.phase == "closing"
        if closing or (op.seat.seat == "busy" and await self._handle.reads.queued(session_id)):
            await self.advance(session_id)

    async def advance(self, session_id: str) -> bool:
        """Do what is due for a session; False when nothing could be done now and somebody has to look again.

        Raises Undecidable for what no look will change, Unavailable where the store cannot serve.
        """
        for round_number in range(ROUNDS):
            snapshot = await self._handle.snapshots.get()
            try:
                session = await self._handle.reads.session(session_id, snapshot.revisions)
                if session is None or session.phase == "closed":
                    raise Undecidable("a turn is due, but the session is not there or closed")
                closing = session.phase == "closing"
                code = await (self._close(session, snapshot) if closing else self._turn(session, snapshot))
            except SnapshotMoved:
                code = Code.STALE_SNAPSHOT
            except ReplyLost:
                # Whether the step was taken shows when the session is read again.
                code = Code.CONFLICT
            if code is Code.STALE_SNAPSHOT:
                await self._handle.snapshots.reload(snapshot)
            elif code in (Code.OK, Code.HELD, Code.HALTED, Code.NOT_FOUND):
                return True
            else:
                await asyncio.sleep(back_off_s(round_number))
        return False

    async def _turn(self, session: SessionRecord, snapshot: Snapshot) -> Code:
        """Dispatch the next serial command. One whose deadline passed while it waited is settled first."""
        session_id = session.session_id
        first = await self._handle.reads.queued(session_id)
        following = await self._handle.reads.operation(first[0], session_id) if first else None
        if first and following is None:
            return Code.CONFLICT
        claim_timeout_ms, right_ends_ms = 0, None
        if following is not None:
            terms, rights = await self._settler.basis(following, snapshot.policy)
            branch = following.branches[0]
            right = right_to_assign(rights, branch.peer, branch.attempt)
            if not right.allowed:
                # Never sent: it ends where it waits, and the next one is looked at (RT-ADM-37).
                await self._settler.decide(following.id, session_id)
                return Code.CONFLICT
            claim_timeout_ms, right_ends_ms = terms.claim_timeout_ms, right.expires_ms
        reply = await self._handle.store.turn(
            session_id,
            snapshot.revisions,
            busy=session.busy,
            following=following,
            claim_timeout_ms=claim_timeout_ms,
            decision_expires_ms=right_ends_ms,
        )
        too_late = reply.code is Code.OUTSIDE_WINDOW and reply.text(0) == "deadline"
        if following is not None and (too_late or reply.code is Code.TERMINAL):
            await self._settler.decide(following.id, session_id, seen_ms=reply.now_ms)
        return reply.code

    async def _close(self, session: SessionRecord, snapshot: Snapshot) -> Code:
        """End what was not begun, let run what runs, and purge when nothing is left."""
        session_id = session.session_id
        waiting = await self._handle.reads.queued(session_id, _QUEUE_CHUNK)
        for operation_id in waiting:
            await self._settler.decide(operation_id, session_id, event="session-closing")
            await self._settler.turns.give_way()
        if len(waiting) == _QUEUE_CHUNK:
            return Code.CONFLICT
        if session.busy not in ("", NEXT_TURN):
            verdict, _ = await self._settler.decide(session.busy, session_id, event="session-closing")
            waiting += [session.busy] if verdict is Verdict.SETTLED else []
        if session.pending > len(waiting):
            return await self._sleep(session, snapshot)
        return await self._purge(session, snapshot)

    async def _sleep(self, session: SessionRecord, snapshot: Snapshot) -> Code:
        """Commands still run: take the session off ``due``, the last of them to end puts it back."""
        reply = await self._handle.store.turn(
            session.session_id, snapshot.revisions, busy=session.busy, following=None, claim_timeout_ms=0
        )
        return Code.OK if reply.code is Code.SESSION_CLOSING else reply.code

    async def _purge(self, session: SessionRecord, snapshot: Snapshot) -> Code:
        """Turn every command into its tombstone, chunk by chunk along the facts; the last chunk closes the
        session.
        """
        session_id, after, last = session.session_id, 0, False
        while not last:
            page = await self._handle.reads.page(session_id, after, TOMBSTONES_PER_CHUNK, snapshot.revisions)
            if page is None:
                return Code.NOT_FOUND
            after = page.facts[-1].sequence if page.facts else page.head
            last = after >= page.head
            operations = [
                command_operation_id(snapshot.revisions.authority, fact.command_id)
                for fact in page.facts
                if fact.kind == "accepted"
            ]
            if operations or last:
                reply = await self._handle.store.purge(session_id, operations, last, snapshot.revisions)
                if reply.code is Code.CONFLICT and last and session.pending == 0:
                    raise Undecidable("the session counts other commands than its facts name")
                if reply.code is not Code.OK:
                    return reply.code
            await self._settler.turns.give_way()
        return Code.OK
