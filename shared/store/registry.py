"""Administration of tenants: who exists, their tokens, peers and contracts. Straight to the store, for
operators.

A tenant is registered under ``lg:tenants`` and lives in its own ``meta``; either without the other is a lost
tenant, never a new one (DASP-CORE-012g). Whoever replaces or removes a tenant condemns its ``meta`` first, so
that nobody writes meanwhile, and lets the two fit again in its last step: broken off anywhere between, the
tenant is lost, and the same call brings it to its end.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

import lua
from shared.domain.credentials import Token, TokenRecord, check_role, secret_digest
from shared.domain.errors import Conflict, InvalidInput, NotFound
from shared.domain.ids import IdKind, check
from shared.domain.limits import NO_USAGE, TenantLimits, TenantUsage
from shared.store.codes import Code
from shared.store.connection import Connection, ReplyError, evalsha
from shared.store.continuity import LOST
from shared.store.inspection import inspect
from shared.store.keys import RETIRED, TENANTS, Keys
from shared.store.registry_change import authority_of, change_registry
from shared.store.replies import Reply, TenantLost

GROUP = "work"
"""The consumer group of every outbox."""

_AUTHORITY: Final = re.compile("[0-9a-f]{32}")
_tokens = msgspec.json.Decoder(TokenRecord)


class TenantSummary(msgspec.Struct, frozen=True):
    """A tenant as its operator sees it; ``lost`` means that its registration or its store is missing, or that
    they do not fit. ``authority`` is the one it is registered under, else the one its store was made for.
    """

    tenant: str
    authority: str
    lost: bool
    epoch: int = 0
    policy_revision: str = ""
    directory_revision: str = ""
    retired: tuple[str, ...] = ()
    usage: TenantUsage = TenantUsage()
    limits: TenantLimits | None = None


class PeerRecord(msgspec.Struct, frozen=True):
    """A logical worker: what it can do and which principals the operator attests to be it (RT-PUB-04)."""

    peer: str
    capabilities: tuple[str, ...] = ()
    principals: tuple[str, ...] = ()


_peers = msgspec.json.Decoder(PeerRecord)


async def store_now_ms(connection: Connection) -> int:
    """The store's own time."""
    seconds, micros = await connection.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


class _Remains(msgspec.Struct, frozen=True):
    """What there is of a tenant. ``authority`` is its store's own, "" where that is gone; ``authorities`` are
    all that are known, the registered one last.
    """

    registered: bool
    has_keys: bool
    authority: str
    authorities: tuple[str, ...]
    epoch: int = 0
    policy: int = 0
    directory: int = 0
    limits: TenantLimits | None = None


async def _remains(connection: Connection, tenant: str) -> _Remains:
    check(IdKind.TENANT, tenant)
    k = Keys(tenant)
    fixed = (k.meta, k.contracts, k.peers, k.policy, k.tokens, k.due, k.parked, k.ledger)
    fields = ("authority", "retired", "epoch", "policy_rev", "dir_rev", "limits")
    replies = await connection.pipeline(
        ("HGET", TENANTS, tenant), ("HGET", RETIRED, tenant), ("EXISTS", *fixed), ("HMGET", k.meta, *fields)
    )
    # A meta of another type holds nothing to go by; it is among the keys to remove.
    *first, row = replies
    for reply in first if isinstance(row, ReplyError) and row.code == "WRONGTYPE" else replies:
        if isinstance(reply, ReplyError):
            raise reply
    registered, noted = (value.decode() if value is not None else "" for value in first[:2])
    text = [""] * len(fields)
    if not isinstance(row, ReplyError):
        text = [value.decode(errors="replace") if value is not None else "" for value in row]
    authority, retired, *counts, limits = text
    epoch, policy, directory = (int(count) if count.isdigit() else 0 for count in counts)
    owned = authority.removeprefix(LOST)
    known = [*noted.split(), *retired.split(), owned, registered]
    last_of_each = [a for at, a in enumerate(known) if a and a not in known[at + 1 :]]
    return _Remains(
        registered=bool(registered),
        has_keys=bool(first[2]),
        authority="" if authority.startswith(LOST) else authority,
        authorities=tuple(last_of_each),
        epoch=epoch,
        policy=policy,
        directory=directory,
        limits=TenantLimits.parse(limits),
    )


