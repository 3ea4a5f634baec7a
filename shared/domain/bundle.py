"""Reading the ``interactions`` of a contract bundle: closed shapes, defaults, bounds and what must fit
together.

Defaults are those of the dataclasses in ``interaction``; bounds are the constants here. Whatever could never
work is refused when the bundle is registered, not when work is waiting for it.
"""

from __future__ import annotations

from typing import Final

from shared.domain.errors import InvalidInput
from shared.domain.ids import IdKind, check, safe_integer
from shared.domain.interaction import (
    Aggregate,
    Audience,
    AudienceRule,
    Boundary,
    Cancels,
    Completion,
    CompletionMode,
    Delivery,
    Effects,
    Inclusion,
    Interaction,
    Lease,
    OnTimeout,
    Projection,
    Retry,
    SiblingPolicy,
    Siblings,
    Threshold,
    Unit,
)
from shared.domain.schema import Predicate, Validator, check_pointer
from shared.domain.shape import array, at, choice, integer, members
from shared.domain.strict import Json

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
MAX_UNITS: Final = 256
"""Branches of one operation, hence also peers of an audience."""
MAX_ATTEMPTS: Final = 16
MAX_RESULT_BYTES: Final = 57_344
DEFAULT_RESULT_BYTES: Final = 49_152
DEFAULT_TIMEOUT_MS: Final = 30_000
DEFAULT_REPLAY_MS: Final = DAY_MS

_TIMEOUT: Final = (1, 30 * DAY_MS)
_PERIOD: Final = (10, HOUR_MS)
_REPLAY: Final = (0, 366 * DAY_MS)
_SPARE_RESULT: Final = (2, MAX_RESULT_BYTES)

_REQUIRED: Final = ("input", "result", "audience", "delivery", "completion", "effects")
_OPTIONAL: Final = (
    "success",
    "retryable",
    "timeoutMs",
    "lease",
    "retry",
    "siblings",
    "waitFor",
    "aggregate",
    "retention",
    "maxResultBytes",
    "cancels",
)


def read_interaction(name: str, value: Json, path: str) -> Interaction:
    """One interaction of a bundle. Raises InvalidInput naming the place and the rule."""
    found = members(value, path, _REQUIRED, _OPTIONAL)
    delivery = choice(found["delivery"], at(path, "delivery"), Delivery)
    audience = _audience(found["audience"], at(path, "audience"))
    completion = _completion(found["completion"], at(path, "completion"))
    _check_units(completion, delivery, audience, at(path, "completion", "threshold"))
    siblings = _siblings(found.get("siblings", {}), at(path, "siblings"))
    return Interaction(
        name=name,
        input=Validator(found["input"], at(path, "input")),
        result=Validator(found["result"], at(path, "result")),
        success=_predicate(found, "success", path),
        retryable=_predicate(found, "retryable", path),
        audience=audience,
        delivery=delivery,
        completion=completion,
        timeout_ms=integer(found, "timeoutMs", path, _TIMEOUT, DEFAULT_TIMEOUT_MS),
        lease=_lease(found.get("lease", {}), at(path, "lease")),
        retry=_retry(found.get("retry", {}), at(path, "retry")),
        effects=choice(found["effects"], at(path, "effects"), Effects),
        siblings=siblings,
        wait_for=choice(found.get("waitFor", Boundary.DECISION), at(path, "waitFor"), Boundary),
        aggregate=_aggregate(found.get("aggregate", {}), completion, at(path, "aggregate")),
        replay_ms=_replay(found.get("retention", {}), siblings, at(path, "retention")),
        max_result_bytes=integer(found, "maxResultBytes", path, _SPARE_RESULT, DEFAULT_RESULT_BYTES),
        cancels=_cancels(found["cancels"], at(path, "cancels")) if "cancels" in found else None,
    )


def _predicate(found: dict[str, Json], name: str, path: str) -> Predicate | None:
    return Predicate.read(found[name], at(path, name)) if name in found else None


def _audience(value: Json, path: str) -> Audience:
    found = members(value, path, ("peers",), ("rule", "offline", "sender"))
    listed = array(found["peers"], at(path, "peers"), 1, MAX_UNITS)
    peers = tuple(check(IdKind.PEER, peer, at(path, "peers", i)) for i, peer in enumerate(listed))
    for i, peer in enumerate(peers):
        if peer in peers[:i]:
            raise InvalidInput(at(path, "peers", i), "is listed twice")
    return Audience(
        peers,
        rule=choice(found.get("rule", AudienceRule.ELIGIBLE), at(path, "rule"), AudienceRule),
        offline=choice(found.get("offline", Inclusion.INCLUDE), at(path, "offline"), Inclusion),
        sender=choice(found.get("sender", Inclusion.INCLUDE), at(path, "sender"), Inclusion),
    )


