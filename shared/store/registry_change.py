"""The one way in which administration changes what a tenant's registry holds: one field, and with it the
revision under which everybody decides.
"""

from __future__ import annotations

from typing import Final, Literal

import lua
from shared.store.codes import Code
from shared.store.connection import Connection, evalsha
from shared.store.keys import TENANTS, Keys
from shared.store.replies import Reply, TenantLost
from shared.store.wake import EVERYBODY

Counter = Literal["policy_rev", "dir_rev", ""]
"""The revision that a change moves: that of the policy, of the directory, or none."""
Mode = Literal["put", "new", "remove"]

_WAKES: Final[dict[Counter, str]] = {"policy_rev": EVERYBODY, "dir_rev": "", "": ""}


async def authority_of(connection: Connection, tenant: str) -> str:
    """The authority a tenant is registered under. Raises TenantLost where it is not registered."""
    registered = await connection.call("HGET", TENANTS, tenant)
    if registered is None:
        raise TenantLost(f"tenant {tenant} is unknown or lost")
    return str(registered.decode())


async def change_registry(
    connection: Connection,
    tenant: str,
    key: bytes,
    mode: Mode,
    field: str,
    value: bytes = b"",
    *,
    moves: Counter = "",
    expected: str = "",
    by: str = "",
    authority: str = "",
) -> Reply:
    """Change one ``field`` of the hash ``key`` in one step: OK or DUPLICATE with the revision, CONFLICT or
    NOT_FOUND.

    A move of the policy revision wakes whoever waits, so that it is judged anew at once. ``expected`` is the
    revision that the change builds on, "" for any; ``by`` is who is noted beside it; ``authority`` is the one
    it was decided under, "" for the registered one. Repeat the identical call after a lost reply.

    Raises TenantLost, writing nothing, where the store is not the tenant's own.
    """
    known = authority or await authority_of(connection, tenant)
    args = (known, moves, mode, field, value, expected, _WAKES[moves], by)
    raw = await evalsha(connection, lua.load("registry"), [Keys(tenant).meta, key], args)
    reply = Reply.of(raw)
    if reply.code is Code.AUTHORITY_LOST:
        raise TenantLost(f"tenant {tenant} is unknown or lost")
    return reply
