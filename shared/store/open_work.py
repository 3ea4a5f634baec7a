"""Walking over everything of a tenant that is open, whether it is due or not."""

from __future__ import annotations

from typing import Final

from shared.store.connection import Connection
from shared.store.keys import Keys

START: Final = 0


class OpenWork:
    """The open operations and turns of one tenant: each is a member of ``due`` from admission to its end."""

    def __init__(self, connection: Connection, tenant: str) -> None:
        self._connection = connection
        self._keys = Keys(tenant)

    async def page(self, cursor: int, about: int) -> tuple[int, list[str]]:
        """About ``about`` members and the cursor to go on with, :data:`START` at the end.

        What is open from the first page to the last is met at least once, however its wake-up moves
        meanwhile; what is admitted meanwhile may be left out.
        """
        following, flat = await self._connection.call("ZSCAN", self._keys.due, cursor, "COUNT", about)
        return int(following), [member.decode() for member in flat[::2]]

    async def policy_revision(self) -> str:
        """The revision everybody has to decide under now; "" where the tenant's store is gone."""
        revision = await self._connection.call("HGET", self._keys.meta, "policy_rev")
        return "" if revision is None else str(revision.decode())
