"""Deciding one-branch work: session commands.

What follows a lost worker is decided by the gate and the declared effects alone (REQUIREMENTS, "how an
operation closed"): a closed gate proves that the handler was not called, an open one proves nothing. Work
goes on only while its original invoker still has the right to it; a right that was taken back ends the
branch ``revoked``, whoever holds its lease.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from shared.domain.decide.change import BranchChange, Change, Words
from shared.domain.policy import Action, Authorization
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
Rights = Callable[[Action, int, str, int], Authorization]
"""Asks for the original invoker whether an action (branch.assign, claim, answer) on the branch of that index
may be done by that peer as that attempt. May raise Unavailable: then nothing that needs the right is decided
(RT-AUTH-05).
"""


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


def apply(op: Operation, terms: Terms, rights: Rights, event: Event, now_ms: int) -> Change | None:
    """Decide what is due for ``op`` at about ``now_ms``; None when nothing is left to do.

    Every step that rests on a right is bounded by the end of that right (RT-AUTH-06, RT-AUTH-09); the
    deadline and the close of a session need none. Serves RT-OWN-08..11, RT-ATT-01..08, RT-GUARD-11..13,
    RT-AUTH-08, RT-ADM-35, DASP-CORE-006, DASP-CORE-007.
    """
    if op.phase == "settled":
        return None
    if now_ms >= op.deadline_ms:
        return _at_deadline(op, terms)
    branch = op.branches[0]
    leased = branch.holder is not None and branch.until_ms > now_ms
    answered = 0 in op.answers
    closing = event == "session-closing" or (op.seat is not None and op.seat.phase == "closing")
    if closing and branch.gate == "closed" and not leased:
        return _session_closed(op, terms)
    if answered or leased:
        right = rights("answer" if answered else "claim", 0, branch.peer, branch.attempt)
    else:
        right = right_to_assign(rights, branch.peer, branch.attempt)
    if not right.allowed:
        return _revoked(op, terms)
    if answered:
        return _while(right, _fold(op, terms, rights, op.answers[0], now_ms))
    if leased:
        return _rearm(op, branch.until_ms)
    return _while(right, _unleased(op, terms, rights, now_ms))


def right_to_assign(rights: Rights, peer: str, attempt: int) -> Authorization:
    """The right to give the branch to a peer that may claim it too: who may not is given nothing."""
    assign = rights("branch.assign", 0, peer, attempt)
    if not assign.allowed:
        return assign
    claim = rights("claim", 0, peer, attempt)
    return claim if not claim.allowed or claim.expires_ms < assign.expires_ms else assign


def _while(right: Authorization, change: Change | None) -> Change | None:
    """The change, to be committed while the right holds. A wake-up alone rests on no right."""
    if change is None or change.only_wakes:
        return change
    ends_ms = right.expires_ms
    bound = ends_ms if change.not_after_ms is None else min(change.not_after_ms, ends_ms)
    return msgspec.structs.replace(change, not_after_ms=bound)


def _unleased(op: Operation, terms: Terms, rights: Rights, now_ms: int) -> Change | None:
    """Nobody holds the branch now: it was lost, or waits for its turn, its retry time or a claim."""
    branch = op.branches[0]
    if branch.holder is not None:
        return _lost(op, terms, rights, now_ms)
    if op.seat is not None and op.seat.seat == "queued":
        return _rearm(op, op.deadline_ms)
    if branch.outbox is None:
        return _retry_due(op, terms) if branch.next_ms <= now_ms else _rearm(op, branch.next_ms)
    return _unclaimed(op, terms, rights) if branch.until_ms <= now_ms else _rearm(op, branch.until_ms)


def _rearm(op: Operation, at_ms: int) -> Change | None:
    """Wake-ups are re-armed lazily; one that is already right is left alone (a pass over healthy work writes
    nothing).
    """
    at_ms = min(at_ms, op.deadline_ms)
    return None if op.wake_ms == at_ms else Change(wake_at_ms=at_ms)


def _next_peer(op: Operation, rights: Rights) -> tuple[str, Authorization] | None:
    """Who is to make the next attempt, and the right to it; None where nobody may.

    Another eligible peer when there is one, in ASCII order and round again; else the same (RT-SEL-02). Peers
    that may not be assigned are passed over.
    """
    candidates = op.admission.candidates
    branch = op.branches[0]
    later = [peer for peer in candidates if peer > branch.peer]
    earlier = [peer for peer in candidates if peer < branch.peer]
    for peer in (*later, *earlier, branch.peer):
        right = right_to_assign(rights, peer, branch.attempt + 1)
        if right.allowed:
            return peer, right
    return None


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


def _unclaimed(op: Operation, terms: Terms, rights: Rights) -> Change | None:
    """Nobody claimed the offer: another eligible peer is a new attempt, the same peer is the same attempt
    again.
    """
    branch = op.branches[0]
    following = _next_peer(op, rights) if branch.attempt < terms.max_attempts else None
    if following is None or following[0] == branch.peer:
        return _offer_again(op, terms)
    peer, right = following
    offer = _offer(
        op,
        terms,
        peer=peer,
        attempt=branch.attempt + 1,
        claims=0,
        not_before=branch.until_ms,
        expired=True,
    )
    return _while(right, offer)


def _offer_again(op: Operation, terms: Terms) -> Change:
    """The same attempt to the same peer, under a new fence (RT-OWN-02)."""
    branch = op.branches[0]
    return _offer(
        op,
        terms,
        peer=branch.peer,
        attempt=branch.attempt,
        claims=branch.claims,
        not_before=branch.until_ms,
        expired=True,
    )


def _lost(op: Operation, terms: Terms, rights: Rights, now_ms: int) -> Change | None:
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
        return _offer_again(op, terms)
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
    return _retry(op, terms, rights, lost=True, not_before=branch.until_ms)


def _retry(op: Operation, terms: Terms, rights: Rights, *, lost: bool, not_before: int) -> Change | None:
    following = _next_peer(op, rights)
    if following is None:
        return _revoked(op, terms, heard=not lost)
    peer, right = following
    words = Words(op.branches[0]).waiting(peer=peer, backoff_ms=terms.backoff_ms)
    branch = BranchChange(0, "same" if lost else "live", words, expired=lost)
    change = Change(
        not_before_ms=not_before,
        not_after_ms=op.deadline_ms,
        wake_at_ms=op.deadline_ms,
        wake_in_ms=terms.backoff_ms,
        phase="active",
        tallies=Tallies(lost=True) if lost else None,
        branches=(branch,),
        deletes=() if lost else ("r:0",),
    )
    return _while(right, change)


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
_REVOKED = _Ending("failed", "complete", "revoked", "failed", "replayable")
_REVOKED_UNCERTAIN = _Ending("indeterminate", "indeterminate", "revoked", "uncertain", "quarantined")


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


def _revoked(op: Operation, terms: Terms, *, heard: bool = False) -> Change:
    """The right to go on was taken back: the branch ends at once, also under a live lease and also where its
    answer is stored (RT-ADM-35, RT-ATT-06, RT-OWN-07, RT-RES-10). ``heard``: the answer itself was judged
    and asked for an attempt that nobody may make.
    """
    acted = op.tallies.lost or (op.branches[0].gate != "closed" and not heard)
    row = _REVOKED_UNCERTAIN if acted and terms.effects != "none" else _REVOKED
    when = "after" if acted else "before"
    return _end(
        op, terms, row, "revoked", f"permission was taken back {when} the work may have begun", at_once=True
    )


def _end(
    op: Operation,
    terms: Terms,
    row: _Ending,
    reason: str,
    message: str,
    *,
    at_deadline: bool = False,
    at_once: bool = False,
) -> Change:
    """Close without an accepted success. ``same`` guards it: whatever happened to the lease since loading
    refuses it. A lease that is held has to have run out, unless it is ended ``at_deadline`` or ``at_once``.
    """
    branch = op.branches[0]
    lost = not (at_deadline or at_once) and branch.holder is not None
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
        outcome=Outcome(row.outcome, None, error),
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


def _fold(op: Operation, terms: Terms, rights: Rights, stored: StoredAnswer, now_ms: int) -> Change | None:
    """Judge stored evidence. The lease was judged in the step that stored it (RT-RES-08)."""
    answer = decode_answer(stored.body)
    if answer.refused is not None:
        error = CommandError(answer.refused.code, answer.refused.message, retryable=False)
        return _folded(op, terms, _FAILED, "refused", Outcome("failed", None, error))
    output = answer.result
    assert output is not msgspec.UNSET, "an answer is a result or a refusal"
    result = json.loads(bytes(output))
    if terms.retryable(result):
        return _fold_retryable(op, terms, rights, output, now_ms)
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


def _fold_retryable(
    op: Operation, terms: Terms, rights: Rights, output: msgspec.Raw, now_ms: int
) -> Change | None:
    """Retryability overrides neither the budget nor the deadline (RT-BR-05)."""
    if op.branches[0].attempt < terms.max_attempts and now_ms + terms.backoff_ms < op.deadline_ms:
        return _retry(op, terms, rights, lost=False, not_before=0)
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
