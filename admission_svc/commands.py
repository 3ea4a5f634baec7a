"""Admitting session commands: what any carrier does once it knows who asks for what.

The order of judging is fixed: session, permission, the pinned contract, then one script. Whatever could
refuse for a reason that may change (no peer, a clock in doubt, durability below its word, memory, the
admission window) only does so after the record was asked: an equal retry is answered whatever else is wrong
(DASP-CORE-002, 003; TRAPS 31: a commit is one script, so a client that leaves makes nothing ambiguous).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Literal

import msgspec

from admission_svc.auth import SessionRef, Visit, authorize
from admission_svc.messages import Command
from admission_svc.problems import exceeded
from shared.domain.contract import Contract
from shared.domain.errors import Denied, InvalidInput, NotFound, Unavailable
from shared.domain.guard import TimeGuard
from shared.domain.ids import MessageKind, command_operation_id, intent_digest, message_id
from shared.domain.interaction import Interaction
from shared.domain.limits import Exceeded
from shared.domain.policy import Authorization
from shared.domain.profile import OUTCOME_BYTES
from shared.domain.records import Admission, CommandError, accepted_payload, encode
from shared.store.codes import Code
from shared.store.connection import ReplyLost, StoreUnavailable
from shared.store.inspection import Durability, refusal
from shared.store.reads import SnapshotMoved
from shared.store.replies import ClockRefusal, NewOperation, Offer, OutOfMemory, Reply
from shared.store.runtime import Runtime
from shared.telemetry import ADMISSIONS, LOST_REPLIES, logger

ADMISSION_WINDOW_MS: Final = 10_000
_SESSIONS_REMEMBERED: Final = 10_000
_RESOLVE_PAUSES_S: Final = (0.02, 0.1, 0.3, 0.6, 1.0, 1.0)
_log: Final = logger("lockgate.admission")
_lost: Final = LOST_REPLIES.labels("admission")

Disposition = Literal["accepted", "duplicate", "rejected"]


class Verdict(msgspec.Struct, frozen=True):
    """What became of one command: a receipt without its ids."""

    disposition: Disposition
    sequence: int | None
    error: CommandError | None = None
    exceeded: Exceeded | None = None


class SessionTerms(msgspec.Struct, frozen=True):
    """What never changes about a session: whose it is and the contract it was opened with."""

    session: SessionRef
    contract: Contract

    def permission(self, visit: Visit, command: Command) -> Authorization:
        """May the caller submit this command? Raises NotFound, Denied or Unavailable, before anything of the
        command is judged or its record asked (DASP-CORE-001, 003d).
        """
        profile = self.contract.session
        assert profile is not None, "sessions are opened with profiles only"
        return authorize(visit, "command.submit", self.session, profile.commands.get(command.name, ""))


def _rejected(code: str, message: str, *, retryable: bool = False) -> Verdict:
    return Verdict("rejected", None, CommandError(code, message, retryable))


CONFLICT: Final = _rejected("conflict", "the command id is already admitted with different data")
CLOSING: Final = _rejected("conflict", "the session is being closed and takes no new commands")
HALTED: Final = _rejected("conflict", "the session stopped at an uncertain outcome and takes no new commands")
EXHAUSTED: Final = _rejected("limit_exceeded", "the session has no sequences left")
FULL: Final = _rejected("limit_exceeded", "the store takes no new work now", retryable=True)
UNSUPPORTED: Final = _rejected("unsupported_command", "the session's profile has no such command")
DENIED: Final = _rejected("denied", "the policy does not allow this")
"""For a member of a batch: a command that came alone is refused without a receipt."""


def _over(reply: Reply) -> Verdict:
    found = exceeded(reply)
    error = CommandError("limit_exceeded", found.message, retryable=found.retry_after_s > 0)
    return Verdict("rejected", None, error, found)


_DECLINED: Final = {
    Code.CONFLICT: CONFLICT,
    Code.EXPIRED: CONFLICT,
    Code.SESSION_CLOSING: CLOSING,
    Code.HALTED: HALTED,
    Code.SEQUENCE_EXHAUSTED: EXHAUSTED,
}
_counters: Final = {
    name: ADMISSIONS.labels("command", name)
    for name in (
        "accepted",
        "duplicate",
        "failure",
        "denied",
        *{v.error.code for v in _DECLINED.values() if v.error},
    )
}


def count(verdict: Verdict | None) -> None:
    """Count one judged command; None for one that ended in a failure."""
    name = "failure" if verdict is None else verdict.error.code if verdict.error else verdict.disposition
    (_counters.get(name) or ADMISSIONS.labels("command", name)).inc()


class Commands:
    """Admission of commands over one store."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sessions: OrderedDict[tuple[str, str], SessionTerms] = OrderedDict()
        self._judged: Durability | None = None
        self._refusal: str | None = None

    def instant(self) -> float:
        """The local instant at which a request was whole: its budget counts from it (RT-TIME-01)."""
        return self._runtime.clock.monotonic_ms()

    async def submit(self, visit: Visit, session_id: str, command: Command, started_at: float) -> Verdict:
        """Judge one command of ``visit``'s caller, whose request began at ``started_at`` (:meth:`instant`).

        Raises NotFound, Denied, InvalidInput (input that the profile forbids) and Unavailable; SnapshotMoved
        and TenantLost are for :meth:`admission_svc.auth.Desk.serve` to resolve.
        """
        terms = await self.terms(visit, session_id)
        permission = terms.permission(visit, command)
        prepared = _prepare(visit, terms, command)
        if isinstance(prepared, _Declined):
            return await self._decline(prepared)
        why = await self._refused()
        if why is not None:
            return await self._decline(_Declined(prepared.asked, why))
        return await self._admit(prepared, self._guard(started_at, permission.expires_ms))

    async def submit_many(
        self, visit: Visit, session_id: str, commands: list[Command], started_at: float
    ) -> list[Verdict]:
        """Judge commands each on its own merits, in order: one that ends in a failure of its own is rejected.

        A failure of the store or the session is that of the whole, which is safe to repeat.
        """
        terms = await self.terms(visit, session_id)
        permissions = await _permissions(visit, terms, commands)
        expires_ms = min(permission.expires_ms for permission in permissions if permission is not None)
        verdicts: list[Verdict] = []
        ready: list[_Prepared] = []
        for command, permission in zip(commands, permissions, strict=True):
            prepared = DENIED if permission is None else _prepared(visit, terms, command)
            if isinstance(prepared, _Prepared):
                ready.append(prepared)
                continue
            # What came before is admitted before this one's record is asked: members are judged in order.
            verdicts += await self._admit_many(ready, started_at, expires_ms)
            ready = []
            verdicts.append(await self._decline(prepared) if isinstance(prepared, _Declined) else prepared)
        return verdicts + await self._admit_many(ready, started_at, expires_ms)

    async def terms(self, visit: Visit, session_id: str) -> SessionTerms:
        """The immutable part of a session, read once per process. NotFound where there is none or no longer.

        That it is still open is judged by the script, which reads its phase.
        """
        key = visit.revisions.authority, session_id
        known = self._sessions.get(key)
        if known is not None:
            self._sessions.move_to_end(key)
            return known
        record = await visit.handle.reads.session(session_id, visit.revisions)
        if record is None:
            raise NotFound
        if record.phase == "closed":
            raise NotFound
        contract = await visit.handle.contracts.by_digest(record.contract)
        if contract is None:
            raise Unavailable("the contract that the session was opened with is missing")
        session = SessionRef(session_id, record.owner, record.profile, contract.id)
        terms = SessionTerms(session, contract)
        self._sessions[key] = terms
        if len(self._sessions) > _SESSIONS_REMEMBERED:
            self._sessions.popitem(last=False)
        return terms

    async def _decline(self, declined: _Declined) -> Verdict:
        """Refuse a command, unless its record answers it (DASP-CORE-003). Raises Unavailable where the reason
        may change, SnapshotMoved where it has changed already.
        """
        asked = declined.asked
        reply = await asked.lookup()
        if reply.code is not Code.ABSENT:
            return _verdict(reply)
        if declined.verdict is not None:
            return declined.verdict
        # The directory may by now name a peer that the snapshot does not know.
        fresh = await asked.visit.handle.snapshots.reload(asked.visit.snapshot)
        if fresh.revisions != asked.visit.revisions:
            raise SnapshotMoved("the tenant's policy or directory moved")
        raise Unavailable(declined.why)

    async def _refused(self) -> str | None:
        """Why no new work may be promised now (DESIGN section 6); None where it may."""
        runtime = self._runtime
        if runtime.clock.suspect:
            return "the store's clock jumped ahead; new work waits until it is believed again"
        durability = runtime.durability
        if durability is None or not runtime.clock.known:
            durability = await runtime.refresh()
        if durability is not self._judged:
            self._judged, self._refusal = durability, refusal(durability)
        return self._refusal

    def _guard(self, started_at: float, expires_ms: int) -> TimeGuard:
        """The admission window of a request that began at a local instant (RT-GUARD-01, RT-TIME-01), cut
        where its permission ends (RT-AUTH-09).
        """
        clock = self._runtime.clock
        started = clock.lower_ms(started_at)
        return TimeGuard(started, min(started + ADMISSION_WINDOW_MS, clock.not_after(), expires_ms))

    async def _admit(self, prepared: _Prepared, guard: TimeGuard) -> Verdict:
        asked = prepared.asked
        try:
            reply = await asked.visit.handle.store.admit(prepared.new, asked.visit.revisions, guard)
        except ReplyLost:
            _lost.inc()
            reply = await self._resolve(asked, prepared.new, guard)
        except OutOfMemory:
            return await self._decline(_Declined(asked, verdict=FULL))
        except ClockRefusal as refused:
            return await self._decline(_Declined(asked, refused.description or ""))
        return _verdict(reply)

    async def _admit_many(self, ready: list[_Prepared], started_at: float, expires_ms: int) -> list[Verdict]:
        """Admit in one write, and each alone that one write did not decide."""
        if not ready:
            return []
        why = await self._refused()
        if why is not None:
            return [await self._decline(_Declined(prepared.asked, why)) for prepared in ready]
        visit, guard = ready[0].asked.visit, self._guard(started_at, expires_ms)
        news = [prepared.new for prepared in ready]
        replies = await visit.handle.store.admit_many(news, visit.revisions, guard)
        return [
            _verdict(reply) if reply is not None else await self._admit(prepared, guard)
            for prepared, reply in zip(ready, replies, strict=True)
        ]

    async def _resolve(self, asked: _Asked, new: NewOperation, guard: TimeGuard) -> Reply:
        """Find out by identity what became of a call whose reply was lost.

        Absence proves nothing before the lost call's window has closed; until then the identical call is sent
        again, which admits at most once. Raises Unavailable where the store stays away.
        """
        for pause_s in _RESOLVE_PAUSES_S:
            try:
                reply = await asked.lookup()
                if reply.code is not Code.ABSENT or reply.now_ms >= guard.not_after_ms:
                    return reply
                return await asked.visit.handle.store.admit(new, asked.visit.revisions, guard)
            except (ReplyLost, StoreUnavailable):
                await asyncio.sleep(pause_s)
        _log.warning("admission.unknown", operation=new.operation_id, session=new.session_id)
        raise Unavailable(
            "whether the command was admitted is not known yet; repeat it unchanged", retry_after_s=2
        )


