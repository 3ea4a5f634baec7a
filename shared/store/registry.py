"""Administration of tenants: who exists, their tokens, peers and contracts. Straight to the store, for
operators.

A tenant is registered under ``lg:tenants`` and lives in its own ``meta``; the first without the second is a
lost tenant, never a new one (DASP-CORE-012g).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from shared.domain.credentials import Token, TokenRecord, check_role, secret_digest
from shared.domain.errors import Conflict, InvalidInput, NotFound
from shared.domain.ids import IdKind, check
from shared.domain.limits import NO_USAGE, TenantLimits, TenantUsage
from shared.store.codes import Code
from shared.store.connection import Connection, ReplyError
from shared.store.inspection import inspect
from shared.store.keys import TENANTS, Keys
from shared.store.registry_change import authority_of, change_registry
from shared.store.replies import TenantLost

GROUP = "work"
"""The consumer group of every outbox."""

_tokens = msgspec.json.Decoder(TokenRecord)


class TenantSummary(msgspec.Struct, frozen=True):
    """A tenant as its operator sees it; ``lost`` means registered without its store."""

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


async def _meta_fields(
    connection: Connection, authority: str, epoch: int, policy: int, directory: int
) -> list[str | int]:
    """A fresh ``meta``. Fields are found by walking a short list: what every script reads comes first."""
    durability = await inspect(connection)
    now = await store_now_ms(connection)
    values: dict[str, str | int] = {
        "authority": authority,
        "replid": durability.replid or "",
        "epoch": epoch,
        "policy_rev": policy,
        "last_ms": now,
        "dir_rev": directory,
        "usage": NO_USAGE,
        "limits": TenantLimits().words(),
        "boundary": durability.boundary,
    }
    return [part for pair in values.items() for part in pair]


async def create_tenant(connection: Connection, tenant: str) -> str:
    """Create a tenant with a fresh authority id (128 random bits) and give that id.

    Raises Conflict where it is registered already, also when its store is lost.
    """
    check(IdKind.TENANT, tenant)
    authority = secrets.token_hex(16)
    if not await connection.call("HSETNX", TENANTS, tenant, authority):
        raise Conflict(f"tenant {tenant} exists already; if its store was lost, adopt it")
    fields = await _meta_fields(connection, authority, 1, 1, 1)
    await connection.call("HSET", Keys(tenant).meta, *fields, "retired", "")
    return authority


async def tenant_names(connection: Connection) -> list[str]:
    """Every registered tenant."""
    return sorted(name.decode() for name in await connection.call("HKEYS", TENANTS))


async def show_tenant(connection: Connection, tenant: str) -> TenantSummary:
    """One tenant; NotFound where it is not registered."""
    registered = await connection.call("HGET", TENANTS, tenant)
    if registered is None:
        raise NotFound
    row = await connection.call(
        "HMGET",
        Keys(tenant).meta,
        "authority",
        "epoch",
        "policy_rev",
        "dir_rev",
        "retired",
        "usage",
        "limits",
    )
    text = [value.decode() if value is not None else "" for value in row]
    if text[0] != registered.decode():
        return TenantSummary(tenant, registered.decode(), lost=True)
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

    Contracts and peers stay. The old authority is recorded as retired, so that its tokens answer 401 (DESIGN
    section 6).
    """
    check(IdKind.TENANT, tenant)
    registered = await connection.call("HGET", TENANTS, tenant)
    if registered is None:
        raise NotFound
    k = Keys(tenant)
    old = await connection.call("HMGET", k.meta, "retired", "epoch", "policy_rev", "dir_rev")
    retired, epoch, policy, directory = (value.decode() if value is not None else "" for value in old)
    await _delete_keys(connection, tenant, keep=(k.contracts, k.peers, k.meta))
    authority = secrets.token_hex(16)
    retired_now = f"{retired} {registered.decode()}".strip()
    fields = await _meta_fields(
        connection, authority, int(epoch or 0) + 1, int(policy or 0) + 1, int(directory or 0) + 1
    )
    await connection.call("HSET", k.meta, *fields, "retired", retired_now)
    await connection.call("HSET", TENANTS, tenant, authority)
    for peer in await list_peers(connection, tenant):
        await _ensure_outbox(connection, k, peer.peer)
    return authority


async def delete_tenant(connection: Connection, tenant: str) -> None:
    """Remove a tenant and everything it stored."""
    check(IdKind.TENANT, tenant)
    if await connection.call("HGET", TENANTS, tenant) is None:
        raise NotFound
    await _delete_keys(connection, tenant, keep=())
    await connection.call("HDEL", TENANTS, tenant)


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
    ``meta``.
    """
    if await connection.call("EXISTS", Keys(tenant).meta) == 0:
        raise TenantLost(f"tenant {tenant} has no store to accept a clock for")
    now = await store_now_ms(connection)
    await connection.call("HSET", Keys(tenant).meta, "last_ms", now, "clock_accepted", f"{now} {who}")
    return now


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
