"""Store users as lines to paste: what they hold, and what they never do."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
import redis

from shared.store.acl import Role
from shared.store.embedded import EmbeddedStore
from tests.cli.conftest import Lockgate, run_cli
from tests.support.raw import raw_client


def told(result: Any) -> dict[str, str]:
    """User name → password."""
    return dict(re.findall(r"^password of (\S+): (\S+)$", result.stderr, re.MULTILINE))


def pasted(client: redis.Redis, result: Any) -> list[str]:
    """Give every printed command to the store; the names of its users."""
    raw: Any = client
    lines = [line.split(" ") for line in result.stdout.splitlines() if line.startswith("ACL ")]
    for words in lines:
        assert raw.execute_command(*words) in (b"OK", "OK", True)
    return [words[2] for words in lines]


@pytest.fixture
def users(raw: redis.Redis) -> Any:
    """Removes what a test pasted."""
    yield
    names: Any = raw.acl_users()
    raw.acl_deluser(*[name for name in names if name != "default"])


@pytest.mark.usefixtures("users")
def test_a_tenant_is_created_with_users_of_its_own(
    lockgate: Lockgate, redis_url: str, raw: redis.Redis
) -> None:
    created = lockgate("tenant", "create", "acme", "--acl")
    names = pasted(raw, created)
    assert names == [f"lockgate-{role}-acme" for role in Role]
    for name, password in told(created).items():
        # The store keeps a hash; what is printed once opens it, and is in none of the lines.
        assert password not in created.stdout
        assert "#" + hashlib.sha256(password.encode()).hexdigest() in created.stdout
        with raw_client(redis_url, username=name, password=password) as client:
            assert client.ping()
            with pytest.raises(redis.ResponseError):
                client.config_get("*")


@pytest.mark.usefixtures("users")
def test_a_user_is_exactly_what_was_printed_whatever_it_was_before(
    lockgate: Lockgate, raw: redis.Redis
) -> None:
    lockgate("tenant", "create", "acme")
    anything: Any = raw
    anything.execute_command("ACL", "SETUSER", "lockgate-sidecar-acme", "on", "nopass", "~*", "&*", "+@all")
    pasted(raw, lockgate("tenant", "acl", "acme", "--role", "sidecar"))
    found: Any = raw.acl_getuser("lockgate-sidecar-acme")
    flags = found["flags"]
    assert "nopass" not in flags
    assert len(found["passwords"]) == 1
    assert "~*" not in found["keys"]
    assert "&*" not in found["channels"]


@pytest.mark.usefixtures("users")
def test_an_existing_user_serves_one_tenant_more_and_keeps_its_password(
    lockgate: Lockgate, raw: redis.Redis
) -> None:
    for name in ("acme", "beta"):
        lockgate("tenant", "create", name)
    pasted(raw, lockgate("tenant", "acl", "acme", "--role", "admission", "--user", "door"))
    before: Any = raw.acl_getuser("door")
    added = lockgate("tenant", "acl", "beta", "--role", "admission", "--user", "door", "--add")
    assert added.stdout.count("\n") == 1
    assert "#" not in added.stdout
    assert told(added) == {}
    pasted(raw, added)
    after: Any = raw.acl_getuser("door")
    assert after["passwords"] == before["passwords"]
    assert set(after["keys"]) > set(before["keys"])
    assert set(after["channels"]) == {"&lg:{acme}:wake", "&lg:{beta}:wake"}
    whole = lockgate("tenant", "acl", "acme", "beta", "--role", "admission", "--user", "both")
    pasted(raw, whole)
    both: Any = raw.acl_getuser("both")
    assert set(both["keys"]) == set(after["keys"])


def test_lines_for_the_acl_file_are_read_by_a_server(
    own_store: EmbeddedStore, tmp_path: Any, lockgate: Lockgate
) -> None:
    for name in ("acme", "acme-2"):
        run_cli(own_store.url, "tenant", "create", name)
    printed = run_cli(own_store.url, "tenant", "acl", "acme", "acme-2", "--file")
    path = tmp_path / "users.acl"
    path.write_text("user default on nopass ~* &* +@all\n" + printed.stdout)
    with (
        EmbeddedStore(tmp_path / "other", extra={"aclfile": f'"{path}"'}) as server,
        raw_client(server.url) as raw,
    ):
        names: Any = raw.acl_users()
    assert set(names) == {
        "default",
        "lockgate-admission",
        "lockgate-settlement",
        "lockgate-sidecar-acme",
        "lockgate-sidecar-acme-2",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("acme", "--user", "door"), "exactly one --role"),
        (("acme", "--add", "--role", "admission"), "name it with --user"),
        (("acme", "--add", "--role", "sidecar", "--user", "s"), "serves one tenant"),
        (("acme", "--role", "admission", "--user", "a b"), "letters, digits"),
        (("acme", "--role", "admission", "--user", "x\nuser evil on nopass"), "letters, digits"),
        (("acme", "--role", "admission", "--user", "x nopass", "--add"), "letters, digits"),
        (("*",), "must be a tenant id"),
    ],
)
def test_wrong_usage_prints_no_line(lockgate: Lockgate, arguments: tuple[str, ...], said: str) -> None:
    lockgate("tenant", "create", "acme")
    refused = lockgate("tenant", "acl", *arguments, status=2)
    assert said in refused.stderr
    assert refused.stdout == ""


def test_no_user_is_printed_for_a_tenant_that_does_not_exist(lockgate: Lockgate) -> None:
    refused = lockgate("tenant", "acl", "nobody", status=1)
    assert "does not exist" in refused.stderr
    assert refused.stdout == ""
