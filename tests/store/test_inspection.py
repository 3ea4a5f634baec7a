"""Durability is what the store says of itself: inspected, published, and held against the operator's word."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.store.connection import Connection, ReplyError
from shared.store.embedded import EmbeddedStore
from shared.store.inspection import Boundary, Durability, inspect, is_below_declared, refusal
from shared.store.runtime import Runtime

HEALTHY_INFO = "role:master\r\naof_enabled:1\r\nmaxmemory_policy:noeviction\r\n"
HEALTHY_CONFIG = "appendonly yes appendfsync always no-appendfsync-on-rewrite no maxmemory-policy noeviction"


class Answers:
    """A server that gives one INFO and one CONFIG GET answer; an answer in capitals is an error reply."""

    def __init__(self, info: str = HEALTHY_INFO, config: str = HEALTHY_CONFIG) -> None:
        self._answers: dict[str, str] = {"INFO": info, "CONFIG": config}

    async def call(self, *args: bytes | str | int) -> bytes | list[bytes]:
        text = self._answers[str(args[0])]
        if text.split()[0].isupper():
            raise ReplyError(text)
        return text.encode() if args[0] == "INFO" else [word.encode() for word in text.split()]


@pytest.fixture
async def own(own_store: EmbeddedStore) -> AsyncIterator[Connection]:
    async with Connection(own_store.url) as connection:
        yield connection


async def configure(connection: Connection, **settings: str) -> None:
    for name, value in settings.items():
        await connection.call("CONFIG", "SET", name.replace("_", "-"), value)


@pytest.mark.requirement("DASP-CORE-012d")
async def test_the_embedded_store_survives_its_process_and_says_what_it_does_not(redis_url: str) -> None:
    async with Connection(redis_url) as connection:
        durability = await inspect(connection)
        assert durability.boundary is Boundary.PROCESS_RESTART
        assert (durability.aof, durability.appendfsync) == (True, "always")
        assert (durability.maxmemory_policy, durability.safe_eviction) == ("noeviction", True)
        assert (durability.role, durability.replicas, durability.maxmemory) == ("master", 0, 0)
        info = (await connection.call("INFO", "replication")).decode()
        assert f"master_replid:{durability.replid}\r\n" in info
        assert f"master_replid2:{durability.replid2}\r\n" in info
        assert durability.version is not None
        assert durability.version[0].isdigit()
        assert refusal(durability) is None
        published = durability.published()
        assert published.keys() == {"boundary", "appendfsync", "replicas", "covers", "doesNotCover"}
        assert published["boundary"] == "process-restart"
        assert any("store's process" in event for event in published["covers"])
        assert not any("power loss" in event for event in published["covers"])
        assert any("power loss" in event for event in published["doesNotCover"])
        assert any("storage" in event for event in published["doesNotCover"])
        assert any("failover" in event for event in published["doesNotCover"])


@pytest.mark.requirement("DASP-CORE-012e")
@pytest.mark.parametrize(
    "settings",
    [{"appendonly": "no"}, {"appendfsync": "everysec"}, {"appendfsync": "no"}],
    ids=lambda s: str(s),
)
@pytest.mark.parametrize("declared", [Boundary.PROCESS_RESTART, Boundary.POWER_LOSS])
async def test_a_volatile_store_is_never_called_durable(
    settings: dict[str, str], declared: Boundary, own: Connection
) -> None:
    await configure(own, **settings)
    durability = await inspect(own, declared)
    assert durability.boundary is Boundary.VOLATILE
    assert not any("store's process" in event or "power" in event for event in durability.covers)
    assert any("store's process" in event for event in durability.does_not_cover)
    assert any("power loss" in event for event in durability.does_not_cover)
    assert is_below_declared(durability)
    assert refusal(durability) == f"the store's durability is volatile, below the declared {declared}"


async def test_a_store_fsynced_every_second_says_how_much_it_can_lose(own: Connection) -> None:
    await configure(own, appendfsync="everysec")
    uncovered = (await inspect(own)).does_not_cover
    assert any(
        "store's process: about one second of acknowledged writes can be lost" in event for event in uncovered
    )


@pytest.mark.parametrize("declared", [None, Boundary.VOLATILE])
async def test_a_volatile_store_may_admit_where_nobody_promised_more(
    declared: Boundary | None, own: Connection
) -> None:
    await configure(own, appendonly="no")
    assert refusal(await inspect(own, declared)) is None


async def test_falling_below_the_declared_boundary_shows_at_the_next_look(own: Connection) -> None:
    declared = Boundary.PROCESS_RESTART
    assert refusal(await inspect(own, declared)) is None
    await configure(own, appendfsync="everysec")
    assert refusal(await inspect(own, declared)) is not None
    await configure(own, appendfsync="always")
    assert refusal(await inspect(own, declared)) is None


@pytest.mark.requirement("DASP-CORE-012d")
async def test_power_loss_is_covered_on_the_operators_word_alone(own: Connection) -> None:
    assert (await inspect(own)).boundary is Boundary.PROCESS_RESTART
    declared = await inspect(own, Boundary.POWER_LOSS)
    assert declared.boundary is Boundary.POWER_LOSS
    assert any("power loss" in event and "operator's word" in event for event in declared.covers)
    assert not any("power loss" in event for event in declared.does_not_cover)
    assert any("storage" in event for event in declared.does_not_cover)
    assert refusal(declared) is None


async def test_the_operators_word_does_not_cover_rewrites_without_fsync(own: Connection) -> None:
    await configure(own, no_appendfsync_on_rewrite="yes")
    durability = await inspect(own, Boundary.POWER_LOSS)
    assert durability.boundary is Boundary.PROCESS_RESTART
    assert is_below_declared(durability)


@pytest.mark.parametrize(
    "policy", ["allkeys-lru", "allkeys-random", "volatile-lru", "volatile-ttl", "volatile-lfu"]
)
async def test_an_evicting_store_is_refused_by_name(policy: str, own: Connection) -> None:
    await configure(own, maxmemory_policy=policy)
    durability = await inspect(own)
    assert durability.safe_eviction is False
    reason = refusal(durability)
    assert reason is not None
    assert f"maxmemory-policy is {policy}" in reason
    assert "noeviction" in reason


@pytest.mark.case(98)
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_process_on_an_evicting_store_is_not_ready(policy: str, tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "store", extra={"maxmemory-policy": policy}) as evicting:
        async with Runtime(evicting.url) as runtime:
            reason = await runtime.unready()
            assert reason is not None
            assert f"maxmemory-policy is {policy}" in reason
            await runtime.connection.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
            await runtime.refresh()
            assert await runtime.unready() is None


async def test_a_user_that_may_not_inspect_leaves_everything_unknown(own_store: EmbeddedStore) -> None:
    async with Connection(own_store.url) as connection:
        rules = ("on", ">secret", "~*", "&*", "+@all", "-info", "-config")
        await connection.call("ACL", "SETUSER", "narrow", *rules)
    async with Connection(own_store.url.replace("unix://", "unix://narrow:secret@")) as narrow:
        durability = await inspect(narrow)
        assert durability.boundary is Boundary.UNKNOWN
        assert (durability.aof, durability.appendfsync, durability.role, durability.replid) == (None,) * 4
        assert (durability.safe_eviction, durability.replicas, durability.version) == (None,) * 3
        assert durability.covers == ()
        reason = refusal(durability)
        assert reason is not None
        assert "unknown" in reason
        declared = await inspect(narrow, Boundary.PROCESS_RESTART)
        assert declared.boundary is Boundary.UNKNOWN
        assert refusal(declared) is None
        assert declared.covers
        assert all("declared by the operator, not inspected" in event for event in declared.covers)
        assert any("power loss" in event for event in declared.does_not_cover)


@pytest.mark.parametrize(
    ("info", "config", "boundary", "safe"),
    [
        (HEALTHY_INFO, "NOPERM no", Boundary.UNKNOWN, True),
        (HEALTHY_INFO, "ERR unknown command", Boundary.UNKNOWN, True),
        (
            HEALTHY_INFO.replace("aof_enabled:1", "aof_enabled:0"),
            "ERR unknown command",
            Boundary.VOLATILE,
            True,
        ),
        (HEALTHY_INFO.replace("noeviction", "allkeys-lru"), "NOPERM no", Boundary.UNKNOWN, False),
        ("NOPERM no", HEALTHY_CONFIG, Boundary.PROCESS_RESTART, True),
        ("NOPERM no", HEALTHY_CONFIG.replace("always", "everysec"), Boundary.VOLATILE, True),
        ("NOPERM no", HEALTHY_CONFIG.replace("appendonly yes", "appendonly no"), Boundary.VOLATILE, True),
        ("NOPERM no", HEALTHY_CONFIG.replace("noeviction", "volatile-lru"), Boundary.PROCESS_RESTART, False),
        (HEALTHY_INFO, HEALTHY_CONFIG.replace("always", "sometimes"), Boundary.UNKNOWN, True),
    ],
)
async def test_half_an_inspection_claims_no_more_than_it_saw(
    info: str, config: str, boundary: Boundary, safe: bool
) -> None:
    durability = await inspect(Answers(info, config))
    assert (durability.boundary, durability.safe_eviction) == (boundary, safe)


async def test_a_passing_error_is_no_refusal_to_tell() -> None:
    with pytest.raises(ReplyError):
        await inspect(Answers(info="LOADING the dataset"))
    with pytest.raises(ReplyError):
        await inspect(Answers(config="BUSY running a script"))


async def test_a_replica_may_not_admit(tmp_path: Path) -> None:
    with (
        EmbeddedStore(tmp_path / "primary", port=0) as primary,
        EmbeddedStore(tmp_path / "replica") as replica,
    ):
        port = primary.tcp_url.rpartition(":")[2]
        async with Connection(replica.url) as connection:
            await connection.call("REPLICAOF", "127.0.0.1", port)
            durability = await inspect(connection)
            assert durability.role == "slave"
            reason = refusal(durability)
            assert reason is not None
            assert "primary" in reason


@pytest.mark.parametrize("boundary", list(Boundary))
@pytest.mark.parametrize("declared", [None, *Boundary])
async def test_every_event_is_either_covered_or_not(boundary: Boundary, declared: Boundary | None) -> None:
    config = {
        Boundary.UNKNOWN: "NOPERM no",
        Boundary.VOLATILE: HEALTHY_CONFIG.replace("always", "no"),
    }.get(boundary, HEALTHY_CONFIG)
    durability: Durability = await inspect(Answers(config=config), declared)
    strip = [
        event.partition(" (")[0].partition(":")[0] for event in durability.covers + durability.does_not_cover
    ]
    assert len(strip) == len(set(strip)) == 5
