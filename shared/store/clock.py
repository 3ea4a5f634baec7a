"""What this process knows of the store's clock, the only clock that decides anything.

The estimate is a line: the store's time in a sample, plus the local time that has passed since. Request
starts and upper bounds of time guards are read off it, so that a store whose clock jumps can fail a guard but
never expire anything early (RT-TIME-01, RT-GUARD-17, RT-GUARD-18; DESIGN section 6). One estimate per server:
two servers are two clocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from shared.domain.errors import Unavailable
from shared.store.connection import Connection

AGREEMENT_MS: Final = 4_000
"""How far a sample may be off the estimate and still correct it, and how far ahead of it a guard may reach.
"""

SMALL_ROLLBACK_MS: Final = 250
"""A step back up to this is waited out; a larger one refuses protected transitions until time has caught up.
"""

FRESH_ACCEPT_MS: Final = 60_000
"""How long after ``lockgate clock accept`` a process may still act on it, in the accepted clock's own time.
"""


def boot_ms() -> float:
    """Local milliseconds from an arbitrary start; they go on in sleep and nobody can set them."""
    # Where there is no CLOCK_BOOTTIME, the monotonic clock counts sleep by itself (macOS).
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) / 1e6


@dataclass(frozen=True)
class _Sample:
    """Store time minus local time, as one reply bounds it: the store read its clock between sending and
    receipt.
    """

    low: float
    high: float

    def ahead_of(self, line: float) -> float:
        """How far the store is at least ahead of a line (ms); not above 0 where it may be on it."""
        return self.low - line

    def behind(self, line: float) -> float:
        """How far the store is at least behind a line (ms); not above 0 where it may be on it."""
        return line - self.high

    def agrees(self, line: float) -> bool:
        """Whether the line is near enough to be corrected by this sample."""
        return max(self.ahead_of(line), self.behind(line)) <= AGREEMENT_MS


class StoreClock:
    """A lower bound of the store's time, corrected by the time in every reply; instants in ms.

    - A sample within 4,000 ms of the estimate corrects it. - One further ahead never moves it, whatever reply
    it came in: the clock is *suspect* until samples agree again or an operator accepts the new time. - One
    behind moves it back: the scripts refuse by the last committed time until that is caught up. Until then
    the former line is kept, so that a clock which returns to it has not jumped.

    A process that starts while the clock is off takes it as it is. Nothing here does I/O; local time and
    sleeping are injected.
    """

    def __init__(
        self,
        monotonic_ms: Callable[[], float] = boot_ms,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.monotonic_ms = monotonic_ms
        self._sleep = sleep
        self._line: float | None = None
        self._former: float | None = None
        self._suspected: _Sample | None = None
        self._latest_ms = 0
        self._accepted_ms: int | None = None

    def observe(self, store_ms: int, sent_at: float, received_at: float) -> None:
        """Take the store's time from a reply, also from a refusal; the instants are of ``monotonic_ms``."""
        # The store cuts its time to whole milliseconds: the true one is up to a millisecond later.
        sample = _Sample(store_ms - received_at, store_ms + 1 - sent_at)
        line = sample.low if self._line is None else self._line
        if sample.ahead_of(line) > AGREEMENT_MS:
            if self._former is None or not sample.agrees(self._former):
                self._suspected = sample
                return
            line = self._former
        if sample.behind(line) > 0:
            self._former = line if self._former is None else max(line, self._former)
            line = sample.low
        # A slow reply that fits the line says nothing new: its own lower bound would only be further off.
        self._line = max(line, sample.low)
        self._suspected = None
        if store_ms >= self._latest_ms:
            self._latest_ms, self._former = store_ms, None

    @property
    def known(self) -> bool:
        """Whether the store's time was ever seen."""
        return self._line is not None

    @property
    def suspect(self) -> bool:
        """Whether the store's clock runs further ahead than can be believed: nothing may be granted by it."""
        return self._suspected is not None

    def lower_ms(self, at: float | None = None) -> int:
        """The store's time now, or at the local instant ``at``, as a lower bound; a request starts at it.

        Raises Unavailable before the first sample.
        """
        if self._line is None:
            raise Unavailable("the store's time is not known yet")
        return math.floor((self.monotonic_ms() if at is None else at) + self._line)

    def not_after(self, limit: int = AGREEMENT_MS) -> int:
        """The latest upper bound of a guard that is sent now: what no honest clock passes within ``limit``
        ms.
        """
        return self.lower_ms() + limit

    def accept(self, accepted_ms: int) -> bool:
        """Believe the suspect clock because an operator did, at the store's time ``accepted_ms``; True if
        taken.

        Each acceptance counts once and only while fresh, so that it never covers a later jump. One that fits
        nothing seen so far may be offered again after the next sample.
        """
        if self._line is None or accepted_ms == self._accepted_ms:
            return False
        suspected = self._suspected
        if suspected is not None and self._fits(suspected.low, accepted_ms):
            self._line, self._suspected = suspected.low, None
        elif not self._fits(self._line, accepted_ms):
            return False
        self._accepted_ms, self._latest_ms, self._former = accepted_ms, accepted_ms, None
        return True

    async def wait_out(self, rollback_ms: int) -> None:
        """Wait until the store's clock has made up for a small step back; Unavailable for a larger one
        (RT-GUARD-17).
        """
        if rollback_ms > SMALL_ROLLBACK_MS:
            raise Unavailable(f"the store's clock stepped back by {rollback_ms} ms")
        await self._sleep((rollback_ms + 1) / 1000)

    def _fits(self, line: float, accepted_ms: int) -> bool:
        return -AGREEMENT_MS <= self.monotonic_ms() + line - accepted_ms <= FRESH_ACCEPT_MS


async def sample_clock(connection: Connection, clock: StoreClock) -> None:
    """Read the store's time once. Raises as :meth:`Connection.call` does."""
    sent_at = clock.monotonic_ms()
    seconds, micros = await connection.call("TIME")
    clock.observe(int(seconds) * 1000 + int(micros) // 1000, sent_at, clock.monotonic_ms())


async def keep_sampled(connection: Connection, clock: StoreClock, every_s: float = 1.0) -> None:
    """Sample until cancelled: an idle process must not drift, and a suspect clock may come back."""
    while True:
        with suppress(Unavailable):
            await sample_clock(connection, clock)
        await asyncio.sleep(every_s)
