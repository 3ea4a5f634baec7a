"""What typical records and streams take in the store's memory under its present settings.

Two settings decide: up to ``hash-max-listpack-value`` bytes a field stays inside one compact block, and a
stream allocates whole nodes of ``stream-node-max-bytes``, so short sessions and forgotten outbox entries
pay for a node each.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from shared.store.inspection import Caller, number, read_config


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes; a setting that the store refuses to tell is ``None``."""

    hash_max_listpack_value: int | None
    stream_node_max_bytes: int | None
    stream_node_max_entries: int | None
    settled_record: int
    """A settled one-branch command with 1 KiB input."""
    short_session: int
    """A whole stream of three small facts."""
    small_entry: int
    """One entry of a long stream of references or small facts."""
    large_entry: int
    """One entry of a long stream of 1 KiB facts."""
    survivor: int
    """The one entry left of every hundred: it keeps its whole node from being freed."""


SETTINGS: Final = ("hash-max-listpack-value", "stream-node-max-bytes", "stream-node-max-entries")
_SMALL_FACT: Final = ("name", "counter.added", "command", "c" * 36, "at", "1796025679851", "data", "d" * 64)
_LARGE_FACT: Final = (*_SMALL_FACT[:-1], "d" * 1024)
_RECORD_FIELDS: Final[Mapping[str, int]] = {
    "v": 1,
    "rev": 1,
    "phase": 7,
    "decision": 64,
    "outcome_seq": 4,
    "reservation": 120,
    "state": 100,
    "admission": 700,
    "input": 1024,
    "b:0": 150,
    "r:0": 200,
    "o:0": 200,
}
_SURVIVORS_PER: Final = 100


async def measure_footprint(client: Caller, entries: int = 1000) -> Footprint:
    """Write samples under keys of their own, ask the store what they take, and remove them.

    ``entries`` is the length of the long streams. Raises ReplyError where the store refuses MEMORY USAGE or
    writing.
    """
    tag = secrets.token_hex(8)
    keys = {kind: f"lg:footprint:{{{tag}}}:{kind}" for kind in ("record", "short", "small", "large")}
    config = await read_config(client, *SETTINGS)
    try:
        for name, size in _RECORD_FIELDS.items():
            await client.call("HSET", keys["record"], name, "x" * size)
        await _fill(client, keys["short"], 3, _SMALL_FACT)
        await _fill(client, keys["small"], entries, _SMALL_FACT)
        await _fill(client, keys["large"], entries, _LARGE_FACT)
        used = {kind: await _usage(client, key) for kind, key in keys.items()}
        survivors = await _thin_out(client, keys["small"], entries)
        thinned = await _usage(client, keys["small"])
    finally:
        await client.call("UNLINK", *keys.values())
    listpack_value, node_bytes, node_entries = (number(config.get(name)) for name in SETTINGS)
    return Footprint(
        hash_max_listpack_value=listpack_value,
        stream_node_max_bytes=node_bytes,
        stream_node_max_entries=node_entries,
        settled_record=used["record"],
        short_session=used["short"],
        small_entry=used["small"] // entries,
        large_entry=used["large"] // entries,
        survivor=thinned // survivors,
    )


async def _usage(client: Caller, key: str) -> int:
    return int(await client.call("MEMORY", "USAGE", key, "SAMPLES", 0))


async def _fill(client: Caller, key: str, entries: int, fact: tuple[str, ...]) -> None:
    for sequence in range(1, entries + 1):
        await client.call("XADD", key, f"{sequence}-0", *fact)


async def _thin_out(client: Caller, key: str, entries: int) -> int:
    done = [f"{sequence}-0" for sequence in range(1, entries + 1) if sequence % _SURVIVORS_PER]
    await client.call("XDEL", key, *done)
    return max(1, entries - len(done))