async def _write_meta(connection: Connection, tenant: str, authority: str, old: _Remains) -> None:
    """A fresh ``meta``, in one step. Fields are found by walking a short list: what every script reads comes
    first.
    """
    durability = await inspect(connection)
    now = await store_now_ms(connection)
    values: dict[str, str | int] = {
        "authority": authority,
        "replid": durability.replid or "",
        "epoch": old.epoch + 1,
        "policy_rev": old.policy + 1,
        "last_ms": now,
        "dir_rev": old.directory + 1,
        "usage": NO_USAGE,
        "limits": (old.limits or TenantLimits()).words(),
        "boundary": durability.boundary,
        "retired": " ".join(old.authorities),
    }
    meta = Keys(tenant).meta
    fields = [part for pair in values.items() for part in pair]
    *_, done = await connection.pipeline(("MULTI",), ("DEL", meta), ("HSET", meta, *fields), ("EXEC",))
    if isinstance(done, ReplyError):
        raise done


async def create_tenant(
    connection: Connection, tenant: str, *, new_authority: bool = False, retired: Sequence[str] = ()
) -> str:
    """Create a tenant with a fresh authority id (128 random bits) and give that id.

    A tenant that is known is never made anew by accident: raises Conflict where it is registered, also when
    its store is lost; and, without ``new_authority``, where keys of it are in the store or it was deleted
    from there. With it those keys are removed and the authorities of old are retired: their tokens are
    refused as such. ``retired`` adds those that only the operator knows of.
    """
    for given in retired:
        if _AUTHORITY.fullmatch(given) is None:
            raise InvalidInput("retired", "an authority is 32 hexadecimal digits")
    old = await _remains(connection, tenant)
    if old.registered:
        raise Conflict(f"tenant {tenant} exists already; if its store was lost, adopt it")
    if old.has_keys and not new_authority:
        raise Conflict(
            f"tenant {tenant} is not registered, but its keys are in the store: adopt it, which keeps its "
            "contracts, peers, policy and limits, or create it with --new-authority, which keeps nothing"
        )
    if old.authorities and not new_authority:
        raise Conflict(
            f"tenant {tenant} existed here before: create it with --new-authority to use its name again"
        )
    authority = secrets.token_hex(16)
    if not await connection.call("HSETNX", TENANTS, tenant, authority):
        raise Conflict(f"tenant {tenant} exists already; if its store was lost, adopt it")
    before = tuple(dict.fromkeys((*retired, *old.authorities)))
    await _take_out_of_service(connection, tenant, old)
    await _retire(connection, tenant, before)
    if old.has_keys:
        await _delete_keys(connection, tenant, keep=())
    await _write_meta(connection, tenant, authority, _Remains(True, False, "", before))
    return authority


async def is_known(connection: Connection, tenant: str) -> bool:
    """Whether there is anything to show, adopt or delete of a tenant: its registration or keys of it."""
    found = await _remains(connection, tenant)
    return found.registered or found.has_keys


async def tenant_names(connection: Connection) -> list[str]:
    """Every registered tenant."""
    return sorted(name.decode() for name in await connection.call("HKEYS", TENANTS))


async def unregistered_tenants(connection: Connection) -> list[str]:
    """Tenants whose ``meta`` is in the store while the registry does not name them. Walks all keys."""
    registered = set(await tenant_names(connection))
    found: set[str] = set()
    cursor = b"0"
    while True:
        cursor, keys = await connection.call("SCAN", cursor, "MATCH", "lg:{*}:meta", "COUNT", 1000)
        names = (key[4:-6].decode(errors="replace") for key in keys)
        found.update(name for name in names if name not in registered and _is_tenant_id(name))
        if cursor == b"0":
            return sorted(found)


def _is_tenant_id(text: str) -> bool:
    try:
        check(IdKind.TENANT, text)
    except InvalidInput:
        return False
    return True


