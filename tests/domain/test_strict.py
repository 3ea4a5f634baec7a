"""Strict reading: every place where readers are lenient, under both sets of rules where it does not matter
which.
"""

from __future__ import annotations

import json

import pytest

from shared.domain.canonical import INVOCATION, Rules, parse, quick
from shared.domain.ids import MAX_SAFE
from tests.domain.helpers import BOTH, alike, document, refusal, written


@pytest.mark.requirement("RT-CAN-05", "DASPX-05")
@pytest.mark.case(81)
@BOTH
@pytest.mark.parametrize(
    ("body", "place"),
    [
        (rb'{"k":"\ud800"}', "/k"),
        (rb'{"k":"\ude00\ud83d"}', "/k"),
        (rb'{"k":"\ud83dx"}', "/k"),
        (rb'{"k":"\uDFFF"}', "/k"),
        (rb'{"a":[0,{"k":"\ud800\u0041"}]}', "/a/1/k"),
        (rb'{"\ud800":1}', "body"),
        (rb'{"a":{"x\udc00":1}}', "/a"),
        (rb'"\ud800"', "body"),
    ],
)
def test_lone_surrogates(rules: Rules, body: bytes, place: str) -> None:
    error = refusal(body, rules)
    assert error.path == place
    assert "surrogates" in error.rule
    str(error).encode()


@pytest.mark.requirement("RT-CAN-05", "DASPX-05")
@pytest.mark.case(82)
@BOTH
@pytest.mark.parametrize(
    "body",
    [
        bytes.fromhex("7b226b223a22ff227d"),
        b'{"k":"\xc0\x80"}',
        b'{"k":"\xed\xa0\x80"}',
        b'{"k":"\xf4\x90\x80\x80"}',
        b'{"k":"\xe2\x82"}',
        b'{"\xff":1}',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-16-be"),
        '{"a":1}'.encode("utf-32"),
        '{"a":"é"}'.encode("latin-1"),
    ],
)
def test_other_encodings(rules: Rules, body: bytes) -> None:
    assert refusal(body, rules).path == "body"


@pytest.mark.requirement("RT-CAN-02", "DASPX-05")
@BOTH
@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"a":1,"a":1}', "body"),
        (b'{"a":1,"b":2,"a":3}', "body"),
        (rb'{"a":1,"\u0061":2}', "body"),
        (rb'{"\/":1,"/":2}', "body"),
        (b'{"x":{"a":1,"a":2}}', "/x"),
        (b'{"x":[[{}],{"y":{"a":null,"a":null}}]}', "/x/1/y"),
        (b'{"a":{"b":1},"a":{"b":1}}', "body"),
        (rb'{"a":":","a":1,"b":"\u003a"}', "body"),
        (rb'{"a":1,"a":1,"b":"\u003A"}', "body"),
        (b'{"":1,"":2}', "body"),
        ('{"é":1,"\\u00e9":2}'.encode(), "body"),
        (rb'{"\ud83d\ude00":1,"' + "😀".encode() + b'":2}', "body"),
    ],
)
def test_repeated_members(rules: Rules, body: bytes, place: str) -> None:
    error = refusal(body, rules)
    assert error.path == place
    assert "twice" in error.rule


@pytest.mark.requirement("RT-CAN-03", "DASPX-05")
@pytest.mark.case(85)
@BOTH
@pytest.mark.parametrize(
    "literal", ["NaN", "Infinity", "-Infinity", "1E400", "-1e400", "1e99999", "1e309", "9" * 400, "1" * 5000]
)
def test_numbers_without_a_value(rules: Rules, literal: str) -> None:
    assert refusal(f'{{"v":{literal}}}'.encode(), rules).path == "/v"
    assert refusal(literal.encode(), rules).path == "body"


@pytest.mark.case(85)
def test_the_largest_doubles_are_numbers() -> None:
    assert written('{"v":1e308}') == b'{"v":1e+308}'


@pytest.mark.requirement("RT-CAN-04")
@pytest.mark.case(84)
@BOTH
def test_integer_literals_end_at_the_safe_range(rules: Rules) -> None:
    for literal in (str(MAX_SAFE), str(-MAX_SAFE), "9007199254740991.0", "90071992547409910e-1"):
        body = f'{{"v":{literal}}}'.encode()
        assert alike(parse(body, rules).value, {"v": round(float(literal))})
    for unsafe in (
        "9007199254740992",
        "-9007199254740992",
        "9007199254740993",
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775809",
        "123456789012345678901234567890",
        "1000000000000000000000",
    ):
        assert refusal(f'{{"v":{unsafe}}}'.encode(), rules).path == "/v"
        assert refusal(f'{{"v":[0.5,{unsafe}]}}'.encode(), rules).path in ("/v/0", "/v/1")


@pytest.mark.requirement("RT-CAN-04")
@pytest.mark.case(84)
def test_other_spellings_of_large_integers_in_invocations_must_be_kept_exactly() -> None:
    """The rule is one for every spelling: the canonical form means what was sent, or the body is refused."""
    for kept in (
        "9007199254740992.0",
        "9.007199254740992e15",
        "1e16",
        "1e21",
        "1e22",
        "123e20",
        "9007199254740992.5",
    ):
        assert json.loads(written(kept)) == float(kept)
    for lost in (
        "9007199254740993.0",
        "9.007199254740993e15",
        "90071992547409930e-1",
        "999999999999999999999e0",
    ):
        assert "exactly" in refusal(f"[{lost}]".encode(), INVOCATION).rule


