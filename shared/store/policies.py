"""A tenant's policy document as the store keeps it."""

from __future__ import annotations

from typing import Final

import msgspec

from shared.domain.errors import Conflict
from shared.domain.policy import PolicyDocument
from shared.store.codes import Code
from shared.store.connection import Connection
from shared.store.keys import Keys
from shared.store.reads import unrefused
from shared.store.registry_change import authority_of, change_registry
from shared.store.replies import TenantLost

FIELD: Final = "document"
"""The field of the ``policy`` hash that holds the document; ``appliedAtMs`` and ``appliedBy`` stand beside
it."""


class AppliedPolicy(msgspec.Struct, frozen=True):
    """What is stored now: the revision everybody decides under, and the document in its RFC 8785 form.

    ``document`` is None where none was applied. ``applied_ms`` is the instant of its last change (store ms).
    """

    revision: str
    document: bytes | None = None
    applied_ms: int = 0
    applied_by: str = ""


class Applied(msgspec.Struct, frozen=True):
    """The revision after an application, and whether that changed anything."""

    revision: str
    changed: bool


async def apply_policy(
    connection: Connection,
    tenant: str,
    document: PolicyDocument,
    by: str,
    *,
    expected: str = "",
    authority: str = "",
) -> Applied:
    """Make ``document`` the tenant's policy from its next decision on; the same one again changes nothing.

    Raises Conflict where ``expected`` is not the present revision: somebody else changed the policy, or
    revoked a token, meanwhile. Raises TenantLost where the tenant's store is gone, or is not ``authority``'s.
    """
    reply = await change_registry(
        connection,
        tenant,
        Keys(tenant).policy,
        "put",
        FIELD,
        document.text,
        moves="policy_rev",
        expected=expected,
        by=by,
        authority=authority,
    )
    if reply.code is Code.CONFLICT:
        raise other_revision()
    return Applied(reply.text(0), reply.code is Code.OK)


def other_revision() -> Conflict:
    """The refusal of a change that builds on a revision which is not the present one."""
    return Conflict("the policy revision is not the expected one: look at the policy, then apply it again")


async def show_policy(connection: Connection, tenant: str, authority: str = "") -> AppliedPolicy:
    """The stored policy with its revision. Raises TenantLost where the tenant's store is gone, or is not
    ``authority``'s.
    """
    k = Keys(tenant)
    known = authority or await authority_of(connection, tenant)
    # The document is read after its revision: at worst it is newer than what is said of it.
    meta, row = unrefused(
        await connection.pipeline(
            ("HMGET", k.meta, "authority", "policy_rev"),
            ("HMGET", k.policy, FIELD, "appliedAtMs", "appliedBy"),
        )
    )
    if meta[0] is None or meta[0].decode() != known:
        raise TenantLost(f"tenant {tenant} is unknown or lost")
    document, at, by = row
    return AppliedPolicy(meta[1].decode(), document, int(at or 0), by.decode() if by else "")