async def show_tenant(connection: Connection, tenant: str) -> TenantSummary:
    """One tenant; NotFound where there is neither its registration nor its store."""
    names = ("authority", "epoch", "policy_rev", "dir_rev", "retired", "usage", "limits")
    registered, row = await connection.pipeline(
        ("HGET", TENANTS, tenant), ("HMGET", Keys(tenant).meta, *names)
    )
    if isinstance(registered, ReplyError):
        raise registered
    named = registered.decode() if registered is not None else ""
    text = [""] * len(names)
    if not isinstance(row, ReplyError):
        text = [value.decode(errors="replace") if value is not None else "" for value in row]
    elif row.code != "WRONGTYPE":
        raise row
    elif not named:
        return TenantSummary(tenant, "", lost=True)
    if not named and not text[0]:
        raise NotFound
    if text[0] != named:
        return TenantSummary(tenant, named or text[0].removeprefix(LOST), lost=True)
    return TenantSummary(
        tenant=tenant,
        authority=text[0],
        lost=False,
        epoch=int(text[1]),
        policy_revision=text[2],
        directory_revision=text[3],
        retired=tuple(text[4].split()),
        usage=TenantUsage.parse(text[5]),
        limits=TenantLimits.parse(text[6]),
    )


async def adopt_tenant(connection: Connection, tenant: str) -> str:
    """Serve a lost tenant again under a new authority: its operations, sessions and tokens are gone for good.

    Contracts, peers, policy and limits stay, as far as they are there. Every authority known of it is
    recorded as retired, so that its tokens answer 401 and its cursors 410 (DESIGN section 6). Raises NotFound
    where neither its registration nor any key of it is left: then it can only be created.
    """
    old = await _remains(connection, tenant)
    if not old.registered and not old.has_keys:
        raise NotFound
    k = Keys(tenant)
    await _take_out_of_service(connection, tenant, old)
    await _retire(connection, tenant, old.authorities)
    kept = [key for key in (k.contracts, k.peers, k.policy) if await connection.call("TYPE", key) == b"hash"]
    await _delete_keys(connection, tenant, keep=(*kept, k.meta))
    for peer in await list_peers(connection, tenant):
        await _ensure_outbox(connection, k, peer.peer)
    authority = secrets.token_hex(16)
    await _write_meta(connection, tenant, authority, old)
    await connection.call("HSET", TENANTS, tenant, authority)
    return authority


async def delete_tenant(connection: Connection, tenant: str) -> None:
    """Remove a tenant and everything it stored; only the ids of its authorities stay known.

    Raises NotFound where neither its registration nor any key of it is there.
    """
    old = await _remains(connection, tenant)
    if not old.registered and not old.has_keys:
        raise NotFound
    await _take_out_of_service(connection, tenant, old)
    await _retire(connection, tenant, old.authorities)
    await _delete_keys(connection, tenant, keep=(Keys(tenant).meta,))
    await connection.call("UNLINK", Keys(tenant).meta)
    await connection.call("HDEL", TENANTS, tenant)


async def _take_out_of_service(connection: Connection, tenant: str, old: _Remains) -> None:
    """From here on nobody writes there, whatever they know of the tenant."""
    if old.authority:
        arguments = ("condemn", old.authority, "", "", "an operator gave it up")
        await evalsha(connection, lua.load("epoch"), [Keys(tenant).meta], arguments)


async def _retire(connection: Connection, tenant: str, authorities: Sequence[str]) -> None:
    if authorities:
        await connection.call("HSET", RETIRED, tenant, " ".join(authorities))


async def _delete_keys(connection: Connection, tenant: str, keep: Sequence[bytes]) -> None:
    cursor = b"0"
    while True:
        cursor, found = await connection.call("SCAN", cursor, "MATCH", f"lg:{{{tenant}}}:*", "COUNT", 500)
        doomed = [key for key in found if key not in keep]
        if doomed:
            await connection.call("UNLINK", *doomed)
        if cursor == b"0":
            return


async def set_limits(connection: Connection, tenant: str, limits: TenantLimits) -> None:
    """Change what a tenant may use. It moves the policy revision: every process reads it again at once."""
    words = limits.words().encode()
    await change_registry(connection, tenant, Keys(tenant).meta, "put", "limits", words, moves="policy_rev")


