"""Who asks, and whether they may.

A token is looked up once per snapshot of its tenant and remembered by a hash of the whole header, so that a
request costs one digest; a revocation moves the policy revision, which every protected script and read
checks, and the snapshot with all that was remembered under it goes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from shared.domain.credentials import Caller, Token, TokenRecord, parse_token, secret_digest
from shared.domain.errors import Denied, NotFound, Unavailable
from shared.store.reads import SnapshotMoved
from shared.store.replies import Revisions, TenantLost
from shared.store.runtime import Runtime, TenantHandle
from shared.store.snapshot import Snapshot
from shared.telemetry import STALE_SNAPSHOTS

Action: TypeAlias = Literal["session.open", "session.read", "session.close", "command.submit"]
T = TypeVar("T")

_REMEMBERED: Final = 10_000
_ROUNDS: Final = 4
_OPERATOR_MAY: Final = frozenset({"session.read", "session.close"})
_stale: Final = STALE_SNAPSHOTS.labels("admission")


class Visit(msgspec.Struct, frozen=True):
    """One authenticated caller under one snapshot of its tenant. ``expires_ms`` 0 means never (store ms)."""

    handle: TenantHandle
    snapshot: Snapshot
    caller: Caller
    expires_ms: int = 0

    @property
    def revisions(self) -> Revisions:
        return self.snapshot.revisions

    @property
    def tenant(self) -> str:
        return self.caller.tenant


def authorize(caller: Caller, action: Action, owner: str | None) -> None:
    """Let ``caller`` do ``action`` with a session of ``owner`` (None: with one that does not exist yet).

    Without a policy a caller uses its own sessions, and an operator reads and closes all. Raises NotFound
    for a session that the caller may not know of, the same as for one that is missing, else Denied.
    """
    if "caller" in caller.roles and (owner is None or owner == caller.principal):
        return
    if caller.operator and owner is not None:
        if action in _OPERATOR_MAY:
            return
    elif owner is not None:
        raise NotFound
    raise Denied("the token's roles do not allow this")


class Desk:
    """Turns ``Authorization`` headers into visits."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[bytes, Visit] = {}

    async def visit(self, header: bytes | None) -> Visit:
        """The caller behind a header, as of the tenant's present snapshot.

        Raises Denied (unauthenticated), or TenantLost where the tenant is unknown or its store was lost.
        """
        if header is None:
            raise Denied("a bearer token is needed", unauthenticated=True)
        digest = hashlib.sha256(header).digest()
        known = self._known.get(digest)
        if known is not None and known.snapshot is await known.handle.snapshots.get():
            self._check_expiry(known.expires_ms)
            return known
        visit = await self._authenticate(_bearer(header))
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[digest] = visit
        return visit

    async def serve(
        self, header: bytes | None, work: Callable[[Visit], Awaitable[T]], visit: Visit | None = None
    ) -> T:
        """Do ``work`` as the caller behind ``header``; where the snapshot it was decided under has moved,
        authenticate and decide anew, a few times at once. ``visit`` is one that was made just now.

        A lost tenant is looked at once more: an operator may have adopted it, which makes its old tokens bad
        rather than the tenant lost. Raises what ``work`` raises, or Unavailable.
        """
        lost = False
        for _ in range(_ROUNDS):
            if visit is None:
                visit = await self.visit(header)
            try:
                return await work(visit)
            except SnapshotMoved:
                _stale.inc()
                await visit.handle.snapshots.reload(visit.snapshot)
            except TenantLost:
                visit.handle.snapshots.forget()
                if lost:
                    raise
                lost = True
            visit = None
        raise Unavailable("the tenant's policy or directory keeps changing")

    async def _authenticate(self, token: Token) -> Visit:
        handle = await self._runtime.tenant(token.tenant)
        snapshot = await handle.snapshots.get()
        record = None
        if token.authority8 == snapshot.revisions.authority[:8]:
            record = await handle.snapshots.token(snapshot, token.token_id)
        if record is None:
            # An emptied store knows no token either: a lost tenant must not look like a bad token.
            snapshot = await _proved(handle, snapshot)
            _check_authority(token, snapshot)
            record = await handle.snapshots.token(snapshot, token.token_id)
        if record is None or not _fits(token, record):
            raise Denied("the token is unknown or revoked", unauthenticated=True)
        self._check_expiry(record.expires_ms)
        caller = Caller(token.tenant, record.principal, frozenset(record.roles), token.token_id)
        return Visit(handle, snapshot, caller, record.expires_ms)

    def _check_expiry(self, expires_ms: int) -> None:
        if expires_ms and self._runtime.clock.lower_ms() >= expires_ms:
            raise Denied("the token has expired", unauthenticated=True)


async def _proved(handle: TenantHandle, snapshot: Snapshot) -> Snapshot:
    """``snapshot`` if the store still holds its revisions, else a fresh one; TenantLost where there is none.

    A snapshot that holds is kept, with the tokens remembered in it: bad tokens must not make it cheap to have
    everything read again.
    """
    try:
        await handle.reads.check(snapshot.revisions)
    except (SnapshotMoved, TenantLost):
        return await handle.snapshots.reload(snapshot)
    return snapshot


def _bearer(header: bytes) -> Token:
    scheme, _, credentials = header.partition(b" ")
    if scheme.lower() != b"bearer":
        raise Denied("a bearer token is needed", unauthenticated=True)
    return parse_token(credentials.strip().decode("latin-1"))


def _check_authority(token: Token, snapshot: Snapshot) -> None:
    """A token of neither the present nor a retired authority means that this store is not the tenant's own
    (DESIGN section 6).
    """
    if token.authority8 == snapshot.revisions.authority[:8]:
        return
    if any(retired.startswith(token.authority8) for retired in snapshot.retired):
        raise Denied("the token belongs to a retired authority", unauthenticated=True)
    raise TenantLost("the tenant's store is not the one this token was made for")


def _fits(token: Token, record: TokenRecord) -> bool:
    return hmac.compare_digest(secret_digest(token.secret), record.secret_sha256)
