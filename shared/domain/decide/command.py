"""Deciding one-branch work: session commands.

What follows a lost worker is decided by the gate and the declared effects alone (REQUIREMENTS, "how an
operation closed"): a closed gate proves that the handler was not called, an open one proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from shared.domain.decide.change import BranchChange, Change, Words
from shared.domain.records import (
    Answer,
    Branch,
    CommandError,
    Decision,
    DecisionOutcome,
    Fact,
    Operation,
    Outcome,
    OutcomeStatus,
    Settlement,
    Status,
    StoredAnswer,
    Tallies,
    decode_answer,
    encode,
)

Event = Literal["due", "session-closing"]
Effects = Literal["none", "idempotent", "fenced", "unsafe"]


class Terms(msgspec.Struct, frozen=True):
    """What the pinned contract says about one interaction, as far as deciding needs it. Durations in ms."""

    effects: Effects
    claim_timeout_ms: int
    max_claims: int
    max_attempts: int
    backoff_ms: int
    replay_ms: int
    halt_on_uncertain: bool
    succeeds: Callable[[Any], bool]
    retryable: Callable[[Any], bool]


def apply(op: Operation, terms: Terms, event: Event, now_ms: int) -> Change | None:
    """Decide what is due for ``op`` at about ``now_ms``; None when nothing is left to do.

    Serves RT-OWN-08..11, RT-ATT-01..08, RT-GUARD-11..13, DASP-CORE-006, DASP-CORE-007.
    """
    if op.phase == "settled":
        return None
    if now_ms >= op.deadline_ms:
        return _at_deadline(op, terms)
    if 0 in op.answers:
        return _fold(op, terms, op.answers[0], now_ms)
    branch = op.branches[0]
    if branch.holder is not None and branch.until_ms > now_ms:
        return _rearm(op, branch.until_ms)
    closing = event == "session-closing" or (op.seat is not None and op.seat.phase == "closing")
    if closing and branch.gate == "closed":
        return _session_closed(op, terms)
    if branch.holder is not None:
        return _lost(op, terms, now_ms)
    if op.seat is not None and op.seat.seat == "queued":
        return _rearm(op, op.deadline_ms)
    if branch.outbox is None:
        return _retry_due(op, terms) if branch.next_ms <= now_ms else _rearm(op, branch.next_ms)
    return _unclaimed(op, terms) if branch.until_ms <= now_ms else _rearm(op, branch.until_ms)


def _rearm(op: Operation, at_ms: int) -> Change | None:
    """Wake-ups are re-armed lazily; one that is already right is left alone (a pass over healthy work writes
    nothing).
    """
    at_ms = min(at_ms, op.deadline_ms)
    return None if op.wake_ms == at_ms else Change(wake_at_ms=at_ms)


def _next_peer(op: Operation) -> str:
    """Another eligible peer when there is one, in ASCII order and round again; else the same (RT-SEL-02)."""
    candidates = op.admission.candidates
    current = op.branches[0].peer
    later = [peer for peer in candidates if peer > current]
    return (later or list(candidates) or [current])[0]


def _offer(
    op: Operation, terms: Terms, *, peer: str, attempt: int, claims: int, not_before: int, expired: bool
) -> Change:
    branch = op.branches[0]
    words = Words(branch).offered(
        peer=peer,
        attempt=attempt,
        fence=branch.fence + 1,
        claims=claims,
        claim_timeout_ms=terms.claim_timeout_ms,
    )
    return Change(
        not_before_ms=not_before,
        not_after_ms=op.deadline_ms,
        wake_at_ms=op.deadline_ms,
        wake_in_ms=terms.claim_timeout_ms,
        phase="active",
        branches=(BranchChange(0, "same", words, expired=expired, send_to=peer),),
    )


def _retry_due(op: Operation, terms: Terms) -> Change:
    """The backoff is over: the attempt that was persisted is offered now (RT-SEL-04, RT-OWN-09)."""
    branch = op.branches[0]
    return _offer(
        op,
        terms,
        peer=branch.peer,
        attempt=branch.attempt,
        claims=branch.claims,
        not_before=branch.next_ms,
        expired=False,
    )


def _unclaimed(op: Operation, terms: Terms) -> Change:
    """Nobody claimed the offer: another eligible peer is a new attempt, the same peer is the same attempt
    again.
    """
    branch = op.branches[0]
    peer = _next_peer(op)
    moved = peer != branch.peer
    if moved and branch.attempt >= terms.max_attempts:
        peer, moved = branch.peer, False
    return _offer(
        op,
        terms,
        peer=peer,
        attempt=branch.attempt + 1 if moved else branch.attempt,
        claims=0 if moved else branch.claims,
        not_before=branch.until_ms,
        expired=True,
    )


def _lost(op: Operation, terms: Terms, now_ms: int) -> Change | None:
    branch = op.branches[0]
    if branch.gate == "closed":
        if branch.claims >= terms.max_claims:
            return _end(
                op,
                terms,
                _failed_unless_lost(op, terms),
                "claims-exhausted",
                f"{branch.claims} workers were lost before the work began",
            )
        return _offer(
            op,
            terms,
            peer=branch.peer,
            attempt=branch.attempt,
            claims=branch.claims,
            not_before=branch.until_ms,
            expired=True,
        )
    if terms.effects == "unsafe":
        return _end(op, terms, _UNCERTAIN, "worker-lost", "the worker was lost after it may have acted")
    if branch.attempt >= terms.max_attempts:
        if terms.effects == "none":
            return _end(op, terms, _FAILED, "attempts-exhausted", f"no answer in {branch.attempt} attempts")
        return _end(
            op,
            terms,
            _UNCERTAIN,
            "attempts-exhausted",
            f"no answer in {branch.attempt} attempts, any may have acted",
        )
    if now_ms + terms.backoff_ms >= op.deadline_ms:
        return _rearm(op, op.deadline_ms)
    return _retry(op, terms, lost=True, not_before=branch.until_ms)


def _retry(op: Operation, terms: Terms, *, lost: bool, not_before: int) -> Change:
    branch = op.branches[0]
    words = Words(branch).waiting(peer=_next_peer(op), backoff_ms=terms.backoff_ms)
    change = BranchChange(0, "same" if lost else "live", words, expired=lost)
    return Change(
        not_before_ms=not_before,
        not_after_ms=op.deadline_ms,
        wake_at_ms=op.deadline_ms,
        wake_in_ms=terms.backoff_ms,
        phase="active",
        tallies=Tallies(lost=True) if lost else None,
        branches=(change,),
        deletes=() if lost else ("r:0",),
    )


class _Ending(msgspec.Struct, frozen=True):
    """One row of the table "how an operation closed"."""

    decision: DecisionOutcome
    settlement: Settlement
    branch: Status
    outcome: OutcomeStatus
    reservation: Literal["replayable", "quarantined"]


_COMPLETED = _Ending("success", "complete", "success", "completed", "replayable")
_FAILED = _Ending("failed", "complete", "failure", "failed", "replayable")
_UNCERTAIN = _Ending("indeterminate", "indeterminate", "indeterminate", "uncertain", "quarantined")
_TIMED_OUT_OPEN = _Ending("failed", "indeterminate", "indeterminate", "uncertain", "quarantined")
_TIMED_OUT_ANSWERED = _Ending("failed", "complete", "indeterminate", "uncertain", "quarantined")


def _at_deadline(op: Operation, terms: Terms) -> Change:
    """Answers present now are late: no vote (RT-GUARD-13); what may have happened decides between failed and
    uncertain.
    """
    branch = op.branches[0]
    answered = branch.gate == "answered"
    if terms.effects == "none" or not (answered or branch.gate == "open" or op.tallies.lost):
        return _end(op, terms, _FAILED, "timeout", "the deadline passed", at_deadline=True)
    row = _TIMED_OUT_ANSWERED if answered and not op.tallies.lost else _TIMED_OUT_OPEN
    return _end(
        op, terms, row, "timeout", "the deadline passed after the work may have begun", at_deadline=True
    )


def _failed_unless_lost(op: Operation, terms: Terms) -> _Ending:
    """An earlier attempt that was lost behind an open gate may have acted, however this one ended."""
    return _UNCERTAIN if op.tallies.lost and terms.effects != "none" else _FAILED


def _session_closed(op: Operation, terms: Terms) -> Change:
    row = _failed_unless_lost(op, terms)
    return _end(op, terms, row, "session-closed", "the session was closed before the work began")


def _end(
    op: Operation,
    terms: Terms,
    row: _Ending,
    reason: str,
    message: str,
    *,
    at_deadline: bool = False,
    output: msgspec.Raw | None = None,
) -> Change:
    """Close without an accepted success. ``same`` guards it: whatever happened to the lease since loading
    refuses it.
    """
    branch = op.branches[0]
    lost = not at_deadline and branch.holder is not None
    change = BranchChange(0, "same", Words(branch).ended(row.branch), expired=lost)
    error = CommandError(reason, message, retryable=False)
    return _settled(
        op,
        terms,
        row,
        reason,
        change,
        not_before_ms=op.deadline_ms if at_deadline else (branch.until_ms if lost else 0),
        not_after_ms=None if at_deadline else op.deadline_ms,
        outcome=Outcome(row.outcome, output, error),
    )


def _settled(
    op: Operation,
    terms: Terms,
    row: _Ending,
    reason: str,
    branch: BranchChange,
    *,
    not_before_ms: int,
    not_after_ms: int | None,
    outcome: Outcome,
    updates: tuple[Fact, ...] = (),
    state: bytes | None = None,
) -> Change:
    facts: tuple[Fact, ...] = ()
    if op.admission.session_id:
        facts = (*updates, Fact("outcome", op.admission.command_id, encode(outcome)))
    return Change(
        not_before_ms=not_before_ms,
        not_after_ms=not_after_ms,
        phase="settled",
        decision=Decision(row.decision, reason, row.settlement),
        reservation=row.reservation,
        state=state,
        state_revision=op.seat.state_revision if state is not None and op.seat is not None else "",
        halt=terms.halt_on_uncertain and row.outcome == "uncertain",
        branches=(branch,),
        deletes=("r:0",) if 0 in op.answers else (),
        facts=facts,
    )


def _fold(op: Operation, terms: Terms, stored: StoredAnswer, now_ms: int) -> Change:
    """Judge stored evidence. The lease was judged in the step that stored it (RT-RES-08)."""
    answer = decode_answer(stored.body)
    if answer.refused is not None:
        error = CommandError(answer.refused.code, answer.refused.message, retryable=False)
        return _folded(op, terms, _FAILED, "refused", Outcome("failed", None, error))
    output = answer.result
    assert output is not msgspec.UNSET, "an answer is a result or a refusal"
    result = json.loads(bytes(output))
    if terms.retryable(result):
        return _fold_retryable(op, terms, output, now_ms)
    if not terms.succeeds(result):
        error = CommandError(
            "unsuccessful", "the result does not meet the contract's success condition", retryable=False
        )
        return _folded(op, terms, _FAILED, "unsuccessful", Outcome("failed", output, error))
    if (
        answer.state is not msgspec.UNSET
        and op.seat is not None
        and answer.state_revision != op.seat.state_revision
    ):
        row = _FAILED if terms.effects == "none" else _UNCERTAIN
        error = CommandError("state-moved", "the answer was made from another view state", retryable=False)
        return _folded(op, terms, row, "state-moved", Outcome(row.outcome, None, error))
    return _folded(op, terms, _COMPLETED, "accepted", Outcome("completed", output, None), answer)


def _fold_retryable(op: Operation, terms: Terms, output: msgspec.Raw, now_ms: int) -> Change:
    """Retryability overrides neither the budget nor the deadline (RT-BR-05)."""
    if op.branches[0].attempt < terms.max_attempts and now_ms + terms.backoff_ms < op.deadline_ms:
        return _retry(op, terms, lost=False, not_before=0)
    row = _failed_unless_lost(op, terms)
    error = CommandError("attempts-exhausted", "the last attempt asked for another one", retryable=False)
    return _folded(op, terms, row, "attempts-exhausted", Outcome(row.outcome, output, error))


def _folded(
    op: Operation, terms: Terms, row: _Ending, reason: str, outcome: Outcome, answer: Answer | None = None
) -> Change:
    updates: tuple[Fact, ...] = ()
    state = None
    if answer is not None:
        updates = tuple(
            Fact(
                "application",
                op.admission.command_id,
                b'{"name":"%b","data":%b}' % (u.name.encode(), bytes(u.data)),
            )
            for u in answer.updates
        )
        state = bytes(answer.state) if answer.state is not msgspec.UNSET else None
    branch: Branch = op.branches[0]
    return _settled(
        op,
        terms,
        row,
        reason,
        BranchChange(0, "live", Words(branch).ended(row.branch)),
        not_before_ms=0,
        not_after_ms=op.deadline_ms,
        outcome=outcome,
        updates=updates,
        state=state,
    )
