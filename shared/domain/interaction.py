"""What one interaction of a contract promises: who is asked, when it is decided, how often it is tried.

Durations are milliseconds. Everything here is frozen: a record pinned to a digest is judged by these terms
for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shared.domain.errors import InvalidInput
from shared.domain.schema import Predicate, Validator
from shared.domain.strict import Json


class AudienceRule(StrEnum):
    """Whether a peer that may not take part is left out, or fails the admission (RT-ADM-08)."""

    ELIGIBLE = "eligible"
    ALL = "all"


class Inclusion(StrEnum):
    """Whether offline peers, or the sender itself, are part of the manifest (RT-ADM-06, RT-ADM-07)."""

    INCLUDE = "include"
    EXCLUDE = "exclude"


class Delivery(StrEnum):
    """How branches come to peers: one each, one that moves on, or as the caller lists them."""

    INDEPENDENT = "independent"
    ONE_ELIGIBLE = "one-eligible"
    EXPLICIT = "explicit"


class CompletionMode(StrEnum):
    """When an operation is decided."""

    FIRST_SUCCESS = "first-success"
    QUORUM = "quorum"
    ALL_SUCCESSFUL = "all-successful"
    ALL_TERMINAL = "all-terminal"


class Unit(StrEnum):
    """What a vote counts for."""

    DISTINCT_BRANCHES = "distinct-branches"
    DISTINCT_PEERS = "distinct-peers"


class OnTimeout(StrEnum):
    """What a deadline decides; ``partial`` needs at least one success."""

    PARTIAL = "partial"
    FAILED = "failed"


class Effects(StrEnum):
    """What repeating the work may do; decides what follows an answer that was lost behind an open gate."""

    NONE = "none"
    IDEMPOTENT = "idempotent"
    FENCED = "fenced"
    UNSAFE = "unsafe"

    @property
    def repeatable(self) -> bool:
        """Whether work that may have run can be run again."""
        return self is not Effects.UNSAFE


class SiblingPolicy(StrEnum):
    """What happens to unfinished branches at an early decision."""

    DETACH = "detach"
    COOPERATIVE = "cooperative"


class Boundary(StrEnum):
    """What a caller waits for."""

    DECISION = "decision"
    SETTLED = "settled"


class Projection(StrEnum):
    """How results become one output."""

    COLLECT = "collect"
    FIRST = "first"
    TALLY = "tally"


class Verdict(StrEnum):
    """What a valid result says of its branch (RT-BR-02, RT-BR-03)."""

    SUCCESS = "success"
    RETRYABLE = "retryable"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Audience:
    """The peers that may be asked, as the bundle lists them."""

    peers: tuple[str, ...]
    rule: AudienceRule = AudienceRule.ELIGIBLE
    offline: Inclusion = Inclusion.INCLUDE
    sender: Inclusion = Inclusion.INCLUDE


@dataclass(frozen=True, slots=True)
class Threshold:
    """How many units a quorum needs: a count, or a fraction as exact integers (RT-GUARD-10). One of them is
    set.
    """

    count: int | None = None
    fraction: tuple[int, int] | None = None

    def needed(self, units: int) -> int:
        """The number needed of ``units``; InvalidInput where there are too few of them (RT-ADM-17)."""
        if self.fraction is not None:
            numerator, denominator = self.fraction
            return -(-units * numerator // denominator)
        count = self.count or 0
        if count > units:
            raise InvalidInput("threshold", f"needs {count} units, but there are only {units}")
        return count


@dataclass(frozen=True, slots=True)
class Completion:
    """When the operation is decided; ``threshold`` belongs to a quorum alone."""

    mode: CompletionMode
    unit: Unit = Unit.DISTINCT_BRANCHES
    threshold: Threshold | None = None
    on_timeout: OnTimeout = OnTimeout.FAILED

    def needed(self, units: int) -> int:
        """How many of ``units`` must succeed (all-terminal: must end)."""
        if self.threshold is not None:
            return self.threshold.needed(units)
        return 1 if self.mode is CompletionMode.FIRST_SUCCESS else units


@dataclass(frozen=True, slots=True)
class Lease:
    """A grant lasts ``lease_ms`` and is renewed every ``renew_ms``. An offer that nobody claims within
    ``claim_timeout_ms`` moves on; a branch is granted at most ``max_claims`` times per attempt."""

    lease_ms: int = 10_000
    renew_ms: int = 3_000
    claim_timeout_ms: int = 10_000
    max_claims: int = 5


@dataclass(frozen=True, slots=True)
class Retry:
    """Application attempts in all, and the pause before the next one."""

    max_attempts: int = 3
    backoff_ms: int = 500


@dataclass(frozen=True, slots=True)
class Siblings:
    """How unfinished branches are cancelled, and how long settling them may take beside the deadline."""

    policy: SiblingPolicy = SiblingPolicy.DETACH
    cancel_timeout_ms: int = 2_000
    grace_ms: int = 10_000


@dataclass(frozen=True, slots=True)
class Aggregate:
    """How the output is made, and the schema it must satisfy."""

    projection: Projection
    output: Validator | None = None


@dataclass(frozen=True, slots=True)
class Cancels:
    """The interaction whose operations this one cancels, and where its input names the operation."""

    interaction: str
    pointer: str


@dataclass(frozen=True, slots=True, eq=False)
class Interaction:
    """One interaction, complete with defaults. Compared by identity, so that it can be a cache key.

    Without ``success`` every result that satisfies its schema and asks for no retry is a success.
    ``replay_ms`` bounds how long a closed invocation answers repeats (commands answer as long as their
    session lives). ``max_result_bytes`` bounds the canonical form of a result.
    """

    name: str
    input: Validator
    result: Validator
    success: Predicate | None
    retryable: Predicate | None
    audience: Audience
    delivery: Delivery
    completion: Completion
    timeout_ms: int
    lease: Lease
    retry: Retry
    effects: Effects
    siblings: Siblings
    wait_for: Boundary
    aggregate: Aggregate
    replay_ms: int
    max_result_bytes: int
    cancels: Cancels | None = None

    def verdict(self, result: Json) -> Verdict:
        """What a schema-valid result means. A retryable failure is only a wish: budget, time and owner
        decide.
        """
        if self.success is not None and self.success.holds(result):
            return Verdict.SUCCESS
        if self.retryable is not None and self.retryable.holds(result):
            return Verdict.RETRYABLE
        return Verdict.SUCCESS if self.success is None else Verdict.FAILURE