class _Asked(msgspec.Struct, frozen=True):
    """One command's identity, enough to ask what its record answers."""

    visit: Visit
    session_id: str
    operation_id: str
    intent: bytes

    async def lookup(self) -> Reply:
        return await self.visit.handle.store.lookup(
            self.operation_id, self.intent, self.session_id, self.visit.revisions
        )


class _Prepared(msgspec.Struct, frozen=True):
    """A command whose record is ready to be written."""

    asked: _Asked
    new: NewOperation


class _Declined(msgspec.Struct, frozen=True):
    """A command that is not admitted unless its record says otherwise: with a receipt, or why not now."""

    asked: _Asked
    why: str = ""
    verdict: Verdict | None = None


async def _permissions(
    visit: Visit, terms: SessionTerms, commands: list[Command]
) -> list[Authorization | None]:
    """The permission of each member of a batch, None where it is denied. A batch of which nothing is allowed
    is refused as one command is, and no denial is told under a policy that has moved.
    """
    permissions: list[Authorization | None] = []
    for command in commands:
        try:
            permissions.append(terms.permission(visit, command))
        except Denied as denied:
            permissions.append(None)
            refusal = denied
    if not any(permissions):
        raise refusal
    if None in permissions:
        await visit.handle.reads.check(visit.revisions)
    return permissions


