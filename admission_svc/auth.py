"""Who asks, and whether they may.

A role of the token is necessary, a policy narrows or widens within it; :func:`authorize` is the one place
where both are judged, and no permission outlives the policy revision or the expiry it was given under.

A token is looked up once per snapshot of its tenant and remembered by a hash of the whole header, so that a
request costs one digest; a revocation moves the policy revision, which every protected script and read
checks, and the snapshot with all that was remembered under it goes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from shared.domain.credentials import Caller, Token, TokenRecord, parse_token, secret_digest
from shared.domain.errors import Denied, NotFound, Unavailable
from shared.domain.policy import Action, Authorization, AuthorizationInput, PolicyUnreadable
from shared.store.reads import SnapshotMoved
from shared.store.replies import Revisions, TenantLost
from shared.store.runtime import Runtime, TenantHandle
from shared.store.snapshot import NOT_SERVED, Snapshot
from shared.telemetry import STALE_SNAPSHOTS

T = TypeVar("T")

_REMEMBERED: Final = 10_000
_ROUNDS: Final = 4
_CALLER_MAY: Final = frozenset(
    {
        "session.open",
        "session.read",
        "session.close",
        "command.submit",
        "invoke",
        "invocation.read",
        "cancel",
        "manifest.supply",
    }
)
_OPERATOR_MAY: Final = frozenset({"session.read", "session.close", "contract.apply", "operate"})
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


class SessionRef(msgspec.Struct, frozen=True):
    """What a permission about a session depends on. ``owner`` is "" before it is opened; ``profile`` and
    ``contract`` are ids.
    """

    session_id: str
    owner: str = ""
    profile: str = ""
    contract: str = ""


_NOWHERE: Final = SessionRef("")


def authorize(
    visit: Visit, action: Action, session: SessionRef | None = None, interaction: str = ""
) -> Authorization:
    """Let the caller do ``action`` with ``session`` (None: with none), or refuse (RT-AUTH-04..06).

    Whatever is written on the strength of the verdict must commit before its ``expires_ms``. Raises NotFound,
    the same as for a session that is missing, where it is one that the caller may not read; else Denied.
    Raises Unavailable where the policy cannot be read.
    """
    now = visit.handle.store.clock.lower_ms()
    verdict = _verdict(visit, action, session or _NOWHERE, interaction, now)
    if verdict is not None:
        return verdict
    if session is not None and session.owner and not _readable(visit, action, session, now):
        raise NotFound
    ruled = visit.snapshot.policy.document is not None and _role_does(visit.caller, action)
    raise Denied("the policy does not allow this" if ruled else "the token's roles do not allow this")


def _as_caller(caller: Caller, action: Action) -> bool:
    return "caller" in caller.roles and action in _CALLER_MAY


def _as_operator(caller: Caller, action: Action) -> bool:
    return caller.operator and action in _OPERATOR_MAY


def _role_does(caller: Caller, action: Action) -> bool:
    return _as_caller(caller, action) or _as_operator(caller, action)


def may_open(visit: Visit, profile: str, contract: str) -> bool:
    """Whether the caller may open sessions of a profile under any ids at all. Raises Unavailable."""
    caller = visit.caller
    return "caller" in caller.roles and visit.snapshot.policy.offers(caller.principal, profile, contract)


def _readable(visit: Visit, refused: Action, session: SessionRef, now_ms: int) -> bool:
    return refused != "session.read" and _verdict(visit, "session.read", session, "", now_ms) is not None


def _verdict(
    visit: Visit, action: Action, session: SessionRef, interaction: str, now_ms: int
) -> Authorization | None:
    """The permission, None where there is none. Without a policy a caller uses its own sessions, and an
    operator reads and closes all.
    """
    caller, policy = visit.caller, visit.snapshot.policy
    if policy.document is None:
        own = session.owner in ("", caller.principal) and _as_caller(caller, action)
        return policy.granted(now_ms) if own or _as_operator(caller, action) else None
    if not _role_does(caller, action):
        return None
    asked = AuthorizationInput(
        principal=caller.principal,
        action=action,
        session_id=session.session_id,
        owner=session.owner,
        profile=session.profile,
        contract=session.contract,
        interaction=interaction,
    )
    verdict = policy.decide(asked, now_ms)
    return verdict if verdict.allowed else None


class Desk:
    """Turns ``Authorization`` headers into visits."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[bytes, Visit] = {}

    async def visit(self, header: bytes | None) -> Visit:
        """The caller behind a header, as of the tenant's present snapshot.

        Raises Denied (unauthenticated), or TenantLost where the tenant is unknown or its store was lost.
        While the store cannot be read, everybody is told that, also who brings no token or a malformed one.
        """
        if header is None:
            await self._runtime.check_readable()
            raise Denied("a bearer token is needed", unauthenticated=True)
        digest = hashlib.sha256(header).digest()
        known = self._known.get(digest)
        if known is not None and known.snapshot is await known.handle.snapshots.get():
            self._check_expiry(known.expires_ms)
            return known
        try:
            token = _bearer(header)
        except Denied:
            await self._runtime.check_readable()
            raise
        try:
            visit = await self._authenticate(token)
        except TenantLost:
            # Why is for those whom a token made known: to others a tenant is not even there.
            raise TenantLost(NOT_SERVED) from None
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
                return await _held(visit, work)
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
        if not self._runtime.clock.known:
            await self._runtime.refresh()
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


async def _held(visit: Visit, work: Callable[[Visit], Awaitable[T]]) -> T:
    """What ``work`` gives. That it was refused is told only under revisions that still hold: a permission
    given elsewhere meanwhile counts at once here too.
    """
    try:
        return await work(visit)
    except (Denied, NotFound, PolicyUnreadable):
        await visit.handle.reads.check(visit.revisions)
        raise


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
    raise TenantLost(NOT_SERVED)


def _fits(token: Token, record: TokenRecord) -> bool:
    return hmac.compare_digest(secret_digest(token.secret), record.secret_sha256)
