"""The table of refusals."""

from __future__ import annotations

import pytest

from shared.domain import errors
from shared.domain.errors import ErrorKind, InputFault, InvalidInput, LockgateError, NotFound, Unavailable


@pytest.mark.requirement("RT-ERR-01")
def test_there_are_exactly_the_seven_kinds() -> None:
    assert {kind.value for kind in ErrorKind} == {
        "invalid-input",
        "denied",
        "unavailable",
        "conflict",
        "expired",
        "unsupported",
        "protocol-conflict",
    }


@pytest.mark.requirement("RT-ERR-01")
def test_every_refusal_is_of_one_kind_and_its_description_is_optional() -> None:
    made: dict[str, LockgateError] = {
        "denied": errors.Denied(),
        "unavailable": errors.Unavailable(),
        "conflict": errors.Conflict(),
        "expired": errors.Expired(),
        "unsupported": errors.Unsupported(),
        "protocol-conflict": errors.ProtocolConflict(),
    }
    for kind, error in made.items():
        assert (error.kind.value, error.description) == (kind, None)
        assert str(error) == kind


def test_invalid_input_names_place_and_rule_and_hints_at_the_answer() -> None:
    error = InvalidInput("/input/amount", "must be an integer", code=InputFault.TOO_LARGE)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.description == "/input/amount: must be an integer"
    assert error.too_large
    assert not InvalidInput("body", "is not JSON").too_large


def test_a_missing_thing_and_a_hidden_one_are_told_alike() -> None:
    assert NotFound().description == NotFound().description == "not found"
    with pytest.raises(TypeError):
        NotFound("of another tenant")  # type: ignore[call-arg]


def test_only_unavailable_asks_to_come_back() -> None:
    assert Unavailable("store away", retry_after_s=3).retry_after_s == 3
    assert errors.Conflict().retry_after_s is None
    assert errors.Denied(unauthenticated=True).unauthenticated
    assert Unavailable(rate_limited=True).rate_limited
