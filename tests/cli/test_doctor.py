"""Doctor: what the store promises and costs, and the status that says whether new work would be taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.store.embedded import SETTINGS, EmbeddedStore
from tests.cli.conftest import Lockgate, LockgateJson, run_cli
from tests.cli.test_looking import Seed, settled
from tests.support.raw import raw_client


@pytest.fixture
def weak_store(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], EmbeddedStore]]:
    """Starts a server with settings of the test's choice."""
    started: list[EmbeddedStore] = []

    def start(settings: dict[str, str]) -> EmbeddedStore:
        store = EmbeddedStore(tmp_path / "weak", extra=settings)
        store.start()
        started.append(store)
        return store

    yield start
    for store in started:
        store.stop()


def doctor(url: str, *options: str, status: int = 0) -> Any:
    return json.loads(run_cli(url, "doctor", "--json", "--no-measure", *options, status=status).stdout)


@pytest.mark.requirement("DASP-CORE-012d")
def test_durability_is_told_in_words_with_what_it_leaves_out(
    lockgate: Lockgate, lockgate_json: LockgateJson
) -> None:
    lockgate("tenant", "create", "acme")
    told = lockgate_json("doctor")["durability"]
    assert told["boundary"] == "process-restart"
    assert "restart or kill of the store's process" in told["covers"]
    assert any("power loss" in line for line in told["doesNotCover"])
    text = lockgate("doctor").stdout
    for line in (*told["covers"], *told["doesNotCover"], "noeviction: nothing is dropped"):
        assert line in text
    assert text.splitlines()[-1] == "new work would be accepted"


def test_settings_that_cost_memory_are_reported_as_measured(
    lockgate: Lockgate, lockgate_json: LockgateJson, raw: redis.Redis
) -> None:
    footprint = lockgate_json("doctor")["footprint"]
    assert footprint["hash_max_listpack_value"] == int(SETTINGS["hash-max-listpack-value"])
    assert footprint["stream_node_max_bytes"] == int(SETTINGS["stream-node-max-bytes"])
    assert footprint["stream_node_max_entries"] == int(SETTINGS["stream-node-max-entries"])
    assert 1024 < footprint["settled_record"] < 8192
    text = lockgate("doctor").stdout
    assert f"hash-max-listpack-value         {footprint['hash_max_listpack_value']}" in text
    assert raw.dbsize() == 0, "the samples are gone"


def test_what_operations_take_is_measured_on_those_that_are_there(
    lockgate: Lockgate, lockgate_json: LockgateJson, seed: Seed, raw: redis.Redis
) -> None:
    operation = seed(settled).operation_id
    (tenant,) = lockgate_json("doctor", "--no-measure")["tenants"]
    assert (tenant["usage"]["operations"], tenant["sampled"]) == (1, 1)
    assert tenant["sampledBytes"] == raw.memory_usage(f"lg:{{acme}}:op:{operation}")
    assert "1 of 10000000 operations" in lockgate("doctor", "--no-measure").stdout


@pytest.mark.parametrize(
    ("settings", "problem", "advice"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, "would drop promises", "noeviction"),
        ({"maxmemory": "1mb"}, "out of memory", "raise maxmemory"),
        ({"replicaof": "127.0.0.1 1"}, "slave", "primary"),
    ],
)
def test_a_store_that_would_refuse_work_ends_with_1_and_what_to_do(
    weak_store: Callable[[dict[str, str]], EmbeddedStore], settings: dict[str, str], problem: str, advice: str
) -> None:
    url = weak_store(settings).url
    report = doctor(url, status=1)
    assert report["acceptsNewWork"] is False
    assert any(problem in finding["problem"] for finding in report["findings"])
    text = run_cli(url, "doctor", "--no-measure", status=1).stdout
    assert problem in text
    assert advice in text
    assert text.splitlines()[-1] == "new work would be refused"


@pytest.mark.requirement("DASP-CORE-012e")
@pytest.mark.parametrize("settings", [{"appendonly": "no"}, {"appendfsync": "everysec"}])
def test_a_volatile_store_is_called_volatile_and_refused_where_more_was_declared(
    weak_store: Callable[[dict[str, str]], EmbeddedStore], settings: dict[str, str]
) -> None:
    url = weak_store(settings).url
    report = doctor(url)
    assert report["durability"]["boundary"] == "volatile"
    assert any("volatile" in finding["problem"] for finding in report["findings"])
    refused = doctor(url, "--declared-durability", "process-restart", status=1)
    assert any("below the declared" in finding["problem"] for finding in refused["findings"])
    assert (
        "appendfsync always"
        in run_cli(url, "doctor", "--no-measure", "--declared-durability", "process-restart", status=1).stdout
    )


def test_a_user_that_may_not_look_is_told_how_to_go_on(own_store: EmbeddedStore) -> None:
    with raw_client(own_store.url) as client:
        client.execute_command(
            "ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-info", "-config", "-memory"
        )
    url = own_store.url.replace("unix://", "unix://limited:secret@")
    text = run_cli(url, "doctor", status=1).stdout
    assert "LOCKGATE_DECLARED_DURABILITY" in text
    assert "was not measured" in text
    assert "secret" not in text
    assert doctor(url, "--declared-durability", "process-restart")["acceptsNewWork"] is True


def test_a_lost_tenant_and_a_restart_are_told_apart(own_store: EmbeddedStore) -> None:
    run_cli(own_store.url, "tenant", "create", "acme")
    own_store.kill()
    own_store.start()
    (tenant,) = doctor(own_store.url)["tenants"]
    assert tenant["lost"] is None
    assert tenant["serverMoved"] is True
    assert "the server restarted since" in run_cli(own_store.url, "doctor", "--no-measure").stdout
    with raw_client(own_store.url) as client:
        client.hset("lg:{acme}:meta", "boundary", "volatile")
    (tenant,) = doctor(own_store.url, status=1)["tenants"]
    assert "without keeping" in tenant["lost"]
    assert "tenant adopt acme" in run_cli(own_store.url, "doctor", "--no-measure", status=1).stdout


def test_late_wake_ups_are_noted_without_refusing_work(
    lockgate: Lockgate, lockgate_json: LockgateJson, raw: redis.Redis
) -> None:
    lockgate("tenant", "create", "acme")
    raw.zadd("lg:{acme}:due", {"op" + "0" * 64: 1})
    assert lockgate_json("doctor", "--no-measure")["acceptsNewWork"] is True
    assert "lockgate settlement" in lockgate("doctor", "--no-measure").stdout


def test_an_unreachable_store_ends_with_3(tmp_path: Path) -> None:
    for url in ("redis://127.0.0.1:1", f"unix://{tmp_path}/none.sock"):
        said = run_cli(url, "doctor", status=3).stderr
        assert "cannot be reached" in said
        assert "--redis-url" in said
