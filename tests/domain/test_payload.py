"""The limits of a session payload, exact and one beyond, counted from the payload and not from its body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.domain.canonical import INVOCATION, SESSION, Document, parse
from shared.domain.errors import InvalidInput
from tests.domain.helpers import document, refusal

pytestmark = pytest.mark.requirement("DASPX-06")


def command(payload: str) -> tuple[Document, Any]:
    doc = document('{"command_id":"c","input":' + payload + ',"name":"n"}')
    assert isinstance(doc.value, dict)
    return doc, doc.value["input"]


def checked(payload: str) -> bytes:
    doc, value = command(payload)
    return doc.check_payload(value, "/input")


def over(payload: str) -> InvalidInput:
    doc, value = command(payload)
    with pytest.raises(InvalidInput) as caught:
        doc.check_payload(value, "/input")
    assert len(str(caught.value)) < 1500
    return caught.value


def nested(depth: int, inner: str = "1") -> str:
    """An object with ``depth`` containers on one path, objects and arrays by turns."""
    for level in range(depth, 0, -1):
        inner = '{"k":' + inner + "}" if level % 2 else "[" + inner + "]"
    return inner


def test_nesting_is_16_from_the_root_of_the_payload() -> None:
    assert checked(nested(16)) == nested(16).encode()
    assert checked('{"a":' + nested(15) + ',"b":[]}')
    error = over(nested(17))
    assert error.too_large
    assert error.path.startswith("/input/k/0/k")
    assert over('{"a":[],"b":' + nested(16) + "}").path.startswith("/input/b/")
    # The envelope around it has a limit of its own.
    assert refusal(('{"input":' + nested(32) + "}").encode()).too_large


def test_many_containers_side_by_side_are_not_deep() -> None:
    payload = '{"a":[' + ",".join(["[{}]"] * 1000) + "]}"
    assert checked(payload) == payload.encode()


def test_brackets_inside_text_are_not_containers() -> None:
    payload = json.dumps({"s": "[{" * 5000}, separators=(",", ":"))
    assert checked(payload) == payload.encode()


@pytest.mark.parametrize("where", ["{}", '{{"a":[{}]}}'])
def test_a_container_has_at_most_1024_entries(where: str) -> None:
    def members(count: int) -> str:
        return "{" + ",".join(f'"k{i}":{i}' for i in range(count)) + "}"

    assert checked(where.format(members(1024)))
    error = over(where.format(members(1025)))
    assert (error.path, error.too_large) == ("/input" if where == "{}" else "/input/a/0", True)


def test_an_array_has_at_most_1024_items() -> None:
    def items(count: int) -> str:
        return '{"a":{"b":[' + ",".join("1" * count) + "]}}"

    assert checked(items(1024))
    assert over(items(1025)).path == "/input/a/b"
    several = '{"a":[' + ",".join("1" * 1024) + '],"b":[' + ",".join("2" * 1024) + "]}"
    assert checked(several) == several.encode()


def test_the_place_named_is_the_one_that_is_over() -> None:
    full = '{"a":[' + ",".join("1" * 1024) + '],"b":"short",'
    assert over(full + '"c":[' + ",".join("1" * 1025) + "]}").path == "/input/c"
    assert over(full + '"c":{"d":"' + "x" * 65_537 + '"}}').path == "/input/c/d"


@pytest.mark.parametrize(("letter", "count"), [("x", 65_536), ("é", 32_768), ("€", 21_845), ("😀", 16_384)])
def test_a_string_or_a_name_has_at_most_65536_bytes(letter: str, count: int) -> None:
    longest = letter * count
    for text in (f'{{"a":["{longest}"]}}', f'{{"{longest}":1}}'):
        assert checked(text) == text.encode()
    assert over(f'{{"a":["{longest}{letter}"]}}').path == "/input/a/0"
    error = over(f'{{"a":{{"{longest}{letter}":1}}}}')
    assert (error.path, error.too_large) == ("/input/a", True)


def test_escapes_do_not_count_as_the_bytes_they_stand_for() -> None:
    escaped = r"\u0041" * 65_536
    assert checked(f'{{"a":"{escaped}"}}') == b'{"a":"' + b"A" * 65_536 + b'"}'
    controls = r"\n" * 65_536
    assert checked(f'{{"a":"{controls}"}}') == f'{{"a":"{controls}"}}'.encode()


@pytest.mark.parametrize("payload", ["[]", '"x"', "1", "null", "true", "[{}]"])
def test_a_payload_is_an_object(payload: str) -> None:
    error = over(payload)
    assert (error.path, error.rule) == ("/input", "must be an object")


def test_a_payload_may_be_empty_and_hold_every_kind_of_value() -> None:
    assert checked("{}") == b"{}"
    assert checked('{"a":[null,true,false,-1,"",{},[]]}') == b'{"a":[null,true,false,-1,"",{},[]]}'


def test_invocation_input_has_only_the_limits_of_its_body() -> None:
    body = b'{"input":[' + b"0.5," * 2000 + b"[" * 40 + b"]" * 40 + b"]}"
    doc = parse(body, INVOCATION)
    assert isinstance(doc.value, dict)
    assert doc.check_payload(doc.value["input"], "/input") == body[len(b'{"input":') : -1]


def test_the_limits_are_those_that_are_published() -> None:
    assert SESSION.payload is not None
    limits = (SESSION.payload.nesting, SESSION.payload.entries, SESSION.payload.string_bytes)
    assert limits == (16, 1024, 65_536)
