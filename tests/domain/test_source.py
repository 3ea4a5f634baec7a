"""YAML and JSON sources: the same values, and nothing of YAML that JSON has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.errors import InvalidInput
from shared.domain.source import MAX_BUNDLE_BYTES, read_source
from tests.domain.helpers import alike


def refused(source: str | bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        read_source(source if isinstance(source, bytes) else source.encode())
    assert str(caught.value).isprintable()
    return caught.value


@pytest.mark.parametrize(
    ("plain", "meant"),
    [
        ("null", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("False", False),
        ("0", 0),
        ("-1", -1),
        ("1.0", 1),
        ("2.5", 2.5),
        ("1e3", 1000),
        ("1.0.0", "1.0.0"),
        ("yes", "yes"),
        ("on", "on"),
        ("No", "No"),
        ("2024-01-01", "2024-01-01"),
        ("a b", "a b"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("''", ""),
        ("|\n  1\n", "1\n"),
        ("{a: [1, {b: c}]}", {"a": [1, {"b": "c"}]}),
        ("[]", []),
        ("{}", {}),
        ("'\u0661'", "\u0661"),
        ("\u0661", "\u0661"),
    ],
)
def test_plain_values(plain: str, meant: object) -> None:
    assert alike(read_source(f"k: {plain}".encode()), {"k": meant})


@pytest.mark.parametrize(
    "number",
    ["0x10", "0o7", "0b1", "010", "+1", ".5", "1.", "1_000", ".inf", "-.Inf", ".nan", "190:20:30", "1e999"],
)
def test_numbers_that_readers_disagree_on_are_refused(number: str) -> None:
    assert "line 2 column 4" in refused(f"a: 1\nk: {number}").rule


@pytest.mark.parametrize("number", ["9007199254740992", "-9007199254740993", "9007199254740993.0"])
def test_numbers_follow_the_rules_of_json_bodies(number: str) -> None:
    assert "line 1" in refused(f"k: {number}").rule


@pytest.mark.parametrize(
    "source",
    [
        "a: 1\na: 2",
        "a: 1\n'a': 1",
        "x:\n  - {b: 1, b: 1}",
        '"\\u0061": 1\na: 2',
        '{"a":1,"a":1}',
    ],
)
def test_a_name_is_given_once(source: str) -> None:
    rule = refused(source).rule
    assert "repeats" in rule or "twice" in rule


@pytest.mark.parametrize(
    "source",
    [
        "a: &x 1",
        "a: &x {b: 1}\nc: *x",
        "a: *x",
        "&x a: 1",
        "base: &b {a: 1}\nmore:\n  <<: *b",
        "a: !!python/object/apply:os.system ['true']",
        "a: !!binary aGk=",
        "a: !!str 1",
        "a: ! 1",
        "a: !mine {b: 1}",
        "!!map {a: 1}",
        "? [1]\n: 2",
        "1: a",
        "true: a",
        "null: a",
        "---\na: 1\n---\nb: 1",
        "a: 1\n...\n---\nb: 2",
    ],
)
def test_what_json_has_not_is_refused(source: str) -> None:
    assert "line" in refused(source).rule


@pytest.mark.parametrize(
    "source",
    [
        "a: [1",
        "a: b: c",
        "\ta: 1",
        "a: 'x",
        "%",
        "- a\nb: 1",
        "a: \x00",
        "a: \x07",
        b"a: \xff",
        b"\xef\xbb\xbfa: 1",
        "a: @b",
    ],
)
def test_what_is_not_yaml_is_refused(source: str | bytes) -> None:
    assert refused(source).path == "bundle"


def test_lone_surrogates_are_refused_however_they_are_spelled() -> None:
    refused('a: "\\ud800"')
    refused('"\\ud800": 1')
    refused('{"a": "\\ud800"}')


def test_an_alias_bomb_is_refused_at_its_first_anchor() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert "line 1" in refused(bomb).rule


@pytest.mark.parametrize("opener", ["[", "{a: ", "- "])
def test_hostile_depth_is_refused(opener: str) -> None:
    for count in (65, 2_000, 60_000):
        refused(opener * count)


def test_size_is_looked_at_first() -> None:
    assert refused(b"\xff" * (MAX_BUNDLE_BYTES + 1)).too_large
    text = "k: " + "x" * (MAX_BUNDLE_BYTES - 3)
    assert read_source(text.encode()) == {"k": "x" * (MAX_BUNDLE_BYTES - 3)}


def test_json_is_read_as_json() -> None:
    assert read_source(b' \n {"a": [1.0, "\\u0061"]}') == {"a": [1, "a"]}
    assert "not JSON" in refused("{a: 1}").rule


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab:1 ~", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(_VALUES)
def test_json_in_yaml_clothes_means_the_same(value: object) -> None:
    """JSON with escapes is YAML, but for surrogate pairs, which YAML spells otherwise."""
    text = json.dumps({"k": value}, ensure_ascii=False)
    if text.isprintable():
        assert alike(read_source(b"--- " + text.encode()), {"k": value})
        assert alike(read_source(text.encode()), {"k": value})


def test_both_parsers_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C parser is used where it is built in; the other one must not change what a bundle means."""
    import yaml

    from shared.domain import source as module

    bundles = sorted(
        (Path(module.__file__).parents[2] / "settlement_svc" / "examples" / "bundles").glob("*.yaml")
    )
    texts = [bundle.read_bytes() for bundle in bundles] + [b"a: false\nb: '1'\nc: 1\nd: ''\ne:\nf: |\n  1\n"]
    first = [read_source(text) for text in texts]
    monkeypatch.setattr(module, "_LOADER", yaml.SafeLoader)
    assert all(map(alike, [read_source(text) for text in texts], first))
    assert len(first) > 2
