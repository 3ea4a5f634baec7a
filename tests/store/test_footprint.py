"""The embedded store's memory settings are chosen by measuring, and the measuring leaves nothing behind."""

from __future__ import annotations

import pytest

from shared.store.connection import Connection
from shared.store.embedded import SETTINGS, EmbeddedStore
from shared.store.footprint import SETTINGS as MEASURED
from shared.store.footprint import Footprint, measure_footprint

SERVER_DEFAULTS = {
    "hash-max-listpack-value": "64",
    "stream-node-max-bytes": "4096",
    "stream-node-max-entries": "100",
}


async def measure_with(connection: Connection, settings: dict[str, str]) -> Footprint:
    for name, value in settings.items():
        await connection.call("CONFIG", "SET", name, value)
    return await measure_footprint(connection)


async def test_our_settings_take_less_than_the_servers_own(own_store: EmbeddedStore) -> None:
    async with Connection(own_store.url) as connection:
        theirs = await measure_with(connection, SERVER_DEFAULTS)
        ours = await measure_with(connection, {name: SETTINGS[name] for name in MEASURED})
        assert await connection.call("DBSIZE") == 0
    assert ours.settled_record < 0.9 * theirs.settled_record
    assert ours.short_session < 0.4 * theirs.short_session
    assert ours.survivor < 0.4 * theirs.survivor
    # What a long stream pays for the small nodes.
    assert ours.small_entry <= 1.1 * theirs.small_entry
    assert ours.large_entry <= 1.1 * theirs.large_entry


async def test_the_measured_settings_are_reported(redis_url: str) -> None:
    async with Connection(redis_url) as connection:
        found = await measure_footprint(connection, entries=100)
    assert found.hash_max_listpack_value == int(SETTINGS["hash-max-listpack-value"])
    assert found.stream_node_max_bytes == int(SETTINGS["stream-node-max-bytes"])
    assert found.stream_node_max_entries == int(SETTINGS["stream-node-max-entries"])
    assert found.large_entry > 1024
    assert found.small_entry > 64


async def test_a_failed_measurement_removes_its_samples(redis_url: str) -> None:
    async with Connection(redis_url) as connection:
        await connection.call("SET", "kept", "1")

        class Stumbling:
            async def call(self, *args: bytes | str | int) -> object:
                if args[0] == "MEMORY":
                    raise RuntimeError("stumbled")
                return await connection.call(*args)

        with pytest.raises(RuntimeError, match="stumbled"):
            await measure_footprint(Stumbling(), entries=10)
        assert await connection.call("KEYS", "*") == [b"kept"]
