"""The leases one process holds: how long it may count on each, and their renewal in one call for all.

The local end of a lease is counted from before the request for it was sent, so it is never later than the
store's own (case 39). It only tells the process when to stop; what a late answer is worth is the store's to
judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Final

from shared import telemetry
from shared.domain.errors import Unavailable
from shared.domain.policy import AuthorizationInput, Policy
from shared.store.clock import AGREEMENT_MS
from shared.store.codes import Code
from shared.store.connection import ReplyLost
from shared.store.replies import Grant, Lease
from shared.store.runtime import Runtime, TenantHandle

_AGAIN_MS: Final = 50.0
_PER_CALL: Final = 256
_SNAPSHOT_ROUNDS: Final = 3
_LARGEST_MARGIN_MS: Final = 200.0
# Refusals that concern the moment, not the lease: it is asked for again until its local end.
_NOT_NOW: Final = frozenset({Code.STALE_SNAPSHOT, Code.OUTSIDE_WINDOW, Code.INVALID})
_log = telemetry.logger("lockgate.leases")


class HeldLease:
    """A lease in use. Instants are local milliseconds of the store clock's ``monotonic_ms``.

    ``asks`` is the question whether its work may go on, put again for every renewal.
    """

    def __init__(
        self, grant: Grant, lease_ms: int, renew_ms: int, sent_at: float, asks: AuthorizationInput
    ) -> None:
        self.grant = grant
        self.asks = asks
        self.lease: Lease = grant.lease
        self.lease_ms = lease_ms
        self.renew_ms = renew_ms
        self.ends_at = sent_at + lease_ms
        self.deadline_at = sent_at + grant.deadline_ms - grant.granted_ms
        self.refused: Code | None = None
        """Why the store would not renew it: somebody else holds the branch, or it is closed."""
        self.revoked = False
        """Whether the permission for its work was taken back while it was held."""
        self.given_up = False
        self._moved = asyncio.Event()

    @property
    def stops_at(self) -> float:
        """When work on it has to stop: early enough to give the lease back while it still holds."""
        margin = min(self.lease_ms / 10, _LARGEST_MARGIN_MS)
        return min(self.ends_at - margin, self.deadline_at)

    def renewed(self, sent_at: float) -> None:
        """The store extended it by a call sent at that instant."""
        self.ends_at = max(self.ends_at, sent_at + self.lease_ms)
        self._moved.set()

    def refuse(self, code: Code) -> None:
        """It is lost."""
        self.refused = code
        self._moved.set()

    def revoke(self) -> None:
        """Stop using it: its work may not go on."""
        self.revoked = True
        self._moved.set()

    def give_up(self) -> None:
        """Stop using it, whatever is left of it (the process drains)."""
        self.given_up = True
        self._moved.set()

    @property
    def over(self) -> bool:
        return self.given_up or self.revoked or self.refused is not None

    async def until_over(self, now_ms: float) -> bool:
        """Wait until it moved or has to stop; whether it is over. ``now_ms`` is the present local instant."""
        left_s = (self.stops_at - now_ms) / 1000
        if self.over or left_s <= 0:
            return True
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._moved.wait()
        return self.over


class Leases:
    """Everything a process holds for one tenant. Run :meth:`keep` beside the work."""

    def __init__(self, runtime: Runtime, handle: TenantHandle) -> None:
        self._clock = runtime.clock
        self._handle = handle
        self._held: dict[tuple[int, int], set[HeldLease]] = {}
        self._due: dict[tuple[int, int], float] = {}
        self._changed = asyncio.Event()
        self.given_up = False
        """Whether the process drains and takes no lease any more."""

    def give_up(self) -> None:
        """Let all work on leases stop, and take no lease any more."""
        self.given_up = True
        for group in self._held.values():
            for held in group:
                held.give_up()

    @contextlib.contextmanager
    def holding(self, held: HeldLease) -> Iterator[HeldLease]:
        """Renew a lease for as long as the block runs."""
        if self.given_up:
            held.give_up()
        terms = (held.lease_ms, held.renew_ms)
        group = self._held.setdefault(terms, set())
        group.add(held)
        if terms not in self._due:
            self._due[terms] = self._next_tick(held.renew_ms)
            self._changed.set()
        try:
            yield held
        finally:
            group.discard(held)
            if not group:
                self._held.pop(terms, None)
                self._due.pop(terms, None)

    async def wait_over(self, held: HeldLease) -> None:
        """Wait until work on a lease has to stop: it was lost, given up, or nears its local end."""
        while not await held.until_over(self._clock.monotonic_ms()):
            pass

    async def keep(self) -> None:
        """Renew until cancelled: every ``renewMs`` with jitter, one call for all leases of the same terms."""
        while True:
            now = self._clock.monotonic_ms()
            for terms in [terms for terms, at in self._due.items() if at <= now]:
                await self._renew(terms)
            await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        now = self._clock.monotonic_ms()
        nearest = min(self._due.values(), default=None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if nearest is None else max(0.0, nearest - now) / 1000):
                await self._changed.wait()

    def _next_tick(self, renew_ms: int) -> float:
        return self._clock.monotonic_ms() + renew_ms * random.uniform(0.7, 1.0)  # noqa: S311

    async def _renew(self, terms: tuple[int, int]) -> None:
        leases = [held for held in self._held.get(terms, ()) if not held.over]
        settled = True
        for start in range(0, len(leases), _PER_CALL):
            settled &= await self._renew_some(leases[start : start + _PER_CALL], terms[0])
        if terms in self._due:
            again = self._clock.monotonic_ms() + _AGAIN_MS
            self._due[terms] = self._next_tick(terms[1]) if settled else min(again, self._next_tick(terms[1]))

    async def _renew_some(self, leases: Sequence[HeldLease], lease_ms: int) -> bool:
        """False when any of them has to be asked for again soon."""
        try:
            return await self._renew_permitted(leases, lease_ms)
        except ReplyLost:
            telemetry.LOST_REPLIES.labels("settlement").inc()
            return False
        except (Unavailable, OSError) as error:
            _log.warning("renewal waits", tenant=self._handle.tenant, leases=len(leases), reason=str(error))
            return False

    async def _renew_permitted(self, leases: Sequence[HeldLease], lease_ms: int) -> bool:
        """Renew those whose work may go on, and let the work on the others stop, once it is certain that the
        policy that says so is the present one (RT-OWN-04, RT-OWN-07).
        """
        settled = True
        for _ in range(_SNAPSHOT_ROUNDS):
            snapshot = await self._handle.snapshots.get()
            renewable, denied = self._judged(leases, snapshot.policy)
            moved = False
            for expires_ms, group in renewable.items():
                sent_at = self._clock.monotonic_ms()
                answers = await self._handle.store.renew(
                    [held.lease for held in group], lease_ms, snapshot.revisions, expires_ms
                )
                moved = answers[0][0] is Code.STALE_SNAPSHOT
                if moved:
                    telemetry.STALE_SNAPSHOTS.labels("settlement").inc()
                    break
                settled &= _taken(group, answers, sent_at)
                asked = set(group)
                leases = [held for held in leases if held not in asked]
            if not moved and (renewable or not denied):
                _stop(denied)
                return settled
            fresh = await self._handle.snapshots.reload(snapshot)
            if not moved and fresh.revisions == snapshot.revisions:
                _stop(denied)
                return settled
        return False

    def _judged(
        self, leases: Sequence[HeldLease], policy: Policy
    ) -> tuple[dict[int, list[HeldLease]], list[HeldLease]]:
        """Those that may go on, by the end of the right to, and those that may not.

        Rights that outlast the window of a call are one group; a short one bounds nobody else's renewal.
        """
        now_ms = self._clock.lower_ms()
        renewable: dict[int, list[HeldLease]] = {}
        denied: list[HeldLease] = []
        for held in leases:
            right = policy.decide(held.asks, now_ms)
            if right.allowed:
                expires_ms = min(right.expires_ms, now_ms + AGREEMENT_MS)
                renewable.setdefault(expires_ms, []).append(held)
            else:
                denied.append(held)
        return renewable, denied


def _taken(group: Sequence[HeldLease], answers: Sequence[tuple[Code, int]], sent_at: float) -> bool:
    """Take note of what the store said of each; False when any has to be asked for again soon."""
    settled = True
    for held, (code, _) in zip(group, answers, strict=True):
        telemetry.LEASES.labels("renew", code.value).inc()
        if code is Code.RENEWED:
            held.renewed(sent_at)
        elif code in _NOT_NOW:
            settled = False
        elif code is not Code.ANSWERED:
            held.refuse(code)
    return settled


def _stop(denied: Sequence[HeldLease]) -> None:
    for held in denied:
        held.revoke()
