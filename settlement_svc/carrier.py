"""Carrying one assignment from its offer to its settlement.

The order of steps is the promise. The handler is connected before the gate is opened, the gate is recorded
as open before the request leaves, the answer is stored before the request is acknowledged. So a closed gate
proves that the handler was not called, and an open one without an answer proves nothing (DESIGN section 7).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from settlement_svc.assignment import document
from settlement_svc.contention import Undecidable, back_off_s
from settlement_svc.handler import Handler, HandlerCall, NoAnswer
from settlement_svc.leases import HeldLease, Leases
from settlement_svc.rights import question
from settlement_svc.settle import Settler
from shared import telemetry
from shared.domain.contract import Contract
from shared.domain.errors import InvalidInput, Unavailable
from shared.domain.interaction import Interaction
from shared.domain.policy import AuthorizationInput
from shared.domain.profile import read_answer
from shared.domain.records import Admission, Answer, answer_digest, encode
from shared.store.codes import Code
from shared.store.connection import ReplyLost
from shared.store.outbox import Outbox, Request
from shared.store.replies import Claim, Grant, Lease, Reply, TenantLost
from shared.store.runtime import Runtime, TenantHandle

_SECOND_LOOK_S: Final = 0.02
_SNAPSHOT_ROUNDS: Final = 3
_PATIENCE_MS: Final = 5_000.0
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_log = telemetry.logger("lockgate.carrier")


@dataclass(frozen=True)
class Task:
    """An offer with what its record and contract say about it."""

    request: Request
    admission: Admission
    contract: Contract
    interaction: Interaction


class Missed(Exception):
    """The store could not serve before anything was claimed: the offer stands and has to be looked at
    again.
    """


class Carrier:
    """Carries the assignments of one sidecar, identified by ``holder``."""

    def __init__(
        self,
        runtime: Runtime,
        handle: TenantHandle,
        settler: Settler,
        outbox: Outbox,
        handler: Handler,
        leases: Leases,
        peer: str,
        holder: str,
    ) -> None:
        self._clock = runtime.clock
        self._handle = handle
        self._settler = settler
        self._outbox = outbox
        self._handler = handler
        self._leases = leases
        self._peer = peer
        self._holder = holder

    async def carry(self, request: Request) -> None:
        """Do what an offer asks for, if it still stands.

        Raises Missed where nothing was claimed because the store could not serve. Whatever happens after
        the claim ends in a stored answer, a lease given back, or a lease that runs out; each of them is
        settled from the record.
        """
        try:
            task = await self._task(request)
        except Unavailable as error:
            raise Missed(str(error)) from error
        if task is None:
            return
        patience_ms = task.interaction.lease.claim_timeout_ms
        call = await self._handler.connect(patience_ms / 1000)
        if call is None:
            _log.warning("handler unreachable", tenant=self._handle.tenant, operation=request.operation_id)
            return
        try:
            held = await self._claim(task, self._clock.monotonic_ms() + patience_ms)
            if held is not None:
                with self._leases.holding(held):
                    await self._work(task, held, call)
        finally:
            call.close()

    async def _task(self, request: Request) -> Task | None:
        admission = await self._outbox.admission(request.operation_id)
        if admission is None:
            return None
        contract = await self._handle.contracts.by_digest(admission.digest)
        if contract is None:
            _log.error("contract unknown", tenant=self._handle.tenant, operation=request.operation_id)
            return None
        return Task(request, admission, contract, contract.interaction(admission.interaction))

    # The lease

    async def _claim(self, task: Task, patience_until: float) -> HeldLease | None:
        """Claim and open the gate in one step; None where the offer no longer stands for this sidecar.

        Raises Missed where the store could not serve until the local instant ``patience_until``.
        """
        request, terms = task.request, task.interaction.lease
        claim = Claim(
            operation_id=request.operation_id,
            branch=request.branch,
            peer=self._peer,
            attempt=request.attempt,
            holder=self._holder,
            lease_ms=terms.lease_ms,
            max_claims=terms.max_claims,
            open_gate=True,
            session_id=request.session_id,
        )
        asks = question(task.admission, task.contract, "claim", request.branch, self._peer, request.attempt)
        for round_number in self._rounds(patience_until):
            if self._leases.given_up:
                return None
            sent_at = self._clock.monotonic_ms()
            try:
                reply = await self._ask(task, claim, asks)
            except Unavailable as error:
                # A lost reply may have been a grant: the right to call is lost with it, the next claim tells.
                self._trouble(error)
            else:
                if isinstance(reply, Grant):
                    return HeldLease(reply, terms.lease_ms, terms.renew_ms, sent_at, asks)
                if reply is None:
                    return None
                if not _asks_again(reply):
                    await self._not_granted(task, reply)
                    return None
            await asyncio.sleep(back_off_s(round_number))
        raise Missed("the store did not answer a claim in time")

    async def _ask(self, task: Task, claim: Claim, asks: AuthorizationInput) -> Grant | Reply | None:
        """One claim under the present snapshot, None where that does not permit the work: it is settled then
        and never sent to anybody (RT-AUTH-08). A snapshot that had moved is read again and everything
        repeated at once.
        """
        for _ in range(_SNAPSHOT_ROUNDS):
            snapshot = await self._handle.snapshots.get()
            right = snapshot.policy.decide(asks, self._clock.lower_ms())
            if not right.allowed:
                await self._settle(task, 0)
                if await self._handle.snapshots.get() is snapshot:
                    return None
                continue
            reply = await self._handle.store.claim(claim, snapshot.revisions, right.expires_ms)
            code = Code.OK if isinstance(reply, Grant) else reply.code
            telemetry.LEASES.labels("claim", code.value).inc()
            if code is not Code.STALE_SNAPSHOT:
                return reply
            telemetry.STALE_SNAPSHOTS.labels("settlement").inc()
            await self._handle.snapshots.reload(snapshot)
        raise Unavailable("the policy keeps changing")

    async def _not_granted(self, task: Task, reply: Reply) -> None:
        request = task.request
        _log.info(
            "not granted", tenant=self._handle.tenant, operation=request.operation_id, code=reply.code.value
        )
        if reply.code is not Code.GATE_OPEN:
            return
        op = await self._handle.reads.operation(request.operation_id, request.session_id)
        branch = op.branches[request.branch] if op is not None else None
        if branch is not None and branch.holder == self._holder:
            lease = Lease(
                request.operation_id,
                request.branch,
                self._peer,
                str(branch.epoch),
                str(branch.fence),
                self._holder,
            )
            await self._release(task, lease, self._clock.monotonic_ms() + _PATIENCE_MS)

    # The call

    async def _work(self, task: Task, held: HeldLease, call: HandlerCall) -> None:
        profile = task.contract.session if task.admission.session_id else None
        with_state = profile is not None and profile.state is not None
        body = document(held.grant, task.admission, held.lease_ms, with_state=with_state)
        try:
            with telemetry.HANDLER_SECONDS.time():
                raw = await self._exchange(call, held, body, task.admission.traceparent)
            answer = read_answer(
                raw, task.interaction, profile, state_revision=held.grant.state_revision if with_state else ""
            )
        except (NoAnswer, InvalidInput) as error:
            reason = error.reason if isinstance(error, NoAnswer) else "invalid"
            telemetry.HANDLER_CALLS.labels(reason).inc()
            self._tell("no answer", task, held.lease, reason=str(error))
            await self._give_back(task, held)
            return
        telemetry.HANDLER_CALLS.labels("refused" if answer.refused is not None else "answered").inc()
        await self._deliver(task, held, answer)

    async def _exchange(self, call: HandlerCall, held: HeldLease, body: bytes, traceparent: str) -> bytes:
        """Send the request and wait for its answer as long as the lease lasts; NoAnswer after that."""
        headers = {"traceparent": traceparent} if _TRACEPARENT.fullmatch(traceparent) else {}
        posting = asyncio.create_task(call.post(body, headers))
        over = asyncio.create_task(self._leases.wait_over(held))
        try:
            await asyncio.wait((posting, over), return_when=asyncio.FIRST_COMPLETED)
            if not posting.done():
                # After the process itself stood still its timers come first: an answer may be there, unread.
                await asyncio.wait((posting,), timeout=_SECOND_LOOK_S)
            if not posting.done():
                raise NoAnswer("never", "none while the lease lasted")
            return posting.result()
        finally:
            over.cancel()
            posting.cancel()
            await asyncio.gather(posting, over, return_exceptions=True)

    # What came of it

    async def _deliver(self, task: Task, held: HeldLease, answer: Answer) -> None:
        """Store an answer, repeated with the same bytes until the store has said what it is worth
        (RT-DUR-10).
        """
        body = encode(answer)
        digest = answer_digest(body)
        for round_number in self._rounds(held.ends_at + _PATIENCE_MS):
            try:
                snapshot = await self._handle.snapshots.get()
                reply = await self._handle.store.answer(held.lease, digest, body, snapshot.revisions)
            except Unavailable as error:
                self._trouble(error)
            else:
                telemetry.LEASES.labels("answer", reply.code.value).inc()
                if reply.code in (Code.OK, Code.DUPLICATE):
                    await self._settle(task, reply.now_ms)
                    return
                if not _asks_again(reply):
                    # The lease went to somebody else or ran out: what this worker did is not what counts.
                    self._tell("answer refused", task, held.lease, code=reply.code.value)
                    return
            await asyncio.sleep(back_off_s(round_number))
        self._tell("answer undelivered", task, held.lease)

    async def _give_back(self, task: Task, held: HeldLease) -> None:
        """Let go of a lease without an answer. One whose permission was taken back is given back too: its
        work has stopped, and what that means is settled at once.
        """
        if held.refused is not None:
            self._tell("lease lost", task, held.lease, code=held.refused.value)
            return
        if held.revoked:
            self._tell("permission taken back", task, held.lease)
        await self._release(task, held.lease, held.ends_at)

    async def _release(self, task: Task, lease: Lease, until: float) -> None:
        """Give a lease back, so that what follows is decided from its gate at once and not when it runs
        out.
        """
        for round_number in self._rounds(until):
            try:
                snapshot = await self._handle.snapshots.get()
                reply = await self._handle.store.release(lease, snapshot.revisions)
            except Unavailable as error:
                self._trouble(error)
            else:
                telemetry.LEASES.labels("release", reply.code.value).inc()
                if not _asks_again(reply):
                    self._tell("released", task, lease, code=reply.code.value)
                    await self._settle(task, reply.now_ms)
                    return
            await asyncio.sleep(back_off_s(round_number))

    async def _settle(self, task: Task, seen_ms: int) -> None:
        """Settle at once what this sidecar just stored; the settling loop does it where that fails."""
        request = task.request
        try:
            await self._settler.settle(request.operation_id, request.session_id, seen_ms=seen_ms)
        except (Unavailable, Undecidable) as error:
            _log.warning(
                "settling is left to the loop",
                tenant=self._handle.tenant,
                operation=request.operation_id,
                reason=str(error),
            )

    def _rounds(self, until: float) -> Iterator[int]:
        """Numbers of the rounds that begin before a local instant; the first one always does."""
        number = 0
        while number == 0 or self._clock.monotonic_ms() < until:
            yield number
            number += 1

    def _trouble(self, error: Unavailable) -> None:
        if isinstance(error, ReplyLost):
            telemetry.LOST_REPLIES.labels("settlement").inc()
        elif isinstance(error, TenantLost):
            # An operator may adopt it under another authority: what is known of it is read again.
            self._handle.snapshots.forget()

    def _tell(self, event: str, task: Task, lease: Lease, **facts: str) -> None:
        log = _log.warning if event != "released" else _log.info
        log(
            event,
            tenant=self._handle.tenant,
            peer=self._peer,
            operation=lease.operation_id,
            attempt=task.request.attempt,
            epoch=lease.epoch,
            fence=lease.fence,
            **facts,
        )


def _asks_again(reply: Reply) -> bool:
    """Whether a refusal is about the moment and the same call may be granted in the next one."""
    return reply.code is Code.STALE_SNAPSHOT or (
        reply.code is Code.OUTSIDE_WINDOW and reply.text(0) == "guard"
    )
