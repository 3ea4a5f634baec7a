"""Items that settling could not decide, kept for a person to look at while everything else goes on.

A parked item stays in ``due`` with a later wake-up, so that it is tried again by itself: one poisonous
record delays nobody and is never forgotten.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from shared.store.connection import Connection, ReplyError
from shared.store.keys import Keys

FIRST_PAUSE_MS: Final = 1_000
LONGEST_PAUSE_MS: Final = 300_000
_REASON_LIMIT: Final = 500
_PAGE: Final = 128


class ParkedItem(msgspec.Struct, frozen=True):
    """Why a member of ``due`` could not be decided, since when, how often it was tried, and when it is next
    (ms).
    """

    reason: str
    since_ms: int
    tries: int
    next_ms: int


_items = msgspec.json.Decoder(ParkedItem)


def next_pause_ms(tries: int) -> int:
    """How long an item rests after it failed for the ``tries``-th time."""
    return min(FIRST_PAUSE_MS << min(tries - 1, 20), LONGEST_PAUSE_MS)


class Parked:
    """The parked items of one tenant, by their member of ``due``: an operation id or the turn
    of a session. An instance remembers which are on the list, so that deciding others costs nothing here.
    """

    def __init__(self, connection: Connection, tenant: str) -> None:
        self._connection = connection
        self._keys = Keys(tenant)
        self._known: set[str] = set()
        self._met: set[str] = set()
        self._cursor = 0

    async def park(self, member: str, reason: str, now_ms: int) -> ParkedItem | None:
        """Record a failure and move the member's wake-up later; None where it is no longer due, somebody
        settled it.
        """
        score, known = await self._all(
            ("ZSCORE", self._keys.due, member), ("HGET", self._keys.parked, member)
        )
        if score is None:
            return None
        before = _items.decode(known) if isinstance(known, bytes) else None
        tries = before.tries + 1 if before else 1
        item = ParkedItem(
            reason=reason[:_REASON_LIMIT],
            since_ms=before.since_ms if before else now_ms,
            tries=tries,
            next_ms=now_ms + next_pause_ms(tries),
        )
        await self._all(
            ("HSET", self._keys.parked, member, msgspec.json.encode(item)),
            ("ZADD", self._keys.due, "XX", "GT", item.next_ms, member),
        )
        self._learn((member,))
        return item

    async def items(self) -> dict[str, ParkedItem]:
        """Every parked item."""
        flat = await self._connection.call("HGETALL", self._keys.parked)
        return {name.decode(): _items.decode(raw) for name, raw in zip(flat[::2], flat[1::2], strict=True)}

    async def decided(self, member: str) -> None:
        """Take an item off the list if it is known to be on it: it was decided at last."""
        if member in self._known:
            self._known.discard(member)
            await self._connection.call("HDEL", self._keys.parked, member)

    async def tidy(self) -> bool:
        """Take what is no longer due, settled by whoever it was, off the next page of the list; whether that
        was the last page.
        """
        cursor, flat = await self._connection.call("HSCAN", self._keys.parked, self._cursor, "COUNT", _PAGE)
        members = [name.decode() for name in flat[::2]]
        if members:
            scores = await self._connection.call("ZMSCORE", self._keys.due, *members)
            finished = [member for member, score in zip(members, scores, strict=True) if score is None]
            if finished:
                await self._connection.call("HDEL", self._keys.parked, *finished)
            self._learn(frozenset(members).difference(finished))
        self._cursor = int(cursor)
        if self._cursor == 0:
            self._known, self._met = self._known & self._met, set()
        return self._cursor == 0

    def _learn(self, members: Collection[str]) -> None:
        self._known.update(members)
        self._met.update(members)

    async def _all(self, *commands: tuple[bytes | str | int, ...]) -> list[object]:
        replies = await self._connection.pipeline(*commands)
        for reply in replies:
            if isinstance(reply, ReplyError):
                raise reply
        return replies
