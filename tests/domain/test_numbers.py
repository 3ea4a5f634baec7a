"""The number rules by themselves: in most bodies the quick way never asks them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.ids import MAX_SAFE
from shared.domain.numbers import BadNumber, invocation_number, session_number


@pytest.mark.requirement("RT-CAN-04", "DASPX-05")
@pytest.mark.parametrize("read", [session_number, invocation_number])
def test_integer_literals_end_at_the_safe_range(read: object) -> None:
    assert callable(read)
    for value in (0, 1, -1, 10**15, 10**15 - 1, MAX_SAFE, -MAX_SAFE):
        assert read(str(value)) == value
    for value in (MAX_SAFE + 1, -MAX_SAFE - 1, 10**16 - 1, 10**16):
        with pytest.raises(BadNumber):
            read(str(value))


_TOKENS = st.from_regex(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)


def _exact(token: str) -> Fraction:
    return Fraction(token)


@pytest.mark.requirement("DASPX-05")
@given(_TOKENS)
def test_a_session_number_is_its_exact_value_or_none(token: str) -> None:
    exact = _exact(token)
    if exact.denominator == 1 and abs(exact) <= MAX_SAFE:
        value = session_number(token)
        assert type(value) is int
        assert value == exact
    else:
        with pytest.raises(BadNumber):
            session_number(token)


@pytest.mark.requirement("RT-CAN-03", "RT-CAN-04")
@given(_TOKENS)
def test_an_invocation_number_never_changes_an_integer(token: str) -> None:
    exact = _exact(token)
    literal = token.lstrip("-").isdigit()
    try:
        value = invocation_number(token)
    except BadNumber:
        assert exact.denominator == 1
        assert abs(exact) > MAX_SAFE
        return
    if exact.denominator != 1:
        assert value == float(token)
    elif literal or abs(exact) <= MAX_SAFE:
        assert type(value) is int
        assert value == exact
    else:
        assert isinstance(value, float)
        assert Fraction(repr(value)) == exact