def _prepare(visit: Visit, terms: SessionTerms, command: Command) -> _Prepared | _Declined:
    """The record to be, or why there will be none. Raises InvalidInput for what the profile forbids."""
    if command.written is None:
        assert command.fault is not None, "what has no canonical form has a fault"
        raise command.fault
    session_id, contract = terms.session.session_id, terms.contract
    profile = contract.session
    assert profile is not None, "sessions are opened with profiles only"
    operation_id = command_operation_id(visit.revisions.authority, command.command_id)
    intent = intent_digest(session_id, command.name, command.written)
    asked = _Asked(visit, session_id, operation_id, intent)
    target = profile.commands.get(command.name)
    if target is None:
        return _Declined(asked, verdict=UNSUPPORTED)
    interaction = contract.interactions[target]
    interaction.input.check(command.input, command.path)
    peers = visit.snapshot.peers
    candidates = tuple(sorted([peer for peer in interaction.audience.peers if peer in peers]))
    if not candidates:
        return _Declined(asked, "no eligible peer is registered")
    return _Prepared(asked, _operation(asked, terms, interaction, candidates, command, profile.serial))


def _prepared(visit: Visit, terms: SessionTerms, command: Command) -> _Prepared | _Declined | Verdict:
    """The same for a member of a batch: what is wrong with its own input is its own receipt."""
    try:
        return _prepare(visit, terms, command)
    except InvalidInput as fault:
        code = "limit_exceeded" if fault.too_large else "invalid_message"
        return _rejected(code, fault.description or code)


