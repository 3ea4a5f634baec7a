"""Whose turn it is to be settled: one process's work, given to its tenants in rotation.

A turn is one look at one item of one tenant. Each tenant that waits is in the rotation once, however many
items it has: between another tenant's asking and its turn lies at most one turn of each that waited before
it, so 100,000 due items of one tenant cost another at most one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

SIDE_BY_SIDE: Final = 16
"""Turns that a process gives at the same time, and looks that one tenant takes side by side: enough to keep a
remote store busy. One slow item holds up one of them, not the process.
"""


class Turns:
    """The turns of one process and event loop, ``side_by_side`` of them at a time, first come first served
    among tenants and among the items of each.
    """

    def __init__(self, side_by_side: int = SIDE_BY_SIDE) -> None:
        self._free = side_by_side
        # In the order of the rotation; who is given a turn and has more to do goes to the end.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._holders: dict[asyncio.Task[Any], str] = {}

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn; it lasts as long as the block. A task may hold one at a time."""
        task = _this_task()
        assert task not in self._holders, "a turn inside a turn could wait for itself"
        await self._take(tenant)
        self._holders[task] = tenant
        try:
            yield
        finally:
            # Without an entry the turn was given away and not taken again: the task was cancelled meanwhile.
            if self._holders.pop(task, None) is not None:
                self._give()

    async def give_way(self) -> None:
        """Let the others have their turns first, in the middle of long work; nothing outside of a turn."""
        task = _this_task()
        tenant = self._holders.get(task)
        if tenant is None or not self._waiting:
            return
        del self._holders[task]
        self._give()
        await self._take(tenant)
        self._holders[task] = tenant

    async def _take(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                # It was given in the moment in which it was no longer wanted.
                self._give()
            raise

    def _give(self) -> None:
        """Give a turn that ended to the next tenant of the rotation; who stopped waiting is left out."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            places = self._waiting.pop(tenant)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "turns belong to tasks"
    return task
