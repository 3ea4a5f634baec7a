"""Schemas reach nothing, explain themselves without quoting the value, and compare values by type."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.canonical import INVOCATION, parse
from shared.domain.errors import InvalidInput
from shared.domain.schema import ABSENT, Predicate, Validator, check_pointer, resolve, same


def refused(schema: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        Validator(schema, "/interactions/add/input")
    assert str(caught.value).isprintable()
    return caught.value


def fault(schema: Any, value: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        Validator(schema, "/s").check(value, "/input")
    return caught.value


class _Recorder(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = b'{"type":"integer"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listening() -> Iterator[tuple[str, list[str]]]:
    """A server that would answer any reference with a schema, and what it was asked for."""
    asked: list[str] = []
    handler = type("Recorder", (_Recorder,), {"asked": asked})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "shape",
    [
        {"$ref": "URL/x.json"},
        {"properties": {"a": {"items": {"$ref": "URL/x.json#/$defs/y"}}}},
        {"$id": "URL/base.json", "$ref": "other.json"},
        {"$dynamicRef": "URL/x.json#anchor"},
        {"$schema": "URL/meta"},
        {"allOf": [{"$id": "URL/inner", "$ref": "sibling"}]},
    ],
)
def test_nothing_is_fetched_over_the_network(listening: tuple[str, list[str]], shape: Any) -> None:
    url, asked = listening
    rule = refused(json.loads(json.dumps(shape).replace("URL", url))).rule
    assert "outside" in rule or "2020-12" in rule
    assert asked == []


def test_nothing_is_read_from_files(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"type":"integer"}')
    for reference in (other.as_uri(), str(other), "other.json", f"file:{other}"):
        assert refused({"$ref": reference}).path == "/interactions/add/input"


def test_references_inside_a_schema_work() -> None:
    tree = Validator(
        {
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
            "$ref": "#/$defs/node",
        },
        "/s",
    )
    tree.check({"next": {"next": {}}}, "/input")
    with pytest.raises(InvalidInput) as caught:
        tree.check({"next": {"next": 1}}, "/input")
    assert caught.value.path == "/input/next/next"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "number of things"}, "/type"),
        ({"properties": {"a": {"minimum": "x"}}}, "/properties/a/minimum"),
        ({"pattern": "("}, "/pattern"),
        ({"required": "a"}, "/required"),
        ({"$ref": "#/$defs/absent"}, ""),
        ([], ""),
        ("x", ""),
        (None, ""),
        (1, ""),
        ('{"type": "integer"}', ""),
    ],
)
def test_what_does_not_compile_is_refused_where_it_is_wrong(schema: Any, place: str) -> None:
    assert refused(schema).path == "/interactions/add/input" + place


def test_patterns_that_could_be_slow_do_not_compile() -> None:
    for pattern in ("(?=a)b", r"(a)\1", "(?<!a)b"):
        assert refused({"pattern": pattern}).path.endswith("/pattern")
    # What backtracking would take for ever over.
    slow = Validator({"pattern": "^(a+)+$"}, "/s")
    with pytest.raises(InvalidInput):
        slow.check("a" * 65_000 + "!", "/input")


@pytest.mark.parametrize(
    "dialect",
    ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema", "", 1, None],
)
def test_other_dialects_are_refused(dialect: object) -> None:
    assert refused({"$schema": dialect}).path == "/interactions/add/input/$schema"


def test_the_dialect_is_2020_12() -> None:
    schema: Any = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "prefixItems": [{"type": "integer"}],
        "items": False,
    }
    Validator(schema, "/s").check([1], "/input")
    assert fault(schema, [1, 2]).path == "/input/1"
    assert fault(schema, ["a"]).path == "/input/0"


@pytest.mark.parametrize(
    ("schema", "value", "place", "said"),
    [
        ({"required": ["amount"]}, {}, "/input", "amount"),
        ({"properties": {"n": {"type": "integer"}}}, {"n": "x"}, "/input/n", "integer"),
        ({"properties": {"n": {"type": "integer"}}}, {"n": True}, "/input/n", "integer"),
        ({"properties": {"n": {"maximum": 5}}}, {"n": 6}, "/input/n", "5"),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"extra": 1}, "/input", "extra"),
        ({"additionalProperties": False}, {"extra": 1}, "/input", "not allowed"),
        ({"properties": {"a/b": {"enum": ["x"]}}}, {"a/b": "y"}, "/input/a~1b", "x"),
        ({"properties": {"l": {"items": {"maxLength": 1}}}}, {"l": ["a", "bb"]}, "/input/l/1", "1"),
        (False, {}, "/input", "not allowed"),
    ],
)
def test_a_fault_names_place_and_rule(schema: Any, value: Any, place: str, said: str) -> None:
    error = fault(schema, value)
    assert error.path == place
    assert said in error.rule


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": {"type": "integer"}},
        {"additionalProperties": False},
        {"propertyNames": {"maxLength": 3}},
        {"const": 1},
        {"enum": [1, 2]},
        {"not": {}},
        {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        {"maxProperties": 0},
    ],
)
def test_a_fault_does_not_repeat_a_large_value(schema: Any) -> None:
    error = fault(schema, {"secret\x00 " * 5_000: "hidden " * 5_000})
    assert len(str(error)) < 600
    assert "hidden" not in str(error)
    assert str(error).isprintable()


def test_format_is_an_annotation_and_numbers_are_values() -> None:
    Validator({"format": "email"}, "/s").check("no address", "/input")
    Validator({"type": "integer", "multipleOf": 3}, "/s").check(3, "/input")
    assert Validator({"const": 1}, "/s").allows(1)
    assert not Validator({"const": 1}, "/s").allows(True)
    assert not Validator({"const": 1}, "/s").allows("1")


def test_nothing_is_filled_in_or_changed() -> None:
    """DASP-CORE-002g: a default is an annotation too."""
    value: Any = {"b": " x "}
    Validator({"properties": {"a": {"default": 1}, "b": {"type": "string"}}}, "/s").check(value, "/input")
    assert value == {"b": " x "}


# Pointers and typed equality


@pytest.mark.parametrize("pointer", ["/" + "a" * 1023, "", "/", "/a", "/a/0", "/a~0b~1c", "/é", "//"])
def test_json_pointers(pointer: str) -> None:
    assert check_pointer(pointer, "/p") == pointer


@pytest.mark.parametrize("pointer", ["a", "/~", "/~2", "#/a", None, 1, "/" + "a" * 1024])
def test_other_text_is_no_json_pointer(pointer: object) -> None:
    with pytest.raises(InvalidInput):
        check_pointer(pointer, "/p")


def test_pointers_resolve_as_rfc_6901_says() -> None:
    value: Any = {"foo": ["bar", "baz"], "": 0, "a/b": 1, "m~n": 8, " ": 7, "~1": 9, "n": None}
    found = {
        "": value,
        "/foo": ["bar", "baz"],
        "/foo/0": "bar",
        "/": 0,
        "/a~1b": 1,
        "/m~0n": 8,
        "/ ": 7,
        "/~01": 9,
    }
    for pointer, expected in found.items():
        assert resolve(value, pointer) == expected
    assert resolve(value, "/n") is None
    for pointer in (
        "/x",
        "/foo/2",
        "/foo/-",
        "/foo/00",
        "/foo/-1",
        "/foo/bar",
        "/n/a",
        "/foo/0/0",
        "/foo/" + "9" * 5000,
    ):
        assert resolve(value, pointer) is ABSENT


@pytest.mark.requirement("RT-BR-04")
@pytest.mark.parametrize(
    ("equals", "holds", "fails"),
    [
        (1, ["1", "1.0", "1e0"], ['"1"', "true", "null", "[1]", "2"]),
        ("1", ['"1"'], ["1", "true", "null"]),
        (True, ["true"], ["1", '"true"', "null"]),
        (False, ["false"], ["0", '""', "null", "[]"]),
        (0, ["0", "-0", "0.0"], ["false", "null", '"0"']),
        (None, ["null"], ["0", '""', "false", "[]", "{}"]),
        ("", ['""'], ["null", "false", "[]"]),
        ("é", ['"é"'], ['"e\u0301"', '"É"']),
        ([1, "a"], ['[1,"a"]'], ['["a",1]', '[true,"a"]', '[1,"a",null]']),
        (
            {"a": 1, "b": None},
            ['{"b":null,"a":1}'],
            ['{"a":1}', '{"a":true,"b":null}', '{"a":1,"b":null,"c":1}'],
        ),
        (0.5, ["0.5", "5e-1"], ["1", '"0.5"']),
    ],
)
def test_equality_is_typed(equals: Any, holds: list[str], fails: list[str]) -> None:
    predicate = Predicate.read({"pointer": "/v", "equals": equals}, "/success")
    for text in holds:
        assert predicate.holds(parse(f'{{"v":{text}}}'.encode(), INVOCATION).value)
    for text in fails:
        assert not predicate.holds(parse(f'{{"v":{text}}}'.encode(), INVOCATION).value)


@pytest.mark.requirement("RT-BR-04")
def test_an_absent_value_equals_nothing_not_even_null() -> None:
    null = Predicate.read({"pointer": "/v", "equals": None}, "/success")
    assert null.holds({"v": None})
    results: list[Any] = [{}, {"w": None}, [], None, "v"]
    for result in results:
        assert not null.holds(result)
    assert Predicate.read({"pointer": "", "equals": None}, "/success").holds(None)
    assert not same(ABSENT, ABSENT)


_SMALL = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "1", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(_SMALL, _SMALL)
def test_equality_is_that_of_canonical_forms(left: Any, right: Any) -> None:
    assert same(left, right) == (json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True))
    assert same(left, left)


@pytest.mark.parametrize(
    "predicate",
    [
        {},
        {"pointer": "/a"},
        {"equals": 1},
        {"pointer": "a", "equals": 1},
        {"pointer": "", "equals": 1, "x": 1},
        [],
    ],
)
def test_a_predicate_has_a_closed_shape(predicate: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Predicate.read(predicate, "/success")
    assert caught.value.path.startswith("/success")
