"""The policy document: what it may hold, where it is wrong, and what its patterns match."""

from __future__ import annotations

import fnmatch
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.canonical import MAX_MESSAGE_BYTES
from shared.domain.errors import InvalidInput
from shared.domain.policy_document import (
    ACTIONS,
    MAX_PATTERN,
    MAX_PATTERNS,
    MAX_PATTERNS_IN_ALL,
    MAX_POLICY_BYTES,
    MAX_RULES,
    Patterns,
    compile_policy,
    read_policy,
)

RULE: dict[str, Any] = {"principals": ["alice"], "actions": ["session.read"], "effect": "allow"}


def refused(document: Any) -> InvalidInput:
    source = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(InvalidInput) as caught:
        read_policy(source)
    return caught.value


def with_rule(**members: Any) -> dict[str, Any]:
    return {"rules": [RULE, {**RULE, **members}]}


# The document


def test_yaml_and_json_of_the_same_rules_are_the_same_policy() -> None:
    yaml = b"""
rules:   # first match decides
  - {principals: [alice, "svc.*"], actions: [session.open, command.submit],
     profiles: ["urn:example:dasp:*"], sessions: ["alice.*"], effect: allow}
  - effect: deny
    principals: ["*"]
    actions: [invoke]
    contracts: [demo.review]
    interactions: [review]
    peers: [alfa, bravo]
    sinks: [mail]
    ttlMs: 1000
"""
    first = {
        "principals": ["alice", "svc.*"],
        "actions": ["session.open", "command.submit"],
        "profiles": ["urn:example:dasp:*"],
        "sessions": ["alice.*"],
        "effect": "allow",
    }
    second = {
        "principals": ["*"],
        "actions": ["invoke"],
        "contracts": ["demo.review"],
        "interactions": ["review"],
        "peers": ["alfa", "bravo"],
        "sinks": ["mail"],
        "effect": "deny",
        "ttlMs": 1000,
    }
    from_yaml, from_json = read_policy(yaml), read_policy(json.dumps({"rules": [first, second]}).encode())
    assert from_yaml.text == from_json.text
    assert json.loads(from_yaml.text) == {"rules": [first, second]}
    assert read_policy(from_yaml.text).text == from_yaml.text
    one, two = from_yaml.rules
    assert (one.allow, one.ttl_ms, sorted(one.actions)) == (True, 60_000, ["command.submit", "session.open"])
    assert (one.peers, one.contracts, one.interactions, one.sinks) == (None, None, None, None)
    assert (two.allow, two.ttl_ms, two.profiles, two.sessions) == (False, 1000, None, None)


def test_actions_are_patterns_too() -> None:
    (one,) = read_policy(json.dumps({"rules": [{**RULE, "actions": ["session.*", "claim"]}]}).encode()).rules
    assert one.actions == {"session.open", "session.read", "session.close", "claim"}
    (every,) = read_policy(json.dumps({"rules": [{**RULE, "actions": ["*"]}]}).encode()).rules
    assert every.actions == set(ACTIONS)


@pytest.mark.parametrize(
    ("document", "place", "rule"),
    [
        ([], "policy", "must be an object"),
        ({}, "policy", 'lacks the member "rules"'),
        ({"rules": [], "version": 1}, "/version", "is not known here"),
        ({"rules": {}}, "/rules", "must be an array"),
        ({"rules": [[]]}, "/rules/0", "must be an object"),
        ({"rules": [{"principals": ["a"], "actions": ["claim"]}]}, "/rules/0", 'lacks the member "effect"'),
        (with_rule(roles=["x"]), "/rules/1/roles", "is not known here"),
        (with_rule(principals=[]), "/rules/1/principals", f"must be an array of 1 to {MAX_PATTERNS} items"),
        (with_rule(principals="alice"), "/rules/1/principals", "must be an array"),
        (with_rule(principals=["a", 7]), "/rules/1/principals/1", "must be printable text"),
        (with_rule(sessions=[""]), "/rules/1/sessions/0", "must be printable text"),
        (with_rule(sessions=["a\nb"]), "/rules/1/sessions/0", "must be printable text"),
        (with_rule(peers=["x" * 257]), "/rules/1/peers/0", f"1 to {MAX_PATTERN} characters"),
        (with_rule(profiles=None), "/rules/1/profiles", "must be an array"),
        (with_rule(contracts=["a"] * 257), "/rules/1/contracts", "must be an array"),
        (with_rule(interactions=[[]]), "/rules/1/interactions/0", "must be printable text"),
        (with_rule(sinks={}), "/rules/1/sinks", "must be an array"),
        (
            with_rule(actions=["claim", "session.opens"]),
            "/rules/1/actions/1",
            '"session.opens" names no action',
        ),
        (with_rule(actions=["*.reads"]), "/rules/1/actions/0", "names no action"),
        (with_rule(effect="permit"), "/rules/1/effect", "must be one of allow, deny"),
        (with_rule(effect=None), "/rules/1/effect", "must be one of allow, deny"),
        (with_rule(effect=["allow"]), "/rules/1/effect", "must be one of allow, deny"),
        (with_rule(ttlMs=0), "/rules/1/ttlMs", "must be an integer from 1 to 86400000"),
        (with_rule(ttlMs=86_400_001), "/rules/1/ttlMs", "must be an integer from 1 to 86400000"),
        (with_rule(ttlMs=1.5), "/rules/1/ttlMs", "must be an integer"),
        (with_rule(ttlMs=True), "/rules/1/ttlMs", "must be an integer"),
        (with_rule(ttlMs="60000"), "/rules/1/ttlMs", "must be an integer"),
    ],
)
def test_a_fault_is_told_with_its_place_and_its_rule(document: Any, place: str, rule: str) -> None:
    fault = refused(document)
    assert fault.path == place
    assert rule in fault.rule


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b'{"rules": [], "rules": []}', "twice"),
        (b"rules: []\nrules: []\n", "line 2 column 1 repeats the name"),
        (b"rules: [&a {}, *a]\n", "anchor"),
        (b"rules: !!python/object:os.system []\n", "tag"),
        (b"rules: []\n---\nrules: []\n", "second document"),
        (b"rules: [\n", "is not YAML"),
        (b"", "must be an object"),
        (b"\xff", "UTF-8"),
        (b"rules: 1_000\n", "could be a number"),
    ],
)
def test_what_is_no_plain_document_is_refused(source: bytes, said: str) -> None:
    fault = refused(source)
    assert said in (fault.description or "")


