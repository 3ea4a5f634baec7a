"""The effects a decision may ask for: a closed set, committed by one script or not at all."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.domain.records import Branch, Decision, Fact, Phase, Tallies

Assertion = Literal["same", "live"]


class BranchChange(msgspec.Struct, frozen=True):
    """New words for one branch and what must still hold of the old ones.

    ``same``: everything but ``until`` is as loaded; ``live``: the same grant is still pending and answered or
    unexpired. ``expired`` also needs the lease to have run out. ``send_to`` names the peer whose outbox gets
    the offer.
    """

    index: int
    assertion: Assertion
    words: str
    expired: bool = False
    send_to: str | None = None


class Change(msgspec.Struct, frozen=True):
    """One guarded replacement. Durations and bounds only; the script makes the instants (RT-TIME-04).

    ``not_before_ms`` is inclusive, ``not_after_ms`` exclusive, None means unbounded above (RT-GUARD-04,
    RT-GUARD-05).
    ``reservation`` is "replayable" or "quarantined" when the key's record moves in the same step.
    """

    not_before_ms: int = 0
    not_after_ms: int | None = None
    wake_at_ms: int | None = None
    wake_in_ms: int | None = None
    phase: Phase | None = None
    decision: Decision | None = None
    reservation: Literal["replayable", "quarantined"] | None = None
    tallies: Tallies | None = None
    state: bytes | None = None
    state_revision: str = ""
    halt: bool = False
    branches: tuple[BranchChange, ...] = ()
    sets: tuple[tuple[str, bytes], ...] = ()
    deletes: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()

    @property
    def only_wakes(self) -> bool:
        """Whether only the wake-up changes: such a change asserts the revision and does not move it."""
        return not (self.branches or self.decision or self.phase or self.sets or self.deletes or self.facts)


class Words(msgspec.Struct, frozen=True):
    """Builds the words to store from a loaded branch, with marks for what only the script knows."""

    branch: Branch

    def ended(self, status: str) -> str:
        """Terminal: the grant stays as evidence, an offer still in the outbox is withdrawn."""
        b = self.branch
        return self._words(status, b.peer, b.attempt, b.fence, b.holder, "=", b.gate, b.claims, "0", "-", "=")

    def offered(self, *, peer: str, attempt: int, fence: int, claims: int, claim_timeout_ms: int) -> str:
        """Pending without holder, sent to the outbox in the same step."""
        return self._words(
            "pending", peer, attempt, fence, None, f"+{claim_timeout_ms}", "closed", claims, "0", "@", "-"
        )

    def waiting(self, *, peer: str, backoff_ms: int) -> str:
        """The next attempt under a new fence, not offered before its retry time (RT-OWN-08, RT-OWN-09)."""
        b = self.branch
        return self._words(
            "pending", peer, b.attempt + 1, b.fence + 1, None, "0", "closed", 0, f"+{backoff_ms}", "-", "-"
        )

    def _words(
        self,
        status: str,
        peer: str,
        attempt: int,
        fence: int,
        holder: str | None,
        until: str,
        gate: str,
        claims: int,
        next_ms: str,
        outbox: str,
        digest: str,
    ) -> str:
        epoch = self.branch.epoch
        return (
            f"{status} {peer} {attempt} {epoch} {fence} {holder or '-'} {until} {gate} {claims} {next_ms} "
            f"{outbox} {digest}"
        )
