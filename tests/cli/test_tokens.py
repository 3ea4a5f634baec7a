"""Tokens from the command line."""

from __future__ import annotations

import pytest
import redis

from shared.domain.credentials import parse_token, secret_digest
from tests.cli.conftest import Lockgate, LockgateJson


@pytest.fixture(autouse=True)
def _tenant(lockgate: Lockgate) -> None:
    lockgate("tenant", "create", "acme")


def test_a_token_is_printed_alone_and_only_its_hash_is_kept(
    lockgate: Lockgate, lockgate_json: LockgateJson, raw: redis.Redis
) -> None:
    text = lockgate("token", "create", "alice").stdout
    token = parse_token(text.removesuffix("\n"))
    assert token.tenant == "acme"
    listed = lockgate_json("token", "list")
    assert [(row["tokenId"], row["principal"], row["roles"]) for row in listed] == [
        (token.token_id, "alice", ["caller"])
    ]
    stored = raw.hget("lg:{acme}:tokens", token.token_id)
    assert isinstance(stored, bytes)
    assert secret_digest(token.secret).encode() in stored
    for key in raw.keys("*"):
        assert token.secret.encode() not in (raw.dump(key) or b"")
    assert token.secret not in lockgate("token", "list").stdout


def test_roles_and_expiry_are_kept(lockgate: Lockgate, lockgate_json: LockgateJson) -> None:
    lockgate("token", "create", "svc", "--role", "peer:counter", "--role", "operator", "--expires-in", "12h")
    (row,) = lockgate_json("token", "list")
    assert row["roles"] == ["operator", "peer:counter"]
    assert row["expiresAtMs"] - row["createdAtMs"] == 12 * 3_600_000
    assert row["expired"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        ("alice", "--role", "root"),
        ("alice", "--role", "peer:BAD"),
        ("dasp",),
        ("a b",),
        ("alice", "--expires-in", "0d"),
        ("alice", "--expires-in", "10"),
        ("alice", "--expires-in", "99999d"),
        ("alice", "--expires-in", "-1h"),
    ],
)
def test_wrong_words_are_wrong_usage_and_make_no_token(
    lockgate: Lockgate, raw: redis.Redis, arguments: tuple[str, ...]
) -> None:
    lockgate("token", "create", *arguments, status=2)
    assert not raw.exists("lg:{acme}:tokens")


def test_a_revoked_token_is_gone_and_the_policy_revision_moves(
    lockgate: Lockgate, lockgate_json: LockgateJson
) -> None:
    kept = parse_token(lockgate("token", "create", "alice").stdout.strip())
    gone = parse_token(lockgate("token", "create", "bob").stdout.strip())
    before = lockgate_json("tenant", "show", "acme")["policyRevision"]
    lockgate("token", "revoke", gone.token_id)
    assert [row["tokenId"] for row in lockgate_json("token", "list")] == [kept.token_id]
    assert lockgate_json("tenant", "show", "acme")["policyRevision"] != before
    assert "lockgate token list" in lockgate("token", "revoke", gone.token_id, status=1).stderr


def test_a_whole_token_can_be_revoked_and_its_secret_is_not_repeated(
    lockgate: Lockgate, lockgate_json: LockgateJson
) -> None:
    text = lockgate("token", "create", "alice").stdout.strip()
    assert text not in lockgate("token", "revoke", text).output
    assert lockgate_json("token", "list") == []
    lockgate("token", "revoke", text[:-5], status=2)