@pytest.mark.requirement("DASPX-05")
@pytest.mark.case(84)
@pytest.mark.parametrize(
    ("literal", "meant"),
    [
        ("3.0", 3),
        ("30e-1", 3),
        ("0.003e3", 3),
        ("-0.0", 0),
        ("0e99999999999999999999", 0),
        ("0.000e-99999999999999999999", 0),
        ("9007199254740991.000", MAX_SAFE),
        ("9.007199254740991e15", MAX_SAFE),
        ("1e15", 10**15),
        ("0." + "0" * 400 + "1e401", 1),
        ("1" + "0" * 400 + "e-400", 1),
        ("1e0000000000000000000001", 10),
    ],
)
def test_a_session_integer_may_be_spelled_in_any_way(literal: str, meant: int) -> None:
    read = document(f'{{"n":{literal}}}')
    assert alike(read.value, {"n": meant})
    assert read.canonical() == f'{{"n":{meant}}}'.encode()


@pytest.mark.requirement("DASPX-05")
@pytest.mark.case(84)
@pytest.mark.parametrize(
    "literal",
    [
        "0.5",
        "-1.5",
        "1.00000000000000001",
        "3.0000000000000000000000000000001",
        "2.9999999999999999999999999999999",
        "9007199254740991.5",
        "9007199254740992",
        "9007199254740992.0",
        "9.0071992547409911e15",
        "9.007199254740992e15",
        "1e16",
        "1e22",
        "1e99999",
        "1e-1",
        "1e-400",
        "1e-99999999999999999999",
        "1e-" + "9" * 4500,
        "1e99999999999999999999",
    ],
)
def test_other_numbers_are_no_session_integers(literal: str) -> None:
    assert refusal(f'{{"n":[1,{literal}]}}'.encode()).path == "/n/1"


def test_a_number_is_refused_for_what_is_wrong_with_it() -> None:
    assert "text" in refusal(b"0.5").rule
    assert str(MAX_SAFE) in refusal(b"1e99999").rule
    assert "double" in refusal(b"1e99999", INVOCATION).rule
    assert "byte order mark" in refusal(b"\xef\xbb\xbf{}").rule


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{} {}",
        b"{}x",
        b"{}\x00",
        b"{",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1,}',
        b"[1,]",
        b"[,1]",
        b"[1 2]",
        b"{'a':1}",
        b"{a:1}",
        b"tru",
        b"True",
        b"nul",
        b"01",
        b"-01",
        b"1.",
        b".5",
        b"+1",
        b"-",
        b"1e",
        b"1e+",
        b"0x10",
        b"1_000",
        b'"\t"',
        b'"\x00"',
        b'"\\x41"',
        b'"\\u12g4"',
        b'"\\u123',
        b'"a',
        b"/* c */ {}",
        b"{} // c",
        b"\x0b{}",
        b"\xa0{}",
        b"\x00",
        "\u2028{}".encode(),
    ],
)
@pytest.mark.requirement("DASPX-05")
def test_what_is_not_json(rules: Rules, body: bytes) -> None:
    assert refusal(body, rules).path == "body"


@BOTH
def test_depth_of_a_whole_body(rules: Rules) -> None:
    deepest = b"[" * rules.max_depth + b"]" * rules.max_depth
    assert parse(deepest, rules).canonical() == deepest
    mixed = b'{"a":' * (rules.max_depth - 1) + b"[1.0]" + b"}" * (rules.max_depth - 1)
    assert parse(mixed, rules).canonical().count(b"{") == rules.max_depth - 1
    for body in (b"[" + deepest + b"]", b'{"k":' + deepest + b"}", b'["}]",' + deepest + b"]"):
        error = refusal(body, rules)
        assert (error.path, error.too_large) == ("body", True)
    wide = b"[" + b"[]," * 5000 + b"{}]"
    assert parse(wide, rules).canonical() == wide
    assert quick(wide, rules) is not None, "many containers side by side are no reason for the slow way"


@BOTH
@pytest.mark.parametrize("opener", [b"[", b'{"a":', b'[{"a":'])
def test_hostile_depth_is_an_ordinary_refusal(rules: Rules, opener: bytes) -> None:
    for count in (200, 1_000, 5_000, 100_000):
        assert refusal(opener * count, rules).path == "body"
    assert refusal(b"[" * 100_000 + b"]" * 100_000, rules).path == "body"


@pytest.mark.requirement("DASPX-06")
@BOTH
def test_the_size_of_a_body_is_looked_at_first(rules: Rules) -> None:
    body = b'{"a":"' + b"x" * 1_048_568 + b'"}'
    assert len(body) == 1_048_576
    assert parse(body, rules).canonical() == body
    error = refusal(body[:-2] + b'x"}', rules)
    assert (error.path, error.too_large) == ("body", True)
    assert refusal(b"\xff" * 11, rules, max_bytes=10).too_large


@BOTH
def test_a_refusal_stays_small_and_printable(rules: Rules) -> None:
    key = "k\\n" * 50_000
    deep = f'{{"{"n" * 90}":' * 30 + '{"b":NaN}' + "}" * 30
    for body in (
        deep,
        f'{{"{key}":{{"a":1,"a":2}}}}',
        f'{{"{key}":1,"{key}":2}}',
        '{"a":' * 30 + '{"b":NaN}' + "}" * 30,
    ):
        described = str(refusal(body.encode(), rules))
        assert len(described) < 1500
        assert described.isprintable()


def test_the_root_can_be_named() -> None:
    assert refusal(b"{", root="answer").path == "answer"
    assert refusal(b'{"a":0.5}', root="answer").path == "/a"
    assert refusal(b'{"a":0.5}', root="/session/initial").path == "/session/initial/a"
