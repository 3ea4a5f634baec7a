"""A tenant's limits from the command line."""

from __future__ import annotations

import msgspec
import pytest
import redis

from shared.domain.limits import TenantLimits
from tests.cli.conftest import Lockgate, LockgateJson

META = "lg:{acme}:meta"


@pytest.fixture(autouse=True)
def _tenant(lockgate: Lockgate) -> None:
    lockgate("tenant", "create", "acme")


def test_a_new_tenant_has_limits_and_those_given_alone_change(
    lockgate: Lockgate, lockgate_json: LockgateJson, raw: redis.Redis
) -> None:
    first = lockgate_json("tenant", "limits", "acme")
    assert msgspec.convert(first["limits"], TenantLimits) == TenantLimits()
    assert first["usage"] == {"operations": 0, "bytes": 0, "openOperations": 0, "sessions": 0}
    revision = raw.hget(META, "policy_rev")
    changed = lockgate("tenant", "limits", "acme", "--open-operations", "5", "--streams", "0").stdout
    assert "0 of 5" in changed
    assert raw.hget(META, "policy_rev") != revision
    held = msgspec.convert(lockgate_json("tenant", "show", "acme")["limits"], TenantLimits)
    assert held == TenantLimits(open_operations=5, streams=0)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--burst", "0"), ("--admissions-per-second", "1000001"), ("--bytes", "-1"), ("--sessions", "many")],
)
def test_a_limit_that_is_none_is_wrong_usage_and_changes_nothing(
    lockgate: Lockgate, raw: redis.Redis, flag: str, value: str
) -> None:
    before = raw.hgetall(META)
    assert flag in lockgate("tenant", "limits", "acme", flag, value, status=2).stderr
    assert raw.hgetall(META) == before


def test_damaged_limits_are_told_and_can_be_set_again(
    lockgate: Lockgate, lockgate_json: LockgateJson, raw: redis.Redis
) -> None:
    raw.hset(META, "limits", "1 2 3")
    assert "cannot be read" in lockgate("tenant", "limits", "acme", status=1).stderr
    assert "cannot be read" in lockgate("tenant", "show", "acme").stdout
    assert "cannot be read" in lockgate("doctor", "--no-measure").stdout
    lockgate("tenant", "limits", "acme", "--sessions", "9")
    held = msgspec.convert(lockgate_json("tenant", "limits", "acme")["limits"], TenantLimits)
    assert held == TenantLimits(sessions=9)


def test_a_lost_tenant_gets_no_limits(lockgate: Lockgate, raw: redis.Redis) -> None:
    raw.delete(META)
    assert "adopt" in lockgate("tenant", "limits", "acme", "--sessions", "9", status=1).stderr
    assert raw.exists(META) == 0
