"""Deciding by a policy document: which rule covers what, for how long, and that nobody else decides."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.domain.errors import InvalidInput, Unavailable
from shared.domain.policy import (
    Action,
    Authorization,
    AuthorizationInput,
    Policy,
    read_input,
    read_policy,
)
from shared.domain.policy_document import ACTIONS, DEFAULT_TTL_MS

NOW = 1_796_025_679_851
EVERYTHING: list[Action] = list(ACTIONS)
SESSION_ACTIONS: list[Action] = ["session.open", "session.read", "session.close", "command.submit"]
ADMINISTRATION: list[Action] = ["operate", "contract.apply"]
WORK_ACTIONS: list[Action] = ["branch.assign", "claim", "answer"]


def rule(**members: Any) -> dict[str, Any]:
    return {"principals": ["*"], "actions": ["*"], "effect": "allow", **members}


def policy(*rules: dict[str, Any], revision: str = "7") -> Policy:
    return Policy(revision, read_policy(json.dumps({"rules": rules}).encode()))


def asked(action: Action = "session.read", principal: str = "alice", **more: Any) -> AuthorizationInput:
    return AuthorizationInput(principal, action, **more)


def allowed(by: Policy, action: Action = "session.read", principal: str = "alice", **more: Any) -> bool:
    return by.decide(asked(action, principal, **more), NOW).allowed


# The question


@pytest.mark.requirement("RT-AUTH-01")
def test_a_question_is_invocation_action_peer_branch_and_attempt_and_nothing_else() -> None:
    members = {
        "principal": "alice",
        "action": "branch.assign",
        "session_id": "s1",
        "owner": "bob",
        "profile": "urn:x:p",
        "contract": "demo.review",
        "interaction": "review",
        "peer": "alfa",
        "branch": "alfa",
        "sink": "mail",
        "attempt": 3,
    }
    question = read_input(members)
    assert {name: getattr(question, name) for name in question.__struct_fields__} == members
    for unknown in ("role", "tenant", "publisher", "attempts"):
        with pytest.raises(InvalidInput, match=unknown):
            read_input({**members, unknown: "x"})
        with pytest.raises(TypeError):
            AuthorizationInput("alice", "claim", **{unknown: "x"})  # type: ignore[arg-type]


@pytest.mark.requirement("RT-AUTH-01")
@pytest.mark.parametrize("missing", ["principal", "action"])
def test_a_question_names_who_and_what(missing: str) -> None:
    members = {"principal": "alice", "action": "claim"}
    del members[missing]
    with pytest.raises(InvalidInput, match=missing):
        read_input(members)


@pytest.mark.requirement("RT-AUTH-01")
def test_an_action_is_one_of_the_known_ones() -> None:
    for action in ACTIONS:
        assert read_input({"principal": "alice", "action": action}).action == action
    with pytest.raises(InvalidInput):
        read_input({"principal": "alice", "action": "session.*"})


@pytest.mark.requirement("RT-AUTH-02")
@pytest.mark.parametrize("attempt", [1, 2, 16])
def test_attempts_from_1_to_16_are_asked_about(attempt: int) -> None:
    assert asked("claim", attempt=attempt).attempt == attempt
    assert read_input({"principal": "alice", "action": "claim", "attempt": attempt}).attempt == attempt


@pytest.mark.requirement("RT-AUTH-02")
@pytest.mark.parametrize("attempt", [0, 17, -1, 2**53, 1.0, 1.5, "1", True, None])
def test_other_attempts_are_refused(attempt: Any) -> None:
    with pytest.raises(InvalidInput, match="attempt"):
        asked("claim", attempt=attempt)
    with pytest.raises(InvalidInput, match="attempt"):
        read_input({"principal": "alice", "action": "claim", "attempt": attempt})


# No document


def test_without_a_document_a_principal_uses_its_own_sessions_and_work_goes_on() -> None:
    none = Policy("1")
    assert (none.document, none.applies) == (None, False)
    for action in SESSION_ACTIONS:
        assert allowed(none, action, session_id="s1")
        assert allowed(none, action, session_id="s1", owner="alice")
        assert not allowed(none, action, session_id="s1", owner="bob")
    for action in WORK_ACTIONS:
        assert allowed(none, action, session_id="s1", owner="bob", peer="alfa")
    assert none.decide(asked(), NOW) == Authorization(True, "1", NOW + DEFAULT_TTL_MS)
    assert none.granted(NOW) == Authorization(True, "1", NOW + DEFAULT_TTL_MS)
    assert none.offers("alice", "urn:x:p", "demo.counter")


@pytest.mark.requirement("RT-AUTH-05")
def test_a_policy_that_cannot_be_read_allows_nothing_and_denies_nothing() -> None:
    unreadable = Policy.unreadable("4")
    assert unreadable.applies
    assert unreadable.document is not None
    for action in EVERYTHING:
        with pytest.raises(Unavailable):
            allowed(unreadable, action)
    with pytest.raises(Unavailable):
        unreadable.offers("alice", "urn:x:p", "demo.counter")


# Rules


@pytest.mark.requirement("RT-AUTH-04")
def test_what_no_rule_covers_is_denied_except_for_what_administers() -> None:
    empty = policy()
    assert empty.applies
    for action in EVERYTHING:
        assert allowed(empty, action) == (action in ADMINISTRATION), action


@pytest.mark.requirement("RT-AUTH-04")
def test_administration_is_denied_by_a_rule_that_says_so() -> None:
    by = policy(rule(principals=["mallory"], actions=ADMINISTRATION, effect="deny"))
    for action in ADMINISTRATION:
        assert not allowed(by, action, "mallory")
        assert allowed(by, action, "olga")


def test_the_first_rule_that_covers_decides() -> None:
    deny, allow = rule(principals=["alice"], effect="deny"), rule()
    assert not allowed(policy(deny, allow))
    assert allowed(policy(allow, deny))
    assert allowed(policy(deny, allow), principal="bob")


def test_a_verdict_carries_its_revision_and_its_end() -> None:
    by = policy(
        rule(principals=["alice"], ttlMs=250),
        rule(principals=["bob"], effect="deny", ttlMs=9),
        rule(principals=["carol"]),
        revision="42",
    )
    assert by.decide(asked(principal="alice"), NOW) == Authorization(True, "42", NOW + 250)
    assert by.decide(asked(principal="alice"), NOW + 7) == Authorization(True, "42", NOW + 257)
    assert by.decide(asked(principal="bob"), NOW) == Authorization(False, "42", NOW + 9)
    assert by.decide(asked(principal="carol"), NOW) == Authorization(True, "42", NOW + 60_000)
    assert by.decide(asked(principal="dora"), NOW) == Authorization(False, "42", NOW + 60_000)


@pytest.mark.parametrize(
    ("member", "question"),
    [
        ("principals", "principal"),
        ("actions", "action"),
        ("profiles", "profile"),
        ("sessions", "session_id"),
        ("contracts", "contract"),
        ("interactions", "interaction"),
        ("sinks", "sink"),
    ],
)
@pytest.mark.parametrize("effect", ["allow", "deny"])
def test_a_list_covers_only_what_it_names(member: str, question: str, effect: str) -> None:
    named = "claim" if member == "actions" else "named"
    by = policy(
        rule(**{member: [named], "effect": effect}), rule(effect="deny" if effect == "allow" else "allow")
    )
    values: dict[str, Any] = {"principal": "alice", "action": "effect.write"}
    other = "answer" if member == "actions" else "other"
    expected = effect == "allow"
    assert by.decide(AuthorizationInput(**{**values, question: named}), NOW).allowed is expected
    assert by.decide(AuthorizationInput(**{**values, question: other}), NOW).allowed is not expected
    if member not in ("principals", "actions"):
        assert by.decide(AuthorizationInput(**values), NOW).allowed is not expected


def test_an_allow_rule_without_sessions_covers_ones_own_and_a_deny_rule_all() -> None:
    allow = policy(rule())
    for owner, expected in (("", True), ("alice", True), ("bob", False)):
        assert allowed(allow, session_id="s1", owner=owner) is expected
    deny = policy(rule(actions=["session.read"], effect="deny"), rule(sessions=["*"]))
    for owner in ("", "alice", "bob"):
        assert not allowed(deny, session_id="s1", owner=owner)


def test_a_rule_with_sessions_covers_them_whoever_owns_them() -> None:
    by = policy(rule(sessions=["shared.*"]))
    assert allowed(by, session_id="shared.1", owner="bob")
    assert allowed(by, session_id="shared.1", owner="alice")
    assert not allowed(by, session_id="alice.1", owner="alice")


@pytest.mark.parametrize(
    ("session", "admitting", "other"), [("s1", "command.submit", "invoke"), ("", "invoke", "command.submit")]
)
@pytest.mark.parametrize("action", WORK_ACTIONS)
def test_who_may_admit_work_may_have_it_done(
    session: str, admitting: str, other: str, action: Action
) -> None:
    question = {"session_id": session, "owner": "alice" if session else "", "peer": "alfa"}
    assert allowed(policy(rule(actions=[admitting])), action, **question)
    assert not allowed(policy(rule(actions=[other])), action, **question)
    assert not allowed(policy(rule(actions=[admitting], effect="deny"), rule()), action, **question)
    assert allowed(policy(rule(actions=[other], effect="deny"), rule()), action, **question)
    assert allowed(policy(rule(actions=[action])), action, **question)
    assert not allowed(policy(rule(actions=[action])), "command.submit", **question)


def test_only_work_is_stood_for_by_what_admits_it() -> None:
    by = policy(rule(actions=["command.submit", "invoke"]))
    for action in EVERYTHING:
        granted = action in ("command.submit", "invoke", *WORK_ACTIONS, *ADMINISTRATION)
        assert allowed(by, action, session_id="s1", owner="alice") is granted, action


@pytest.mark.parametrize("action", WORK_ACTIONS)
def test_peers_narrow_where_work_may_go(action: Action) -> None:
    work = {"session_id": "s1", "owner": "alice"}
    narrow = policy(rule(actions=["command.submit"], peers=["alfa", "br*"]))
    assert allowed(narrow, action, peer="alfa", **work)
    assert allowed(narrow, action, peer="bravo", **work)
    assert not allowed(narrow, action, peer="charlie", **work)
    assert allowed(narrow, "command.submit", **work), "admitting asks about no peer"
    wide = policy(rule(actions=["command.submit"]))
    assert allowed(wide, action, peer="charlie", **work)


def test_denying_a_peer_denies_nothing_where_no_peer_is_asked_about() -> None:
    work = {"session_id": "s1", "owner": "alice"}
    by = policy(rule(peers=["alfa"], effect="deny"), rule())
    assert not allowed(by, "claim", peer="alfa", **work)
    assert allowed(by, "claim", peer="bravo", **work)
    assert allowed(by, "command.submit", **work)


def test_every_part_of_a_question_is_told_apart_when_it_is_remembered() -> None:
    """Verdicts are kept by question: none may answer for another."""
    base: dict[str, Any] = {
        "principal": "alice",
        "action": "claim",
        "session_id": "s1",
        "owner": "alice",
        "profile": "p1",
        "contract": "c1",
        "interaction": "i1",
        "peer": "alfa",
        "sink": "k1",
    }
    lists = {
        "principal": "principals",
        "session_id": "sessions",
        "profile": "profiles",
        "contract": "contracts",
        "interaction": "interactions",
        "peer": "peers",
        "sink": "sinks",
    }
    for member, listed in lists.items():
        by = policy(rule(**{listed: [base[member]]}))
        assert by.decide(AuthorizationInput(**base), NOW).allowed
        assert not by.decide(AuthorizationInput(**{**base, member: "other"}), NOW).allowed, member
        assert by.decide(AuthorizationInput(**base), NOW).allowed
    by = policy(rule())
    assert allowed(by, owner="alice")
    assert not allowed(by, owner="bob")
    by = policy(rule(actions=["session.read"]))
    assert allowed(by, "session.read")
    assert not allowed(by, "session.close")


def test_what_is_remembered_is_bounded_and_stays_right() -> None:
    by = policy(rule(sessions=["yes.*"]))
    for n in range(9_000):
        assert allowed(by, session_id=f"yes.{n}", owner="bob")
        assert not allowed(by, session_id=f"no.{n}", owner="bob")
    assert len(by._verdicts) <= 4_096


# What a principal may open


def test_a_profile_is_offered_to_who_may_open_any_session_of_it() -> None:
    by = policy(
        rule(principals=["mallory"], effect="deny"),
        rule(principals=["alice"], sessions=["secret.*"], effect="deny"),
        rule(
            principals=["alice", "mallory"], actions=["session.open"], profiles=["urn:x:*"], sessions=["a.*"]
        ),
        rule(principals=["bob"], actions=["session.open"], contracts=["demo.notes"]),
        rule(principals=["carol"], actions=["session.read"]),
    )
    assert by.offers("alice", "urn:x:p", "demo.counter")
    assert not by.offers("alice", "urn:y:p", "demo.counter")
    assert by.offers("bob", "urn:y:p", "demo.notes")
    assert not by.offers("bob", "urn:x:p", "demo.counter")
    assert not by.offers("carol", "urn:x:p", "demo.counter")
    assert not by.offers("mallory", "urn:x:p", "demo.counter")