def test_the_limits_hold_to_the_last_one() -> None:
    assert len(read_policy(json.dumps({"rules": [RULE] * MAX_RULES}).encode()).rules) == MAX_RULES
    assert refused({"rules": [RULE] * (MAX_RULES + 1)}).path == "/rules"
    wide = {**RULE, "sessions": ["s" * MAX_PATTERN] * MAX_PATTERNS, "ttlMs": 86_400_000}
    read_policy(json.dumps({"rules": [wide]}).encode())
    full = MAX_PATTERNS_IN_ALL // 250
    lists = {**RULE, "principals": ["p"] * 100, "actions": ["claim"] * 50, "sessions": ["s"] * 100}
    read_policy(json.dumps({"rules": [lists] * full}).encode())
    beyond = refused({"rules": [*[lists] * full, RULE]})
    assert (beyond.path, "20000 patterns" in beyond.rule) == (f"/rules/{full}/principals", True)


def test_a_document_beyond_its_size_is_refused_unread() -> None:
    assert MAX_POLICY_BYTES == MAX_MESSAGE_BYTES
    source = b'{"rules":[]' + b" " * MAX_POLICY_BYTES + b"}"
    assert refused(source).too_large
    read_policy(b'{"rules":[]' + b" " * (MAX_POLICY_BYTES - 12) + b"}")


def test_a_value_whose_stored_form_would_be_too_large_is_refused() -> None:
    """What is stored must be readable again by whoever loads it."""
    wide = {**RULE, "sessions": ["s" * MAX_PATTERN] * MAX_PATTERNS}
    with pytest.raises(InvalidInput) as caught:
        compile_policy({"rules": [wide] * 17})
    assert caught.value.too_large


# Patterns


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("alice", ["alice"], ["", "Alice", "alice2", "malice"]),
        ("*", ["", "alice", "*"], []),
        ("**", ["", "alice"], []),
        ("alice.*", ["alice.", "alice.1", "alice.1.2"], ["alice", "alice1", "x.alice.1"]),
        ("*.svc", [".svc", "a.svc", "a.b.svc"], ["svc", "a.svc.b"]),
        ("a*b", ["ab", "axb", "abab"], ["a", "b", "aba", "xab"]),
        ("ab*ba", ["abba", "abxba"], ["aba", "ab", "abb"]),
        ("a*b*c", ["abc", "axbxc", "abbc", "acbc"], ["acb", "ac", "abcx"]),
        ("*a*", ["a", "bab"], ["", "b"]),
        ("a.c", ["a.c"], ["abc"]),
        ("[ab]?", ["[ab]?"], ["a1", "b1"]),
        ("a\\*", ["a\\", "a\\x"], ["a*"]),
        ("ab*ab*ab", ["ababab", "abxabyab"], ["abab", "ab"]),
    ],
)
def test_a_star_is_any_run_of_characters_and_nothing_else_is_special(
    pattern: str, matched: list[str], others: list[str]
) -> None:
    patterns = Patterns([pattern])
    assert [name for name in matched if not patterns.cover(name)] == []
    assert [name for name in others if patterns.cover(name)] == []


_TEXT = st.text("ab*", max_size=8)


@given(st.lists(_TEXT.filter(bool), min_size=1, max_size=5), st.text("ab", max_size=10))
def test_patterns_match_as_a_plain_matcher_does(patterns: list[str], name: str) -> None:
    """The names hold no star, and neither holds what fnmatch takes for special."""
    assert Patterns(patterns).cover(name) == any(fnmatch.fnmatchcase(name, p) for p in patterns)


def test_no_pattern_makes_matching_explode() -> None:
    """A backtracking matcher would not return in the lifetime of a test for this one."""
    pattern = "*a" * 127 + "*b"
    assert not Patterns([pattern]).cover("a" * 128)