def _operation(
    asked: _Asked,
    terms: SessionTerms,
    interaction: Interaction,
    candidates: tuple[str, ...],
    command: Command,
    serial: bool,
) -> NewOperation:
    """The whole record to be. The first candidate in ASCII order gets the offer, and the branch its name."""
    assert command.written is not None, "judged before"
    revisions, contract = asked.visit.revisions, terms.contract
    principal, owner = asked.visit.caller.principal, terms.session.owner
    first = candidates[0]
    admission = Admission(
        principal=principal,
        contract=contract.id,
        version=contract.version,
        digest=contract.digest,
        interaction=interaction.name,
        branches=(first,),
        candidates=candidates,
        policy_revision=revisions.policy,
        directory_revision=revisions.directory,
        session_id=asked.session_id,
        command_id=command.command_id,
        name=command.name,
        traceparent=command.traceparent,
        session_owner="" if owner == principal else owner,
    )
    request = message_id(MessageKind.REQUEST, contract.digest, asked.operation_id, first, 1)
    return NewOperation(
        kind="serial" if serial else "concurrent",
        operation_id=asked.operation_id,
        intent=asked.intent,
        admission=encode(admission),
        input=command.written,
        timeout_ms=interaction.timeout_ms,
        claim_timeout_ms=interaction.lease.claim_timeout_ms,
        offers=(Offer(first, request),),
        session_id=asked.session_id,
        command_id=command.command_id,
        accepted=accepted_payload(command.name),
        reserve=interaction.max_result_bytes + OUTCOME_BYTES,
    )


def _verdict(reply: Reply) -> Verdict:
    """A script's answer to an admission or a lookup. Raises for what is no receipt."""
    code = reply.code
    if code is Code.OK:
        return Verdict("accepted", reply.number(0))
    if code is Code.DUPLICATE:
        return Verdict("duplicate", int(reply.text(0).split(" ")[2]))
    declined = _DECLINED.get(code)
    if declined is not None:
        return declined
    if code is Code.CAPACITY:
        return _over(reply)
    if code is Code.NOT_FOUND:
        raise NotFound
    if code is Code.STALE_SNAPSHOT:
        raise SnapshotMoved("the tenant's policy or directory moved")
    if code in (Code.OUTSIDE_WINDOW, Code.ABSENT):
        raise Unavailable("the admission window closed without a commit; repeat the command unchanged")
    _log.error("admission.refused", code=code.value, detail=reply.text(0))
    raise Unavailable("the store holds something here that it should not; an operator must look at it")
