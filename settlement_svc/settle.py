"""The only settling loop: due → load → decide → replace.

Deciding is pure (``shared.domain.decide``) and committing is one guarded script, so any number of these
loops may run side by side, in sidecars and centrally: what one of them did makes the others' decisions
refused, never wrong. Jitter and back-off only save work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import traceback
from pathlib import Path
from typing import Final

from settlement_svc.backlog import BACKLOG
from settlement_svc.contention import ROUNDS, Resting, Undecidable, Verdict, back_off_s
from settlement_svc.review import Review
from settlement_svc.rights import rights_of
from settlement_svc.sessions import Sessions
from settlement_svc.terms import terms_of
from settlement_svc.turns import SIDE_BY_SIDE, Turns
from settlement_svc.usage import UsageGauges
from shared import telemetry
from shared.domain.decide import Change, Event, Rights, Terms, apply
from shared.domain.errors import LockgateError, Unavailable
from shared.domain.ids import MAX_SAFE
from shared.domain.policy import Policy, PolicyUnreadable
from shared.domain.records import Operation
from shared.store.codes import Code
from shared.store.connection import ReplyError, ReplyLost, StoreUnavailable
from shared.store.parked import Parked
from shared.store.replies import Revisions, StoreRefusal, TenantLost
from shared.store.runtime import Runtime, TenantHandle
from shared.store.wake import EVERYTHING

IDLE_S: Final = 2.0
"""How often a tenant with open work is looked at while nothing is due: a claim brings a wake-up forward
without a hint.
"""
QUIET_S: Final = 20.0
"""How often one without open work is, whose next command comes with a hint: with its sidecar, all that is
read regularly is less than a store command per second.
"""
LOST_S: Final = 8.0
"""How often one whose store is lost is: five store commands each time."""
_SUSPECT_S: Final = 1.0
_TIDY_S: Final = 60.0
_PAGE: Final = 4 * SIDE_BY_SIDE
_TURN: Final = "turn:"
_AGAIN: Final = frozenset({Code.CONFLICT, Code.ASSERTION, Code.OUTSIDE_WINDOW, Code.STALE_SNAPSHOT})
_log = telemetry.logger("lockgate.settle")


class Settler:
    """Settles one tenant: :meth:`settle` for who just changed something, :meth:`run` for everything that
    comes due, in the tenant's turns among those that share ``turns``.
    """

    def __init__(self, runtime: Runtime, handle: TenantHandle, turns: Turns | None = None) -> None:
        self._runtime = runtime
        self._handle = handle
        self.turns: Final = turns or Turns()
        self._parked = Parked(runtime.connection, handle.tenant)
        self._usage = UsageGauges(runtime.connection, handle.tenant)
        self._next_tidy = 0.0
        self._resting = Resting()
        self._told = ""
        self.sessions = Sessions(handle, self)
        self.review: Final = Review(runtime, handle, self._judge)

    async def settle(
        self, operation_id: str, session_id: str | None = None, *, event: Event = "due", seen_ms: int = 0
    ) -> Verdict:
        """Decide what is due for one operation, commit it, and pass its session's seat on when it ended.

        ``session_id`` saves a round trip where it is known ("" means none); ``seen_ms`` is the latest store
        time known from a reply, so that what that reply made due counts as due. Raises Unavailable where
        the store cannot serve and Undecidable where the record cannot be decided; nothing is lost then, the
        operation stays due.
        """
        verdict, op = await self.decide(operation_id, session_id, event=event, seen_ms=seen_ms)
        if verdict is Verdict.SETTLED and op is not None:
            with contextlib.suppress(Unavailable, Undecidable):
                await self.sessions.after(op)
        return verdict

    async def decide(
        self, operation_id: str, session_id: str | None = None, *, event: Event = "due", seen_ms: int = 0
    ) -> tuple[Verdict, Operation | None]:
        """:meth:`settle` without what follows for the session; also gives the operation as it was decided
        on.
        """
        for round_number in range(ROUNDS):
            snapshot = await self._handle.snapshots.get()
            op = await self._handle.reads.operation(operation_id, session_id)
            if op is None:
                raise Undecidable("due, but no operation is recorded under this id")
            now_ms = max(self._runtime.clock.lower_ms(), seen_ms)
            terms, rights = await self.basis(op, snapshot.policy, now_ms)
            change = apply(op, terms, rights, event, now_ms)
            if change is None:
                return Verdict.NOTHING, op
            code = await self._replace(op, change, terms, snapshot.revisions)
            telemetry.REPLACES.labels(code.value).inc()
            if code is Code.OK:
                return self._committed(op, change), op
            if code in (Code.TERMINAL, Code.ABSENT):
                return Verdict.NOTHING, op
            if code not in _AGAIN:
                raise Undecidable(f"the store refuses the decision: {code}")
            if code is Code.STALE_SNAPSHOT:
                telemetry.STALE_SNAPSHOTS.labels("settlement").inc()
                await self._handle.snapshots.reload(snapshot)
            else:
                await asyncio.sleep(back_off_s(round_number))
        return Verdict.CONTENDED, None

    async def basis(self, op: Operation, policy: Policy, now_ms: int | None = None) -> tuple[Terms, Rights]:
        """What deciding rests on: the terms of the contract that ``op`` is pinned to, and the rights of who
        invoked it, as of the store time ``now_ms``. Undecidable where the contract is not registered.
        """
        now_ms = self._runtime.clock.lower_ms() if now_ms is None else now_ms
        contract = await self._handle.contracts.by_digest(op.admission.digest)
        if contract is None:
            raise Undecidable(f"contract {op.admission.digest} is not registered")
        terms = terms_of(contract, op.admission.interaction)
        return terms, rights_of(policy, op.admission, contract, now_ms)

    async def _judge(self, member: str) -> None:
        """Look at one open operation under the present policy; what cannot be decided is left until it is
        due. Raises only what concerns the store as a whole.
        """
        if member.startswith(_TURN):
            return
        try:
            async with self.turns.turn(self._handle.tenant):
                await self.settle(member)
        except (StoreRefusal, StoreUnavailable, ReplyLost):
            raise
        except Exception as error:  # noqa: BLE001  it concerns this item alone
            _log.warning("not judged", tenant=self._handle.tenant, member=member, reason=_told(error))

    async def _replace(self, op: Operation, change: Change, terms: Terms, revisions: Revisions) -> Code:
        try:
            reply = await self._handle.store.replace(op, change, revisions, terms.replay_ms)
        except ReplyLost:
            # Whether it was committed shows when the operation is loaded again: its revision moved or it
            # did not.
            telemetry.LOST_REPLIES.labels("settlement").inc()
            return Code.CONFLICT
        return reply.code

    def _committed(self, op: Operation, change: Change) -> Verdict:
        if change.phase != "settled":
            return Verdict.ADVANCED
        outcome = _outcome(change)
        telemetry.SETTLED.labels(outcome).inc()
        assert change.decision is not None, "only a decision settles"
        _log.info(
            "settled",
            tenant=self._handle.tenant,
            operation=op.id,
            session=op.admission.session_id,
            outcome=outcome,
            reason=change.decision.reason,
            attempt=op.branches[0].attempt,
            fence=op.branches[0].fence,
        )
        return Verdict.SETTLED

    async def run(self) -> None:
        """Settle whatever comes due until cancelled; a store that is away is waited for."""
        try:
            async with self._runtime.wake.watch(self._handle.tenant, (EVERYTHING,)) as watcher, self.review:
                while True:
                    seconds = await self._look()
                    if await watcher.wait(seconds) and seconds > 0:
                        # Whoever caused the hint usually settles at once: leave it the start.
                        await asyncio.sleep(random.uniform(0.005, 0.025))  # noqa: S311
        finally:
            BACKLOG.saw(self._handle.tenant, 0, 0)
            self._usage.forget()

    async def _look(self) -> float:
        pause = random.uniform(0.5, 1.0)  # noqa: S311
        try:
            seconds = await self.sweep()
            if await self.review.page():
                seconds = 0.0
        except (Unavailable, OSError) as error:
            if isinstance(error, TenantLost):
                # An operator may adopt it under another authority: what is known of it is read again.
                self._handle.snapshots.forget()
                pause *= LOST_S
            if str(error) != self._told:
                self._told = str(error)
                _log.warning("settling waits", tenant=self._handle.tenant, reason=self._told)
        except Exception:  # noqa: BLE001
            _log.exception("settling failed and goes on", tenant=self._handle.tenant)
        else:
            self._told = ""
            return seconds
        return pause

    async def sweep(self) -> float:
        """One pass over what is due, no more than a page of it; gives the seconds until there is anything to
        look for again.

        A pass over healthy work writes nothing. An item whose decision raises is parked and the others go
        on. Raises Unavailable where the store as a whole cannot serve, before anything is read from it.
        """
        await self._handle.snapshots.get()
        loop = asyncio.get_running_loop()
        if self._runtime.clock.suspect or not self._runtime.clock.known:
            return _SUSPECT_S
        await self._tidy()
        resting = self._resting.ends(loop.time())
        # Who rests never hides who comes after it.
        upcoming = await self._handle.reads.due(MAX_SAFE, _PAGE + len(resting))
        now = self._runtime.clock.lower_ms()
        due = [(member, at) for member, at in upcoming if at <= now]
        await self._measure(due, now, whole=len(due) < _PAGE)
        if await self._settle_all([member for member, _ in due if member not in resting]):
            return 0.0
        # Due instants are bounds of the store's clock and the estimate is below it: a little later is never
        # too early.
        waits = [(at - now) / 1000 + random.uniform(0.0, 0.01) for _, at in upcoming if at > now][:1]  # noqa: S311
        waits += [until - loop.time() for until in self._resting.ends(loop.time()).values()]
        quiet = not upcoming and self._runtime.wake.subscribed(self._handle.tenant)
        return max(0.0, min([QUIET_S if quiet else IDLE_S, *waits]))

    async def _tidy(self) -> None:
        """Now and then show what is used, and take what was settled elsewhere off a page of the parked."""
        now = asyncio.get_running_loop().time()
        if now < self._next_tidy:
            return
        await self._usage.refresh()
        if await self._parked.tidy():
            self._next_tidy = now + _TIDY_S

    async def _measure(self, due: list[tuple[str, int]], now_ms: int, *, whole: bool) -> None:
        items = len(due) if whole else await self._handle.reads.count_due(now_ms)
        BACKLOG.saw(self._handle.tenant, items, now_ms - due[0][1] if due else 0)

    async def _settle_all(self, members: list[str]) -> bool:
        """Look at members side by side in the tenant's turns, in random order; whether anything was done."""
        random.shuffle(members)
        remaining = iter(members)

        async def look() -> bool:
            progress = False
            for member in remaining:
                async with self.turns.turn(self._handle.tenant):
                    progress |= await self._settle_one(member)
            return progress

        looks = [look() for _ in range(min(SIDE_BY_SIDE, len(members)))]
        results = await asyncio.gather(*looks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return any(results)

    async def _settle_one(self, member: str) -> bool:
        try:
            if member.startswith(_TURN):
                progress = await self.sessions.advance(member.removeprefix(_TURN))
            else:
                progress = await self.settle(member) in (Verdict.SETTLED, Verdict.ADVANCED)
        except (StoreRefusal, StoreUnavailable, ReplyLost):
            raise
        except PolicyUnreadable:
            # Nothing is wrong with the item, and its deadline needs no permission: look again soon.
            progress = False
        except Exception as error:  # it concerns this item alone and must not stop the others
            if isinstance(error, ReplyError) and error.code != "WRONGTYPE":
                raise
            return await self._park(member, error)
        if not progress:
            self._resting.rest(member, asyncio.get_running_loop().time())
            return False
        self._resting.end(member)
        await self._parked.decided(member)
        return True

    async def _park(self, member: str, error: Exception) -> bool:
        reason = _told(error)
        item = await self._parked.park(member, reason, self._runtime.clock.lower_ms())
        if item is not None:
            telemetry.PARKED.inc()
            _log.error("parked", tenant=self._handle.tenant, member=member, reason=reason, tries=item.tries)
        return False


def _outcome(change: Change) -> str:
    """How it ended, in the words of a command's outcome."""
    if change.reservation == "quarantined":
        return "uncertain"
    return "completed" if change.decision is not None and change.decision.outcome == "success" else "failed"


def _told(error: Exception) -> str:
    """What a person may read about a failure: its place, never a message that could quote a payload."""
    if isinstance(error, (Undecidable, LockgateError)):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.name}, line {frame.lineno} of {Path(frame.filename).name}"
