"""Contract bundles: closed shapes, defaults, bounds, and what is refused before work can wait for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.bundle import MAX_RESULT_BYTES
from shared.domain.errors import InvalidInput
from shared.domain.interaction import (
    AudienceRule,
    Boundary,
    CompletionMode,
    Delivery,
    Effects,
    Inclusion,
    OnTimeout,
    Projection,
    SiblingPolicy,
    Threshold,
    Unit,
    Verdict,
)
from tests.domain.bundles import LEAST, bundle, read, refused
from tests.domain.helpers import VECTORS


def test_what_is_left_out_has_the_documented_default() -> None:
    work = read(bundle()).interactions["work"]
    assert (work.success, work.retryable, work.cancels) == (None, None, None)
    assert (work.audience.rule, work.audience.offline, work.audience.sender) == (
        AudienceRule.ELIGIBLE,
        Inclusion.INCLUDE,
        Inclusion.INCLUDE,
    )
    assert (work.completion.unit, work.completion.threshold) == (Unit.DISTINCT_BRANCHES, None)
    assert work.completion.on_timeout is OnTimeout.FAILED
    assert work.timeout_ms == 30_000
    lease = work.lease
    assert (lease.lease_ms, lease.renew_ms, lease.claim_timeout_ms, lease.max_claims) == (
        10_000,
        3_000,
        10_000,
        5,
    )
    assert (work.retry.max_attempts, work.retry.backoff_ms) == (3, 500)
    assert work.siblings.policy is SiblingPolicy.DETACH
    assert (work.siblings.cancel_timeout_ms, work.siblings.grace_ms) == (2_000, 10_000)
    assert (work.wait_for, work.replay_ms) == (Boundary.DECISION, 86_400_000)
    assert (work.aggregate.projection, work.aggregate.output) == (Projection.FIRST, None)
    assert work.max_result_bytes == 49_152
    several = read(bundle(delivery="independent", completion={"mode": "all-terminal"})).interactions["work"]
    assert several.aggregate.projection is Projection.COLLECT


def test_everything_that_is_said_is_kept() -> None:
    made = bundle(
        success={"pointer": "/verdict", "equals": "approve"},
        retryable={"pointer": "/retry", "equals": True},
        audience={"peers": ["b", "a"], "rule": "all", "offline": "exclude", "sender": "exclude"},
        delivery="independent",
        completion={
            "mode": "quorum",
            "unit": "distinct-peers",
            "threshold": {"fraction": [2, 3]},
            "onTimeout": "partial",
        },
        timeoutMs=1,
        lease={"leaseMs": 2_000, "renewMs": 500, "claimTimeoutMs": 700, "maxClaims": 2},
        retry={"maxAttempts": 16, "backoffMs": 0},
        effects="fenced",
        siblings={"policy": "cooperative", "cancelTimeoutMs": 10, "graceMs": 20},
        waitFor="settled",
        aggregate={"projection": "tally", "output": {"type": "object"}},
        retention={"replayMs": 30},
        maxResultBytes=2,
    )
    work = read(made).interactions["work"]
    assert work.success is not None
    assert work.success.equals == "approve"
    assert work.audience.peers == ("b", "a")
    assert (work.audience.rule, work.audience.offline) == (AudienceRule.ALL, Inclusion.EXCLUDE)
    assert (work.delivery, work.completion.mode) == (Delivery.INDEPENDENT, CompletionMode.QUORUM)
    assert (work.completion.unit, work.completion.on_timeout) == (Unit.DISTINCT_PEERS, OnTimeout.PARTIAL)
    assert work.completion.needed(3) == 2
    assert (work.lease.lease_ms, work.lease.renew_ms, work.lease.max_claims) == (2_000, 500, 2)
    assert (work.retry.max_attempts, work.retry.backoff_ms) == (16, 0)
    assert (work.effects, work.siblings.policy) == (Effects.FENCED, SiblingPolicy.COOPERATIVE)
    assert (work.wait_for, work.replay_ms, work.timeout_ms) == (Boundary.SETTLED, 30, 1)
    assert (work.aggregate.projection, work.max_result_bytes) == (Projection.TALLY, 2)
    assert not Effects.UNSAFE.repeatable
    assert Effects.IDEMPOTENT.repeatable


@pytest.mark.parametrize("name", sorted(LEAST))
def test_what_has_no_default_must_be_said(name: str) -> None:
    made = bundle()
    del made["interactions"]["work"][name]
    error = refused(made)
    assert error.path == "/interactions/work"
    assert f'"{name}"' in error.rule


_WORK = "/interactions/work"
CLOSED: list[tuple[dict[str, Any], str]] = [
    ({"extra": 1}, _WORK + "/extra"),
    ({"audience": {"peers": ["a"], "extra": 1}}, _WORK + "/audience/extra"),
    ({"completion": {"mode": "first-success", "extra": 1}}, _WORK + "/completion/extra"),
    ({"lease": {"extra": 1}}, _WORK + "/lease/extra"),
    ({"retry": {"extra": 1}}, _WORK + "/retry/extra"),
    ({"siblings": {"extra": 1}}, _WORK + "/siblings/extra"),
    ({"aggregate": {"extra": 1}}, _WORK + "/aggregate/extra"),
    ({"retention": {"extra": 1}}, _WORK + "/retention/extra"),
    ({"success": {"pointer": "", "equals": 1, "extra": 1}}, _WORK + "/success/extra"),
    ({"cancels": {"interaction": "work", "pointer": "", "extra": 1}}, _WORK + "/cancels/extra"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": "x"}, _WORK + "/input"),
    ({"result": {"type": "thing"}}, _WORK + "/result/type"),
    ({"success": {"pointer": "verdict", "equals": 1}}, _WORK + "/success/pointer"),
    ({"audience": []}, _WORK + "/audience"),
    ({"audience": {"peers": []}}, _WORK + "/audience/peers"),
    ({"audience": {"peers": ["a", "b", "a"]}}, _WORK + "/audience/peers/2"),
    ({"audience": {"peers": ["a", "B"]}}, _WORK + "/audience/peers/1"),
    ({"audience": {"peers": [f"p{i}" for i in range(257)]}}, _WORK + "/audience/peers"),
    ({"audience": {"peers": ["a"], "rule": "some"}}, _WORK + "/audience/rule"),
    ({"audience": {"peers": ["a"], "offline": "maybe"}}, _WORK + "/audience/offline"),
    ({"delivery": "anycast"}, _WORK + "/delivery"),
    ({"delivery": None}, _WORK + "/delivery"),
    ({"completion": {"mode": "majority"}}, _WORK + "/completion/mode"),
    ({"completion": {"mode": "quorum"}}, _WORK + "/completion/threshold"),
    ({"completion": {"mode": "all-terminal", "threshold": {"count": 1}}}, _WORK + "/completion/threshold"),
    ({"timeoutMs": 0}, _WORK + "/timeoutMs"),
    ({"timeoutMs": 30 * 86_400_000 + 1}, _WORK + "/timeoutMs"),
    ({"timeoutMs": 1.5}, _WORK + "/timeoutMs"),
    ({"timeoutMs": "30000"}, _WORK + "/timeoutMs"),
    ({"timeoutMs": True}, _WORK + "/timeoutMs"),
    ({"timeoutMs": None}, _WORK + "/timeoutMs"),
    ({"lease": {"leaseMs": 9}}, _WORK + "/lease/leaseMs"),
    ({"lease": {"leaseMs": 3_600_001}}, _WORK + "/lease/leaseMs"),
    ({"lease": {"leaseMs": 1000, "renewMs": 1000}}, _WORK + "/lease/renewMs"),
    ({"lease": {"renewMs": 10_000}}, _WORK + "/lease/renewMs"),
    ({"lease": {"renewMs": 0}}, _WORK + "/lease/renewMs"),
    ({"lease": {"maxClaims": 0}}, _WORK + "/lease/maxClaims"),
    ({"lease": {"maxClaims": 17}}, _WORK + "/lease/maxClaims"),
    ({"lease": {"claimTimeoutMs": 1}}, _WORK + "/lease/claimTimeoutMs"),
    ({"lease": []}, _WORK + "/lease"),
    ({"retry": {"maxAttempts": 0}}, _WORK + "/retry/maxAttempts"),
    ({"retry": {"maxAttempts": 17}}, _WORK + "/retry/maxAttempts"),
    ({"retry": {"backoffMs": -1}}, _WORK + "/retry/backoffMs"),
    ({"effects": "harmless"}, _WORK + "/effects"),
    ({"siblings": {"policy": "kill"}}, _WORK + "/siblings/policy"),
    ({"siblings": {"graceMs": 0}}, _WORK + "/siblings/graceMs"),
    ({"waitFor": "admission"}, _WORK + "/waitFor"),
    ({"aggregate": {"projection": "last"}}, _WORK + "/aggregate/projection"),
    ({"retention": {"replayMs": 11_999}}, _WORK + "/retention/replayMs"),
    (
        {"siblings": {"graceMs": 3_600_000}, "retention": {"replayMs": 3_600_000}},
        _WORK + "/retention/replayMs",
    ),
    ({"retention": {"replayMs": 366 * 86_400_000 + 1}}, _WORK + "/retention/replayMs"),
    ({"maxResultBytes": 1}, _WORK + "/maxResultBytes"),
    ({"maxResultBytes": MAX_RESULT_BYTES + 1}, _WORK + "/maxResultBytes"),
    ({"cancels": {"interaction": "other", "pointer": ""}}, _WORK + "/cancels/interaction"),
    ({"cancels": {"interaction": "work", "pointer": ""}}, _WORK + "/cancels/interaction"),
    ({"cancels": {"interaction": "work", "pointer": "x"}}, _WORK + "/cancels/pointer"),
]


@pytest.mark.parametrize(("change", "place"), CLOSED + WRONG)
def test_a_wrong_interaction_is_refused_where_it_is_wrong(change: dict[str, Any], place: str) -> None:
    assert refused(bundle(**change)).path == place


def test_bounds_are_inclusive() -> None:
    assert MAX_RESULT_BYTES == 57_344
    read(bundle(timeoutMs=30 * 86_400_000, lease={"leaseMs": 3_600_000}, maxResultBytes=MAX_RESULT_BYTES))
    read(bundle(retention={"replayMs": 12_000}, lease={"leaseMs": 10}))
    assert read(bundle(lease={"leaseMs": 10})).interactions["work"].lease.renew_ms == 3


@pytest.mark.parametrize(
    ("threshold", "place"),
    [
        ({}, ""),
        ({"count": 1, "fraction": [1, 2]}, ""),
        ({"count": 0}, "/count"),
        ({"count": -1}, "/count"),
        ({"count": 1.5}, "/count"),
        ({"count": True}, "/count"),
        ({"count": 4}, "/count"),
        ({"fraction": [0, 3]}, "/fraction/0"),
        ({"fraction": [-1, 3]}, "/fraction/0"),
        ({"fraction": [1, 0]}, "/fraction/1"),
        ({"fraction": [4, 3]}, "/fraction"),
        ({"fraction": [0.5, 1]}, "/fraction/0"),
        ({"fraction": [1]}, "/fraction"),
        ({"fraction": [1, 2, 3]}, "/fraction"),
        ({"fraction": 0.5}, "/fraction"),
        ({"share": 1}, "/share"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(threshold: Any, place: str) -> None:
    made = bundle(delivery="independent", completion={"mode": "quorum", "threshold": threshold})
    assert refused(made).path == _WORK + "/completion/threshold" + place


def test_a_count_is_held_against_what_delivery_can_make() -> None:
    def quorum(delivery: str, count: int, unit: str = "distinct-branches") -> dict[str, Any]:
        threshold = {"mode": "quorum", "unit": unit, "threshold": {"count": count}}
        return bundle(delivery=delivery, completion=threshold)

    read(quorum("independent", 3))
    refused(quorum("independent", 4))
    read(quorum("one-eligible", 1))
    refused(quorum("one-eligible", 2))
    read(quorum("explicit", 256))
    refused(quorum("explicit", 257))
    refused(quorum("explicit", 4, "distinct-peers"))


@pytest.mark.requirement("RT-GUARD-10")
@pytest.mark.parametrize("vector", VECTORS["fraction_threshold"])
def test_fractions_are_exact(vector: dict[str, int]) -> None:
    made = bundle(
        delivery="independent",
        completion={"mode": "quorum", "threshold": {"fraction": [vector["num"], vector["den"]]}},
    )
    threshold = read(made).interactions["work"].completion.threshold
    assert threshold is not None
    assert threshold.needed(vector["units"]) == vector["needed"]


@pytest.mark.requirement("RT-GUARD-10")
@given(st.integers(1, 10**6), st.integers(1, 2**53 - 1), st.data())
def test_the_needed_number_is_the_least_that_reaches_the_fraction(units: int, den: int, data: Any) -> None:
    num = data.draw(st.integers(1, den))
    needed = Threshold(fraction=(num, den)).needed(units)
    assert needed * den >= units * num > (needed - 1) * den
    assert 1 <= needed <= units


def test_a_count_beyond_the_units_is_refused_at_admission_too() -> None:
    assert Threshold(count=2).needed(2) == 2
    with pytest.raises(InvalidInput):
        Threshold(count=3).needed(2)


def test_modes_without_threshold_need_one_or_all() -> None:
    for mode, needed in (("first-success", 1), ("all-successful", 5), ("all-terminal", 5)):
        completion = (
            read(bundle(delivery="independent", completion={"mode": mode})).interactions["work"].completion
        )
        assert completion.needed(5) == needed


@pytest.mark.parametrize(
    ("success", "retryable", "verdicts"),
    [
        (None, None, [Verdict.SUCCESS] * 3),
        ("ok", None, [Verdict.SUCCESS, Verdict.FAILURE, Verdict.FAILURE]),
        ("ok", "busy", [Verdict.SUCCESS, Verdict.RETRYABLE, Verdict.FAILURE]),
        (None, "busy", [Verdict.SUCCESS, Verdict.RETRYABLE, Verdict.SUCCESS]),
        ("ok", "ok", [Verdict.SUCCESS, Verdict.FAILURE, Verdict.FAILURE]),
    ],
)
def test_the_verdict_of_a_result(success: str | None, retryable: str | None, verdicts: list[Verdict]) -> None:
    predicates = {"success": success, "retryable": retryable}
    made = {k: {"pointer": "/s", "equals": v} for k, v in predicates.items() if v is not None}
    work = read(bundle(**made)).interactions["work"]
    assert [work.verdict({"s": said}) for said in ("ok", "busy", "no")] == verdicts
