"""Looking once at everything open when the policy document changed (RT-ADM-35).

What is due is judged anew anyway, and so is whatever a worker does next; only work that nobody touches, a
long lease or a long queue, has to be looked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from shared.store.open_work import START, OpenWork
from shared.store.runtime import Runtime, TenantHandle
from shared.store.snapshot import Snapshot
from shared.store.wake import EVERYBODY

CHECK_S: Final = 10.0
"""How often the policy revision is read where no hint comes: hints get lost."""
_PAGE: Final = 128
_SIDE_BY_SIDE: Final = 16


class Review:
    """Walks over one tenant's open work in pages, so that other tenants have their turn in between.

    Enter it to hear of changes at once. ``look`` judges one member of ``due`` and raises only where the
    store as a whole cannot serve; the page is repeated then.
    """

    def __init__(
        self, runtime: Runtime, handle: TenantHandle, look: Callable[[str], Awaitable[None]]
    ) -> None:
        self._snapshots = handle.snapshots
        self._open = OpenWork(runtime.connection, handle.tenant)
        self._watcher = runtime.wake.watch(handle.tenant, (EVERYBODY,))
        self._look = look
        self._next_check = 0.0
        # Where no document was ever seen there is nothing that could have been taken back.
        self._document: bytes | None = None
        self._cursor: int | None = None

    async def __aenter__(self) -> Self:
        await self._watcher.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._watcher.__aexit__(kind, error, trace)

    async def page(self) -> bool:
        """Look at the next page, if there is any to look at; whether there is more.

        Costs no store command while nothing changed, but for a check every :data:`CHECK_S`. Raises
        Unavailable where the store cannot serve.
        """
        document = (await self._present()).policy.document
        if document != self._document:
            self._document, self._cursor = document, START
        if self._cursor is None:
            return False
        following, members = await self._open.page(self._cursor, _PAGE)
        await self._look_at(members)
        self._cursor = None if following == START else following
        return self._cursor is not None

    async def _present(self) -> Snapshot:
        """The snapshot in use, read anew where the policy revision has moved on."""
        if await self._watcher.wait(0):
            self._next_check = 0.0
        snapshot = await self._snapshots.get()
        now = asyncio.get_running_loop().time()
        if now >= self._next_check:
            if await self._open.policy_revision() != snapshot.revisions.policy:
                snapshot = await self._snapshots.reload(snapshot)
            self._next_check = now + CHECK_S
        return snapshot

    async def _look_at(self, members: list[str]) -> None:
        remaining = iter(members)

        async def look() -> None:
            for member in remaining:
                await self._look(member)

        looks = [look() for _ in range(min(_SIDE_BY_SIDE, len(members)))]
        for result in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
