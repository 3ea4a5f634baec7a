"""Which tenants this process settles, where several central processes share them.

Central processes tell of themselves in one sorted set outside every tenant's tag and divide the tenants by
rendezvous hashing over those heard of lately: one that comes or goes moves only its own share. Division saves
work and is never what keeps a decision single: every commit asserts what it was decided from, so two that
settle one tenant for a while, after a pause, a jump of the clock or a lost heartbeat, do so harmlessly.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Collection
from typing import Final

from shared import telemetry
from shared.domain.errors import Unavailable
from shared.store.connection import Connection, ReplyError
from shared.store.settlers import Settlers

BEAT_S: Final = 2.0
"""How often a process tells of itself and looks who else does."""
GONE_MS: Final = 6_500
"""How long after its last beat a process counts: three beats, so that its tenants move within ten seconds."""
_REFUSED_S: Final = 60.0
"""How often a registry that is refused is asked for again."""
_log = telemetry.logger("lockgate.division")


def owner(tenant: str, members: Collection[str]) -> str:
    """The member that settles a tenant: the same for everybody who knows the same members."""
    return max(members, key=lambda member: (hashlib.sha256(f"{member}/{tenant}".encode()).digest(), member))


class Division:
    """One central process's share. Before the first beat, and where the store refuses it the registry, its
    share is everything.
    """

    def __init__(self, connection: Connection) -> None:
        self.member: Final = secrets.token_hex(8)
        self._settlers = Settlers(connection)
        self._members: frozenset[str] = frozenset()
        self._told = ""
        self._next_beat = 0.0

    async def beat(self) -> None:
        """Tell of this process and see who else is there.

        Raises nothing: where the store is away the last division holds, and where it refuses (a user without
        the right, no memory) nobody else counts on this process, which therefore counts on nobody.
        """
        now = asyncio.get_running_loop().time()
        if now < self._next_beat:
            return
        try:
            members = await self._settlers.beat(self.member, GONE_MS)
        except ReplyError as refused:
            self._tell(f"the store refuses it ({refused.code})")
            members = frozenset()
            if refused.code == "NOPERM":
                self._next_beat = now + _REFUSED_S
        except (Unavailable, OSError):
            return
        else:
            self._told, self._next_beat = "", 0.0
        if members != self._members:
            _log.info("divided", member=self.member, members=len(members))
        self._members = members

    def mine(self, tenant: str) -> bool:
        """Whether a tenant falls to this process."""
        return not self._members or owner(tenant, self._members | {self.member}) == self.member

    async def leave(self) -> None:
        """Stop counting: the others take over at their next beat. Where the store is away they notice."""
        if self._next_beat:
            return
        try:
            await self._settlers.leave(self.member)
        except (Unavailable, OSError) as error:
            _log.info("left without a word", member=self.member, reason=str(error))

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            _log.warning("tenants are not divided: this process settles all it is given", reason=reason)
