"""The central settlement processes that are at work, as they tell of themselves."""

from __future__ import annotations

from typing import Final

from shared.store.connection import Connection
from shared.store.keys import SETTLERS
from shared.store.reads import unrefused
from shared.store.registry import store_now_ms

_FORGOTTEN_MS: Final = 600_000


class Settlers:
    """The sorted set of processes, each scored by the store's time of its last beat (ms)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def beat(self, member: str, gone_ms: int) -> frozenset[str]:
        """Record a beat now; everybody whose last one is less than ``gone_ms`` away, ``member`` included.

        The store's clock as it is, not this process's estimate: all compare readings of the same clock. Beats
        that lie as far ahead were made before the clock was set back, by processes that may be gone: such a
        one counts again with its next beat. Raises as a connection does.
        """
        now = await store_now_ms(self._connection)
        _, flat = unrefused(
            await self._connection.pipeline(
                ("ZADD", SETTLERS, now, member), ("ZRANGE", SETTLERS, 0, -1, "WITHSCORES")
            )
        )
        ages = {name: now - int(float(beat)) for name, beat in zip(flat[::2], flat[1::2], strict=True)}
        forgotten = [name for name, age in ages.items() if age > _FORGOTTEN_MS]
        if forgotten:
            await self._connection.call("ZREM", SETTLERS, *forgotten)
        return frozenset(name.decode() for name, age in ages.items() if abs(age) < gone_ms)

    async def leave(self, member: str) -> None:
        """Take a process off the set."""
        await self._connection.call("ZREM", SETTLERS, member)