def _completion(value: Json, path: str) -> Completion:
    found = members(value, path, ("mode",), ("unit", "threshold", "onTimeout"))
    mode = choice(found["mode"], at(path, "mode"), CompletionMode)
    if (mode is CompletionMode.QUORUM) != ("threshold" in found):
        raise InvalidInput(at(path, "threshold"), "belongs to a quorum, and a quorum needs one")
    return Completion(
        mode,
        unit=choice(found.get("unit", Unit.DISTINCT_BRANCHES), at(path, "unit"), Unit),
        threshold=_threshold(found["threshold"], at(path, "threshold")) if "threshold" in found else None,
        on_timeout=choice(found.get("onTimeout", OnTimeout.FAILED), at(path, "onTimeout"), OnTimeout),
    )


def _threshold(value: Json, path: str) -> Threshold:
    found = members(value, path, (), ("count", "fraction"))
    if len(found) != 1:
        raise InvalidInput(path, "must have either count or fraction")
    if "count" in found:
        return Threshold(count=safe_integer(found["count"], at(path, "count"), 1, MAX_UNITS))
    place = at(path, "fraction")
    pair = array(found["fraction"], place, 2, 2)
    numerator, denominator = (safe_integer(part, at(place, i), 1) for i, part in enumerate(pair))
    if numerator > denominator:
        raise InvalidInput(place, "must not exceed 1")
    return Threshold(fraction=(numerator, denominator))


def _check_units(completion: Completion, delivery: Delivery, audience: Audience, path: str) -> None:
    """Refuse a count that no manifest can reach; an explicit one may have several branches for a peer."""
    if completion.threshold is None or completion.threshold.count is None:
        return
    most = len(audience.peers)
    if delivery is Delivery.ONE_ELIGIBLE:
        most = 1
    elif delivery is Delivery.EXPLICIT and completion.unit is Unit.DISTINCT_BRANCHES:
        most = MAX_UNITS
    if completion.threshold.count > most:
        raise InvalidInput(at(path, "count"), f"can never be reached: there are at most {most} units")


def _lease(value: Json, path: str) -> Lease:
    found = members(value, path, (), ("leaseMs", "renewMs", "claimTimeoutMs", "maxClaims"))
    default = Lease()
    lease_ms = integer(found, "leaseMs", path, _PERIOD, default.lease_ms)
    # Three tenths of the lease, which for the default lease is the default: a shorter lease needs no renewMs.
    renew_ms = integer(found, "renewMs", path, (1, HOUR_MS), max(1, lease_ms * 3 // 10))
    if renew_ms >= lease_ms:
        raise InvalidInput(at(path, "renewMs"), f"must be less than leaseMs, which is {lease_ms}")
    return Lease(
        lease_ms,
        renew_ms,
        integer(found, "claimTimeoutMs", path, _PERIOD, default.claim_timeout_ms),
        integer(found, "maxClaims", path, (1, MAX_ATTEMPTS), default.max_claims),
    )


def _retry(value: Json, path: str) -> Retry:
    found = members(value, path, (), ("maxAttempts", "backoffMs"))
    default = Retry()
    return Retry(
        integer(found, "maxAttempts", path, (1, MAX_ATTEMPTS), default.max_attempts),
        integer(found, "backoffMs", path, (0, HOUR_MS), default.backoff_ms),
    )


def _siblings(value: Json, path: str) -> Siblings:
    found = members(value, path, (), ("policy", "cancelTimeoutMs", "graceMs"))
    default = Siblings()
    return Siblings(
        choice(found.get("policy", default.policy), at(path, "policy"), SiblingPolicy),
        integer(found, "cancelTimeoutMs", path, _PERIOD, default.cancel_timeout_ms),
        integer(found, "graceMs", path, _PERIOD, default.grace_ms),
    )


def _aggregate(value: Json, completion: Completion, path: str) -> Aggregate:
    found = members(value, path, (), ("projection", "output"))
    alone = completion.mode is CompletionMode.FIRST_SUCCESS
    default = Projection.FIRST if alone else Projection.COLLECT
    return Aggregate(
        choice(found.get("projection", default), at(path, "projection"), Projection),
        Validator(found["output"], at(path, "output")) if "output" in found else None,
    )


def _replay(value: Json, siblings: Siblings, path: str) -> int:
    found = members(value, path, (), ("replayMs",))
    least = siblings.cancel_timeout_ms + siblings.grace_ms
    replay_ms = integer(found, "replayMs", path, _REPLAY, DEFAULT_REPLAY_MS)
    if replay_ms < least:
        raise InvalidInput(
            at(path, "replayMs"), f"must be at least cancelTimeoutMs + graceMs, which is {least}"
        )
    return replay_ms


def _cancels(value: Json, path: str) -> Cancels:
    found = members(value, path, ("interaction", "pointer"))
    return Cancels(
        check(IdKind.INTERACTION, found["interaction"], at(path, "interaction")),
        check_pointer(found["pointer"], at(path, "pointer")),
    )
