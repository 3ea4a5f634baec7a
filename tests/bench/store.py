"""``admit`` against the store's own floor: SET and XADD of 1 KiB by the same load on the same server."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Sequence
from statistics import median

import lua
from shared.store.connection import Connection
from shared.store.embedded import EmbeddedStore
from shared.store.replies import Reply
from shared.store.scripts import Arg, TenantStore
from tests.bench.table import Row, spread
from tests.support.world import TENANT, World

TOOL = "redis-benchmark"
ROUNDS = 5
REQUESTS = 20_000
AIMS = {1: 0.25, 16: 0.12}


def rows(store: EmbeddedStore) -> list[Row]:
    """Alternating runs, not pipelined and pipelined by 16; nothing where the load generator is missing."""
    if shutil.which(TOOL) is None:
        return [Row(f"{TOOL} is not installed", "not measured (Debian: apt-get install redis-tools)")]
    admit = asyncio.run(_admit_command(store.url))
    kinds: dict[str, Sequence[str]] = {
        "SET 1 KiB": ["SET", "bench:__rand_int__", "x" * 1024],
        "XADD 1 KiB": ["XADD", "bench:stream", "*", "f", "x" * 1024],
        "admit 1 KiB": admit,
    }
    made = []
    for depth, aim in AIMS.items():
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, command in kinds.items():
                rates[name].append(_rate(store, depth, command))
        floor = median(rates["SET 1 KiB"])
        for name, each in rates.items():
            ratio = median(each) / floor
            goal = (f"≥ {aim} x SET", ratio >= aim) if name.startswith("admit") else ("", None)
            label = f"{name}, pipelined by {depth}" if depth > 1 else name
            made.append(Row(label, spread(each, "/s"), f"{ratio:.3f} x SET", *goal))
    return made


def _rate(store: EmbeddedStore, depth: int, command: Sequence[str]) -> float:
    argv = [TOOL, "-q", "-s", str(store.socket_path), "-n", str(REQUESTS), "-c", "50", "-P", str(depth)]
    ran = subprocess.run(
        [*argv, "-r", "1000000000", *command], capture_output=True, text=True, errors="replace", check=True
    )
    found = re.findall(r"([0-9.]+) requests per second", ran.stdout)
    assert found, ran.stdout[-500:] + ran.stderr[-500:]
    return float(found[-1])


async def _admit_command(url: str) -> list[str]:
    """EVALSHA of the shipped script with a real admission's arguments; the load generator varies its id."""
    seen: list[tuple[Sequence[bytes], Sequence[bytes | str | int]]] = []

    class Watching(TenantStore):
        async def _once(self, name: str, keys: Sequence[bytes], args: Sequence[Arg]) -> Reply:
            seen.append((keys, args))
            return await super()._once(name, keys, args)

    async with Connection(url) as connection:
        world = await World.create(connection)
        world.store = Watching(TENANT, connection, world.store.clock, world.epoch_moved)
        await world.open()
        new = world.command(kind="concurrent", input_bytes=b'{"note":"%b"}' % (b"x" * 1012))
        await world.admit(new)
    keys, args = seen[-1]
    words = [_word(word) for word in (*keys, *args)]
    words[len(keys) + 6] = "i" * 32
    varied = [word.replace(new.operation_id, new.operation_id[:54] + "__rand_int__") for word in words]
    return ["EVALSHA", lua.load("admit").sha, str(len(keys)), *varied]


def _word(word: bytes | str | int) -> str:
    return word.decode("latin-1") if isinstance(word, bytes) else str(word)