async def accept_clock(connection: Connection, tenant: str, who: str) -> int:
    """Take the store's present time as true: the way out of a rollback or a believed jump. Audited in
    ``meta``. Raises TenantLost where the store is not the tenant's own.
    """
    arguments = ("clock", await authority_of(connection, tenant), who)
    reply = Reply.of(await evalsha(connection, lua.load("epoch"), [Keys(tenant).meta], arguments))
    if reply.code is not Code.OK:
        raise TenantLost(f"tenant {tenant} has no store to accept a clock for")
    return reply.now_ms


async def create_token(
    connection: Connection, tenant: str, principal: str, roles: Sequence[str], expires_in_s: int = 0
) -> Token:
    """Make a token and give it whole, the only time its secret exists outside its holder."""
    check(IdKind.PRINCIPAL, principal)
    if not roles:
        raise InvalidInput("roles", "name at least one role")
    authority = await authority_of(connection, tenant)
    now = await store_now_ms(connection)
    token = Token(tenant, authority[:8], secrets.token_hex(8), secrets.token_urlsafe(32))
    record = TokenRecord(
        principal=principal,
        roles=tuple(sorted({check_role(role) for role in roles})),
        secret_sha256=secret_digest(token.secret),
        created_ms=now,
        expires_ms=now + expires_in_s * 1000 if expires_in_s else 0,
    )
    raw = msgspec.json.encode(record)
    await change_registry(connection, tenant, Keys(tenant).tokens, "new", token.token_id, raw)
    return token


async def list_tokens(connection: Connection, tenant: str) -> dict[str, TokenRecord]:
    """Token id → record, without secrets."""
    flat = await connection.call("HGETALL", Keys(tenant).tokens)
    return {i.decode(): _tokens.decode(r) for i, r in zip(flat[::2], flat[1::2], strict=True)}


async def find_token(connection: Connection, tenant: str, token_id: str) -> TokenRecord | None:
    """One token's record."""
    raw = await connection.call("HGET", Keys(tenant).tokens, token_id)
    return None if raw is None else _tokens.decode(raw)


async def revoke_token(connection: Connection, tenant: str, token_id: str) -> None:
    """Remove a token and move the policy revision in one step: every process learns at its next protected
    step, and whoever waits is woken for it. Raises NotFound, or TenantLost where the tenant's store is gone.
    """
    key = Keys(tenant).tokens
    reply = await change_registry(connection, tenant, key, "remove", token_id, moves="policy_rev")
    if reply.code is Code.NOT_FOUND:
        raise NotFound


async def register_peer(connection: Connection, tenant: str, peer: PeerRecord) -> None:
    """Add or change a peer; membership, capability and attestation move the directory revision, presence does
    not. Raises TenantLost where the tenant's store is gone.
    """
    check(IdKind.PEER, peer.peer)
    k = Keys(tenant)
    raw = msgspec.json.encode(peer)
    await change_registry(connection, tenant, k.peers, "put", peer.peer, raw, moves="dir_rev")
    await _ensure_outbox(connection, k, peer.peer)


async def _ensure_outbox(connection: Connection, keys: Keys, peer: str) -> None:
    try:
        await connection.call("XGROUP", "CREATE", keys.outbox(peer), GROUP, "0", "MKSTREAM")
    except ReplyError as error:
        if error.code != "BUSYGROUP":
            raise


async def list_peers(connection: Connection, tenant: str) -> list[PeerRecord]:
    """The directory, by peer id."""
    values = await connection.call("HVALS", Keys(tenant).peers)
    return sorted((_peers.decode(value) for value in values), key=lambda peer: peer.peer)


async def remove_peer(connection: Connection, tenant: str, peer: str) -> None:
    """End a membership. Obligations that name the peer stay open (RT-ADM-34); its outbox stays for them."""
    key = Keys(tenant).peers
    reply = await change_registry(connection, tenant, key, "remove", peer, moves="dir_rev")
    if reply.code is Code.NOT_FOUND:
        raise NotFound
