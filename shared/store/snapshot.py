"""What a process knows of a tenant: the revisions it decides under, and what those revisions cover.

Read as one, replaced as one. A script or read that answers *stale snapshot* makes the holder reload it once,
whoever else asks meanwhile (single flight), and decide again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from shared.domain.credentials import TokenRecord
from shared.domain.errors import InvalidInput
from shared.domain.limits import TenantLimits
from shared.domain.policy import Policy, PolicyDocument, read_policy
from shared.store.connection import Connection, ReplyError, ReplyLost
from shared.store.continuity import STANDING_FIELDS, Standing, read_standing
from shared.store.keys import TENANTS, Keys
from shared.store.policies import FIELD
from shared.store.reads import unrefused
from shared.store.registry import PeerRecord, find_token
from shared.store.replies import Revisions, TenantLost

_TOKENS_REMEMBERED = 10_000
NOT_SERVED: Final = "the tenant is unknown here or its store was lost"
"""Also for a tenant that this process may not serve: who asks learns no more of it than of one that never
was."""
logger: Final = logging.getLogger("lockgate.store.snapshot")
_peers = msgspec.json.Decoder(PeerRecord)


class Snapshot(msgspec.Struct, frozen=True):
    """A tenant's authority, revisions, directory and policy as of one reading."""

    tenant: str
    revisions: Revisions
    epoch: int
    boundary: str
    retired: frozenset[str]
    peers: frozenset[str]
    clock_accepted_ms: int
    policy: Policy
    limits: TenantLimits | None
    tokens: dict[str, TokenRecord | None] = msgspec.field(default_factory=dict)


class SnapshotSource:
    """Gives the current snapshot of one tenant and reloads it on demand.

    ``judge`` hears of every reading before it is used, and keeps it from being used by raising.
    """

    def __init__(
        self,
        tenant: str,
        connection: Connection,
        judge: Callable[[Standing], Awaitable[None]] | None = None,
    ) -> None:
        self._judge = judge
        self._doubts = self._resolved = 0
        self._tenant = tenant
        self._keys = Keys(tenant)
        self._connection = connection
        self._current: Snapshot | None = None
        self._loading: asyncio.Task[Snapshot] | None = None
        self._document: PolicyDocument | None = None

    async def get(self) -> Snapshot:
        """The snapshot in use, read first if there is none."""
        return self.held or await self.reload(None)

    async def reload(self, seen: Snapshot | None) -> Snapshot:
        """A snapshot other than ``seen``: the one in use if it moved on already, else a fresh reading.

        Raises TenantLost where the registered authority and the stored one are missing or differ, or the
        store is not the one it was.
        """
        held = self.held
        if held is not None and held is not seen:
            return held
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load())
            self._loading.add_done_callback(self._loaded)
        return await asyncio.shield(self._loading)

    @property
    def held(self) -> Snapshot | None:
        """The snapshot in use, if there is one."""
        return self._current if self._resolved == self._doubts else None

    def doubt(self) -> None:
        """Read again before the next use: it may be another store that answers now."""
        self._doubts += 1

    def forget(self) -> None:
        """Drop what is known: the next use reads it again."""
        self._current = None

    async def token(self, snapshot: Snapshot, token_id: str) -> TokenRecord | None:
        """A token's record, remembered for as long as the snapshot lives: revocation moves the policy
        revision.

        Unknown ids are not remembered, so that a token created later is found and a guesser fills no memory.
        """
        known = snapshot.tokens.get(token_id)
        if known is None:
            known = await find_token(self._connection, self._tenant, token_id)
            if known is not None:
                if len(snapshot.tokens) >= _TOKENS_REMEMBERED:
                    snapshot.tokens.clear()
                snapshot.tokens[token_id] = known
        return known

    def _loaded(self, task: asyncio.Task[Snapshot]) -> None:
        self._loading = None
        if not task.cancelled() and task.exception() is not None:
            self._current = None

    async def _load(self) -> Snapshot:
        doubts = self._doubts
        meta = (
            "HMGET",
            self._keys.meta,
            "authority",
            "policy_rev",
            "dir_rev",
            "epoch",
            "boundary",
            "retired",
            "clock_accepted",
            "limits",
            *STANDING_FIELDS,
        )
        # The revisions are read before what they cover: what changes in between is at worst newer than its
        # revision, which the first script or read then says has moved.
        commands = (
            ("HGET", TENANTS, self._tenant),
            meta,
            ("HVALS", self._keys.peers),
            ("HGET", self._keys.policy, FIELD),
        )
        try:
            replies = await self._connection.pipeline(*commands)
        except ReplyLost:
            # Often because of this very loss it is read anew: a reading may be repeated at once.
            replies = await self._connection.pipeline(*commands)
        registered, *tenant_replies = replies
        if _forbidden(tenant_replies[0]):
            raise TenantLost(NOT_SERVED)
        row, members, document = unrefused(tenant_replies)
        own, standing = row[: -len(STANDING_FIELDS)], read_standing(row[-len(STANDING_FIELDS) :])
        authority, policy, directory, epoch, boundary, retired, accepted, limits = (
            value.decode() if value is not None else "" for value in own
        )
        if standing is None or registered_as(registered, authority) != authority:
            raise TenantLost(NOT_SERVED)
        if self._judge is not None:
            await self._judge(standing)
        self._current = Snapshot(
            tenant=self._tenant,
            revisions=Revisions(authority, policy, directory),
            epoch=int(epoch),
            boundary=boundary,
            retired=frozenset(retired.split()),
            peers=frozenset(_peers.decode(member).peer for member in members),
            clock_accepted_ms=int(accepted.split()[0]) if accepted else 0,
            policy=await self._policy(policy, document),
            limits=TenantLimits.parse(limits),
        )
        self._resolved = doubts
        return self._current

    async def _policy(self, revision: str, stored: bytes | None) -> Policy:
        """What is stored as a policy; a document is compiled once, however often other revisions move."""
        if stored is None:
            return Policy(revision)
        if self._document is None or self._document.text != stored:
            try:
                # Others are served while a large document is compiled.
                self._document = await asyncio.to_thread(read_policy, stored)
            except InvalidInput as fault:
                logger.error("the policy of tenant %s cannot be read: %s", self._tenant, fault.description)
                return Policy.unreadable(revision)
        return Policy(revision, self._document)


def registered_as(reply: Any, authority: str) -> str:
    """The authority the tenant is registered under, "" where it is not.

    A user that may not read the registry, which names every tenant, takes the tenant's own word for it.
    """
    if _forbidden(reply):
        return authority
    if isinstance(reply, ReplyError):
        raise reply
    return "" if reply is None else str(reply.decode())


def _forbidden(reply: Any) -> bool:
    """Whether the store's access rules keep something from this process."""
    return isinstance(reply, ReplyError) and reply.code == "NOPERM"
