"""The quick way against the exact one: 200,000 random bodies under both rules, and properties of all of them.

The reference is the strict reader with the reference library's writer. Whatever the quick way accepts, the
reference accepts, with the same value (types included) and the same bytes; what the guards turn away costs
time and nothing else.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain import strict
from shared.domain.canonical import INVOCATION, SESSION, Rules, canonical, parse, quick
from shared.domain.errors import InvalidInput
from shared.domain.strict import Json
from tests.domain import generate
from tests.domain.helpers import BOTH, alike

PARTS = 8
BODIES = 25_000


def reference(body: bytes, rules: Rules) -> tuple[Json, bytes] | None:
    try:
        value = strict.read(body, rules.exact, rules.max_depth, "body")
        return value, strict.canonical_form(value)
    except InvalidInput:
        return None


@pytest.mark.requirement("RT-CAN-01", "RT-CAN-02", "RT-CAN-03", "RT-CAN-04", "RT-CAN-05")
@pytest.mark.parametrize("part", range(PARTS))
def test_the_quick_way_is_never_wrong(part: int) -> None:
    seed = int(os.environ.get("LOCKGATE_TEST_SEED", random.randrange(2**32))) + part
    print(f"seed {seed - part}, part {part}; LOCKGATE_TEST_SEED={seed - part} repeats it")
    source = random.Random(seed)
    accepted = quickly = 0
    for _ in range(BODIES):
        body = generate.body(source)
        for rules in (SESSION, INVOCATION):
            document = quick(body, rules)
            expected = reference(body, rules)
            accepted += expected is not None
            if document is None:
                continue
            quickly += 1
            assert expected is not None, f"seed {seed}: accepts {body!r}"
            assert document.canonical() == expected[1], f"seed {seed}: writes {body!r} otherwise"
            assert alike(document.value, expected[0]), f"seed {seed}: reads {body!r} otherwise"
    # A generator that makes only refused bodies, or a quick way that is never taken, would prove nothing.
    assert accepted > BODIES
    assert quickly > accepted // 2


@BOTH
def test_a_body_is_read_alike_whichever_way_it_takes(rules: Rules) -> None:
    source = random.Random(7)
    for _ in range(3_000):
        body = generate.body(source)
        expected = reference(body, rules)
        try:
            document = parse(body, rules)
        except InvalidInput:
            assert expected is None, body
        else:
            assert expected is not None, body
            assert document.canonical() == expected[1]
            assert alike(document.value, expected[0])


_SCALARS = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text()
_PAYLOADS = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _utf16_sorted(value: Any) -> Any:
    if isinstance(value, dict):
        order = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return {key: _utf16_sorted(value[key]) for key in order}
    return [_utf16_sorted(item) for item in value] if isinstance(value, list) else value


@pytest.mark.requirement("RT-CAN-01", "RT-CAN-06")
@given(_PAYLOADS, st.booleans(), st.sampled_from([None, 1]))
def test_any_payload_is_written_as_sorted_compact_json(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    """Against the standard library, whose escapes are those of RFC 8785 but for U+007F, which it leaves alone
    too.
    """
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    expected = json.dumps(_utf16_sorted(value), ensure_ascii=False, separators=(",", ":")).encode()
    for rules in (SESSION, INVOCATION):
        document = parse(body, rules)
        assert alike(document.value, value)
        assert document.canonical() == expected
    assert canonical(value) == expected


@pytest.mark.requirement("RT-CAN-01")
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_double_is_written_as_the_reference_writes_it(number: float) -> None:
    body = f'{{"a":[{number!r}]}}'.encode()
    expected = reference(body, INVOCATION)
    assert expected is not None
    assert parse(body, INVOCATION).canonical() == expected[1]
    assert float(json.loads(expected[1])["a"][0]) == number
    assert canonical({"a": [number]}) == expected[1]


@given(st.binary(max_size=40))
def test_any_bytes_are_a_document_or_a_refusal(body: bytes) -> None:
    outcomes: list[str] = []
    for rules in (SESSION, INVOCATION):
        try:
            outcomes.append(parse(body, rules).canonical().decode())
        except InvalidInput as refused:
            outcomes.append(str(refused))
    assert all(outcome.encode() for outcome in outcomes)


@given(st.text(alphabet='{}[]",:\\u0034aeE+-.09 dD8\ud83d', max_size=30))
def test_any_text_of_json_characters_is_a_document_or_a_refusal(text: str) -> None:
    body = text.encode("utf-8", "surrogatepass")
    for rules in (SESSION, INVOCATION):
        expected = reference(body, rules)
        document = quick(body, rules)
        if document is not None:
            assert expected is not None
            assert document.canonical() == expected[1]
