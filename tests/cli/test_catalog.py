"""Contracts and peers from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from settlement_svc.examples import bundles
from tests.cli.conftest import Lockgate, LockgateJson

COUNTER = Path(bundles.__file__).parent / "counter.yaml"
TRANSFER = COUNTER.with_name("transfer.yaml")


@pytest.fixture(autouse=True)
def _tenant(lockgate: Lockgate) -> None:
    lockgate("tenant", "create", "acme")


def test_bundles_are_registered_once(lockgate: Lockgate, lockgate_json: LockgateJson) -> None:
    assert "no contract yet" in lockgate("contract", "list").stdout
    first = lockgate("contract", "apply", str(COUNTER), str(TRANSFER)).stdout
    assert first.count(" registered") == 2
    assert "is registered already" in lockgate("contract", "apply", str(COUNTER)).stdout
    listed = lockgate_json("contract", "list")
    assert [row["contract"] for row in listed] == ["demo.counter", "demo.transfer"]
    assert listed[0]["session"]["commands"] == {"counter.add": "add"}
    assert listed[0]["digest"] in first
    assert "counter.add" in lockgate("contract", "list").stdout


def test_a_bundle_comes_from_standard_input_too(lockgate: Lockgate, lockgate_json: LockgateJson) -> None:
    lockgate("contract", "apply", "-", given=COUNTER.read_text())
    assert len(lockgate_json("contract", "list")) == 1
    said = lockgate("contract", "apply", "-", status=1, given="contract: x\n").stderr
    assert "standard input" in said


def test_other_content_under_a_registered_version_is_refused(lockgate: Lockgate, tmp_path: Path) -> None:
    lockgate("contract", "apply", str(COUNTER))
    other = tmp_path / "other.yaml"
    other.write_text(COUNTER.read_text().replace("timeoutMs: 30000", "timeoutMs: 20000"))
    assert "version" in lockgate("contract", "apply", str(other), status=1).stderr


def test_a_bad_bundle_is_told_by_file_and_place_and_nothing_is_registered(
    lockgate: Lockgate, lockgate_json: LockgateJson, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(COUNTER.read_text().replace("effects: none", "effects: sometimes"))
    said = lockgate("contract", "apply", str(COUNTER), str(bad), status=1).stderr
    assert "bad.yaml" in said
    assert "/interactions/add/effects" in said
    assert lockgate_json("contract", "list") == []
    assert "missing.yaml" in lockgate("contract", "apply", str(tmp_path / "missing.yaml"), status=2).stderr
    assert str(tmp_path) in lockgate("contract", "apply", str(tmp_path), status=2).stderr


def test_peers_are_registered_replaced_and_removed(
    lockgate: Lockgate, lockgate_json: LockgateJson, raw: redis.Redis
) -> None:
    assert "no peer yet" in lockgate("peer", "list").stdout
    lockgate("peer", "register", "bank", "--capability", "b", "--capability", "a", "--principal", "svc.bank")
    assert lockgate_json("peer", "list") == [
        {"peer": "bank", "capabilities": ["a", "b"], "principals": ["svc.bank"]}
    ]
    assert raw.type("lg:{acme}:outbox:bank") == b"stream"
    lockgate("peer", "register", "bank")
    assert lockgate_json("peer", "list") == [{"peer": "bank", "capabilities": [], "principals": []}]
    lockgate("peer", "remove", "bank")
    assert lockgate_json("peer", "list") == []
    assert "lockgate peer list" in lockgate("peer", "remove", "bank", status=1).stderr


@pytest.mark.parametrize("arguments", [("BAD",), ("a.b",), ("bank", "--principal", "a b")])
def test_malformed_peers_are_wrong_usage(
    lockgate: Lockgate, lockgate_json: LockgateJson, arguments: tuple[str, ...]
) -> None:
    lockgate("peer", "register", *arguments, status=2)
    assert lockgate_json("peer", "list") == []
