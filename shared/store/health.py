"""How a tenant stands: whether its store is still its own, its clock, and what it keeps waiting."""

from __future__ import annotations

import msgspec

from shared.domain.limits import TenantLimits, TenantUsage
from shared.store.connection import Connection, ReplyError
from shared.store.continuity import STANDING_FIELDS, condemned, read_standing
from shared.store.inspecting import Inspector
from shared.store.inspection import inspect
from shared.store.keys import TENANTS, Keys
from shared.store.reads import unrefused
from shared.store.registry import show_tenant
from shared.store.replies import StoreRefusal
from shared.store.runtime import lost_by_restart


class TenantHealth(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How one tenant stands. ``behind_ms``: how far the store's clock is behind the last commit; ``late_ms``:
    how late the earliest wake-up is; ``sampled_bytes``: what the ``sampled`` operations take together.
    """

    tenant: str
    authority: str
    lost: str | None
    epoch: int = 0
    server_moved: bool = False
    behind_ms: int = 0
    late_ms: int = 0
    due: int = 0
    parked: int = 0
    usage: TenantUsage = TenantUsage()
    limits: TenantLimits | None = None
    sampled: int = 0
    sampled_bytes: int = 0


async def lost_reason(connection: Connection, tenant: str) -> str | None:
    """Why everybody is refused for this tenant, None where its store is the one it was, as far as the store
    itself can tell: a copy that nobody has seen newer looks like the store.
    """
    registered, row = await connection.pipeline(
        ("HGET", TENANTS, tenant), ("HMGET", Keys(tenant).meta, *STANDING_FIELDS)
    )
    if isinstance(row, ReplyError) and row.code == "WRONGTYPE":
        return "its record in the store holds something else"
    registered, row = unrefused((registered, row))
    authority, note = ((value or b"").decode(errors="replace") for value in (row[0], row[-1]))
    if not authority:
        return "its keys are gone from the store"
    if (why := condemned(authority, note)) is not None:
        return why
    if registered is None:
        return "its registration is gone from the store"
    if authority != registered.decode():
        return "the store holds another authority's data"
    try:
        found = read_standing(row)
    except StoreRefusal as unreadable:
        return unreadable.description
    durability = await inspect(connection)
    if found is None or durability.replid is None:
        return None
    return lost_by_restart(found.replid, found.boundary, durability)


async def look_after(connection: Connection, tenant: str, sample: int) -> TenantHealth:
    """How the tenant stands, with up to ``sample`` operations measured."""
    k = Keys(tenant)
    reason = await lost_reason(connection, tenant)
    if reason is not None:
        authority = (await show_tenant(connection, tenant)).authority
        return TenantHealth(tenant=tenant, authority=authority, lost=reason)
    authority, row, earliest, due, parked, info = unrefused(
        await connection.pipeline(
            ("HGET", TENANTS, tenant),
            ("HMGET", k.meta, "epoch", "last_ms", "usage", "limits", "replid"),
            ("ZRANGE", k.due, 0, 0, "WITHSCORES"),
            ("ZCARD", k.due),
            ("HLEN", k.parked),
            ("TIME",),
        )
    )
    now = int(info[0]) * 1000 + int(info[1]) // 1000
    sampled, sampled_bytes = await Inspector(connection, tenant).stored_bytes(sample)
    replid = (await inspect(connection)).replid
    return TenantHealth(
        tenant=tenant,
        authority=authority.decode(),
        lost=None,
        epoch=int(row[0]),
        server_moved=replid is not None and row[4] != replid.encode(),
        behind_ms=max(0, int(row[1]) - now),
        late_ms=max(0, now - int(float(earliest[1]))) if earliest else 0,
        due=due,
        parked=parked,
        usage=TenantUsage.parse((row[2] or b"").decode()),
        limits=TenantLimits.parse((row[3] or b"").decode()),
        sampled=sampled,
        sampled_bytes=sampled_bytes,
    )
