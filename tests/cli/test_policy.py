"""Policies from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from tests.cli.conftest import Lockgate, LockgateJson

RULES = """
rules:
  - {principals: [alice], actions: ["session.*", command.submit], effect: allow}
  - {principals: ["*"], actions: [invoke], peers: [alfa], effect: deny, ttlMs: 1000}
"""
DOCUMENT = {
    "rules": [
        {"principals": ["alice"], "actions": ["session.*", "command.submit"], "effect": "allow"},
        {"principals": ["*"], "actions": ["invoke"], "peers": ["alfa"], "effect": "deny", "ttlMs": 1000},
    ]
}


@pytest.fixture(autouse=True)
def _tenant(lockgate: Lockgate) -> None:
    lockgate("tenant", "create", "acme")


def test_a_policy_is_applied_and_shown(
    lockgate: Lockgate, lockgate_json: LockgateJson, tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(RULES)
    assert lockgate_json("policy", "show") == {
        "revision": "1",
        "document": None,
        "appliedAtMs": None,
        "appliedBy": None,
    }
    said = lockgate("policy", "apply", str(file), "--tenant", "acme").stdout
    assert "is in force" in said
    assert "revision 2" in said
    assert "was in force already, revision 2" in lockgate("policy", "apply", str(file)).stdout
    shown = lockgate_json("policy", "show")
    assert (shown["revision"], shown["document"]) == ("2", DOCUMENT)
    assert shown["appliedAtMs"] > 0
    assert shown["appliedBy"]


def test_what_is_shown_can_be_applied_again(lockgate: Lockgate, lockgate_json: LockgateJson) -> None:
    lockgate("policy", "apply", "-", given=RULES)
    shown = lockgate("policy", "show")
    assert json.loads(shown.stdout) == DOCUMENT
    assert "revision 2" in shown.stderr
    again = lockgate("policy", "apply", "-", given=shown.stdout).stdout
    assert "was in force already" in again


def test_without_a_policy_it_is_said_what_holds(lockgate: Lockgate) -> None:
    shown = lockgate("policy", "show")
    assert shown.stdout == ""
    assert "no policy" in shown.stderr


def test_a_wrong_document_is_refused_with_its_place_and_nothing_is_stored(
    lockgate: Lockgate, raw: redis.Redis, tmp_path: Path
) -> None:
    lockgate("policy", "apply", "-", given=RULES)
    before = raw.dump("lg:{acme}:policy"), raw.dump("lg:{acme}:meta")
    file = tmp_path / "policy.yaml"
    file.write_text(RULES.replace("deny", "denied"))
    said = lockgate("policy", "apply", str(file), status=1).stderr
    assert "policy.yaml: /rules/1/effect: must be one of allow, deny" in said
    said = lockgate("policy", "apply", "-", status=1, given="rules: []\nrules: []\n").stderr
    assert "standard input: policy: line 2 column 1 repeats the name" in said
    assert lockgate("policy", "apply", str(tmp_path / "none"), status=2).stderr
    assert (raw.dump("lg:{acme}:policy"), raw.dump("lg:{acme}:meta")) == before


def test_a_policy_that_builds_on_another_revision_is_refused(
    lockgate: Lockgate, lockgate_json: LockgateJson
) -> None:
    lockgate("policy", "apply", "-", "--if-revision", "1", given=RULES)
    other = RULES.replace("alice", "bob")
    said = lockgate("policy", "apply", "-", "--if-revision", "1", status=1, given=other).stderr
    assert "revision" in said
    assert lockgate_json("policy", "show")["document"] == DOCUMENT
    lockgate("policy", "apply", "-", "--if-revision", "2", given=other)
    assert lockgate_json("policy", "show")["document"] != DOCUMENT


def test_a_lost_tenant_gets_no_policy(lockgate: Lockgate, raw: redis.Redis) -> None:
    raw.delete("lg:{acme}:meta")
    lockgate("policy", "apply", "-", "--tenant", "acme", status=1, given=RULES)
    lockgate("policy", "show", "--tenant", "acme", status=1)
    assert raw.keys("lg:{acme}:*") == []
