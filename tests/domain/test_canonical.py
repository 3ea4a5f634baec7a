"""Canonical writing: the published vectors, which bodies are equal, parts of documents, values of ours."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest

from shared.domain.canonical import (
    INVOCATION,
    SESSION,
    Rules,
    canonical,
    input_digest,
    parse,
)
from shared.domain.errors import InvalidInput
from shared.domain.ids import MAX_SAFE, intent_digest, operation_id
from tests.domain.helpers import BOTH, VECTORS, alike, document, written


@pytest.mark.requirement("RT-CAN-01")
@BOTH
def test_keys_sort_by_utf16_units(rules: Rules) -> None:
    order = VECTORS["jcs_key_order"]["expected_order"]
    for keys in (order, order[::-1], sorted(order)):
        body = json.dumps(dict.fromkeys(keys), ensure_ascii=False)
        assert list(json.loads(written(body, rules))) == order
        assert list(json.loads(written(json.dumps(dict.fromkeys(keys)), rules))) == order


@pytest.mark.requirement("RT-CAN-01")
def test_the_sample_of_rfc_8785() -> None:
    body = (
        r'{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],'
        r'"string": "\u20ac$\u000F\u000aA'
        "'"
        r'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}'
    )
    assert (
        written(body)
        == (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ).encode()
    )


@pytest.mark.requirement("RT-CAN-01")
@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("0", "0"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("5e-324", "5e-324"),
        ("-5e-324", "-5e-324"),
        ("1.7976931348623157e308", "1.7976931348623157e+308"),
        ("-1.7976931348623157e308", "-1.7976931348623157e+308"),
        ("9007199254740991", "9007199254740991"),
        ("-9007199254740991", "-9007199254740991"),
        ("9007199254740992.0", "9007199254740992"),
        ("295147905179352830000.0", "295147905179352830000"),
        ("999999999999999700000.0", "999999999999999700000"),
        ("999999999999999900000.0", "999999999999999900000"),
        ("1e16", "10000000000000000"),
        ("1e20", "100000000000000000000"),
        ("1e21", "1e+21"),
        ("1E+21", "1e+21"),
        ("1e23", "1e+23"),
        ("9.999999999999997e22", "9.999999999999997e+22"),
        ("0.000001", "0.000001"),
        ("1e-6", "0.000001"),
        ("9.5e-6", "0.0000095"),
        ("1e-7", "1e-7"),
        ("9.999999999999997e-7", "9.999999999999997e-7"),
        ("333333333.3333332", "333333333.3333332"),
        ("333333333.33333325", "333333333.33333325"),
        ("1.00000000000000001", "1"),
        ("2251799813685248.5", "2251799813685248.5"),
        ("4503599627370497.5", "4503599627370498"),
        ("1e-400", "0"),
        ("1e0", "1"),
        ("100.0", "100"),
        ("1e308", "1e+308"),
    ],
)
def test_numbers_are_written_as_rfc_8785_says(literal: str, expected: str) -> None:
    assert written(literal) == expected.encode()
    assert written(f'{{"b": [1, {literal}], "a": "x"}}') == f'{{"a":"x","b":[1,{expected}]}}'.encode()


@pytest.mark.requirement("KEYX-50")
@pytest.mark.parametrize("vector", VECTORS["adapter_v1_canonical_json"])
def test_the_adapter_form_is_the_canonical_form(vector: dict[str, Any]) -> None:
    body = json.dumps(vector["input"], indent=1).encode()
    for rules in (SESSION, INVOCATION):
        form = parse(body, rules).canonical()
        assert form == vector["canonical"].encode()
        assert input_digest(form) == vector["sha256"]
    assert canonical(vector["input"]) == vector["canonical"].encode()


# Equality of bodies


@pytest.mark.requirement("RT-CAN-06", "DASP-CORE-002c")
@pytest.mark.case(87)
@BOTH
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":{"c":2,"d":3}}', ' { "b" : { "d":3, "c":2 } ,\r\n\t"a":1 } '),
        ('{"n":0}', '{"n":-0}'),
        ('{"n":0}', '{"n":-0.0}'),
        ('{"n":1}', '{"n":1.0}'),
        ('{"n":1}', '{"n":1e0}'),
        ('{"n":1}', '{"n":10E-1}'),
        ('{"n":3}', '{"n":0.003e3}'),
        (r'{"s":"/"}', r'{"s":"\/"}'),
        (r'{"s":"a"}', r'{"s":"\u0061"}'),
        (r'{"s":":"}', r'{"s":"\u003a"}'),
        ('{"s":"😀"}', r'{"s":"\ud83d\ude00"}'),
        (r'{"a":1}', r'{"\u0061":1}'),
    ],
)
def test_equal_bodies_have_one_form(rules: Rules, one: str, other: str) -> None:
    assert written(one, rules) == written(other, rules)
    assert alike(parse(one.encode(), rules).value, parse(other.encode(), rules).value)


@pytest.mark.requirement("RT-CAN-06")
@pytest.mark.case(87)
@pytest.mark.parametrize(("one", "other"), [("1e21", "1E+21"), ("0.000001", "1e-6"), ("2.5", "25e-1")])
def test_equal_fractions_and_large_numbers_have_one_form(one: str, other: str) -> None:
    assert written(f'{{"n":{one}}}') == written(f'{{"n":{other}}}')


@BOTH
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            '{"a":[1,2]}', '{"a":[2,1]}', marks=pytest.mark.requirement("RT-CAN-06", "DASP-CORE-002d")
        ),
        pytest.param('{"a":"\u00c5"}', '{"a":"A\u030a"}', marks=pytest.mark.requirement("DASP-CORE-002e")),
        pytest.param('{"\u00c5":1}', '{"A\u030a":1}', marks=pytest.mark.requirement("DASP-CORE-002e")),
        pytest.param('{"a":"\u212b"}', '{"a":"\u00c5"}', marks=pytest.mark.requirement("DASP-CORE-002e")),
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":1}', '{"a":true}'),
        ('{"a":"x"}', '{"a":"x "}'),
        ('{"a":"x"}', '{"A":"x"}'),
    ],
)
def test_different_bodies_have_different_forms(rules: Rules, one: str, other: str) -> None:
    assert written(one, rules) != written(other, rules)


@pytest.mark.requirement("DASP-CORE-002f")
@BOTH
def test_absent_null_and_empty_are_four_things(rules: Rules) -> None:
    bodies = ("{}", '{"a":null}', '{"a":""}', '{"a":[]}', '{"a":{}}', '{"a":0}', '{"a":false}')
    assert len({written(body, rules) for body in bodies}) == len(bodies)


@pytest.mark.requirement("DASP-CORE-002c", "DASP-CORE-002d", "DASP-CORE-002e", "DASP-CORE-002f")
def test_the_intent_of_a_command_sees_exactly_these_differences() -> None:
    def intent(text: str) -> bytes:
        doc = document(text)
        return intent_digest("s", "n", doc.check_payload(doc.value, "/input"))

    assert intent('{"a":{"x":1,"y":2},"b":3.0}') == intent('{"b":3,"a":{"y":2,"x":1}}')
    different = ['{"a":[1,2]}', '{"a":[2,1]}', '{"a":"é"}', '{"a":"e\u0301"}', "{}", '{"a":null}', '{"a":""}']
    assert len({intent(text) for text in different}) == len(different)


@pytest.mark.requirement("RT-CAN-07")
def test_equal_input_under_another_contract_is_another_operation() -> None:
    digests = [hashlib.sha256(written(f'{{"contract":"c","v":{n}}}')).hexdigest() for n in (1, 2)]
    assert operation_id("alice", "sha256:" + digests[0], "k") != operation_id(
        "alice", "sha256:" + digests[1], "k"
    )


@pytest.mark.case(89)
@BOTH
def test_characters_are_escaped_no_more_than_needed(rules: Rules) -> None:
    assert written('{"k":"\u2028\u2029\u007f\\u000f\\u001F<>&é😀"}', rules) == (
        '{"k":"\u2028\u2029\u007f\\u000f\\u001f<>&é😀"}'.encode()
    )
    short = r"\b\t\n\f\r\"\\"
    assert written(f'"{short}"', rules) == f'"{short}"'.encode()


@pytest.mark.case(91)
@BOTH
def test_what_a_script_language_would_rewrite_stays(rules: Rules) -> None:
    body = b'{"a":[],"b":{},"n":9007199254740991,"s":"a/b","z":null}'
    assert parse(body, rules).canonical() == body


# Documents and their parts


@BOTH
@pytest.mark.parametrize("marker", ["", '"\\u003a"', '"\ue000😀"'], ids=["quick", "escaped", "sorted apart"])
def test_parts_are_written_like_documents(rules: Rules, marker: str) -> None:
    text = '{"z":{"b":[1.0,{"y":null,"x":-0}],"a":"é"},"n":null,"m":[' + marker + "]}"
    doc = parse(text.encode(), rules)
    assert isinstance(doc.value, dict)
    assert doc.canonical(doc.value["z"]) == '{"a":"é","b":[1,{"x":0,"y":null}]}'.encode()
    assert doc.canonical(doc.value["n"]) == b"null"
    whole = doc.canonical()
    assert parse(whole, rules).canonical() == whole
    assert doc.canonical(doc.value) == whole


@pytest.mark.parametrize("part", ['{"\ue000":1,"😀":2}', "[1e16,1e-6,0.1,100000000000000000000.0]"])
def test_parts_that_need_the_exact_way_get_it(part: str) -> None:
    doc = parse(f'{{"z":{part}}}'.encode(), INVOCATION)
    assert isinstance(doc.value, dict)
    assert doc.canonical(doc.value["z"]) == written(part)


def test_values_of_ours_are_written_the_same_way() -> None:
    value: Any = {"\ufb33": 1, "😀": [1.0, 1e16, 1e-6, -0.0, 0.1], "a": {"d": True, "c": None}, "b": "e-7,"}
    text = json.dumps(value)
    assert canonical(value) == parse(text.encode(), INVOCATION).canonical()
    assert canonical({"b": 1, "a": [True, None, "x"]}) == b'{"a":[true,null,"x"],"b":1}'
    assert [canonical(number) for number in (1.0, 1e16, 1e-6, 1e-7)] == [
        b"1",
        b"1" + b"0" * 16,
        b"0.000001",
        b"1e-7",
    ]
    assert canonical({"\ue000": 1, "😀": 2}) == '{"😀":2,"\ue000":1}'.encode()


@pytest.mark.parametrize(
    "value",
    [
        {"n": MAX_SAFE + 1},
        {"n": math.nan},
        {"a": None, "n": [-math.inf]},
        [math.inf],
        {"s": "\ud800"},
        {"\ud800": 1},
        {1: "a"},
        [b"bytes"],
        [{1, 2}],
        [object()],
    ],
)
def test_values_of_ours_without_a_form(value: Any) -> None:
    with pytest.raises(InvalidInput):
        canonical(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidInput):
        canonical(endless)
