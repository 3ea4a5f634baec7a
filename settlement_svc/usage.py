"""How much of its limits a tenant uses, as metrics of the process that settles it."""

from __future__ import annotations

from typing import Final

from shared.domain.limits import TenantLimits, TenantUsage
from shared.store.connection import Connection
from shared.store.keys import Keys
from shared.telemetry import TENANT_LIMIT, TENANT_USAGE

_COUNTED: Final = TenantUsage.__struct_fields__


class UsageGauges:
    """One tenant's counts and limits; whoever stops settling the tenant forgets them, or they would stand
    still.
    """

    def __init__(self, connection: Connection, tenant: str) -> None:
        self._connection = connection
        self._tenant = tenant

    async def refresh(self) -> None:
        """Read them anew: one store command."""
        row = await self._connection.call("HMGET", Keys(self._tenant).meta, "usage", "limits")
        usage, limits = ((value or b"").decode() for value in row)
        self._set(TenantUsage.parse(usage), TenantLimits.parse(limits))

    def _set(self, usage: TenantUsage, limits: TenantLimits | None) -> None:
        for name in _COUNTED:
            TENANT_USAGE.labels(self._tenant, name).set(getattr(usage, name))
            TENANT_LIMIT.labels(self._tenant, name).set(0 if limits is None else getattr(limits, name))

    def forget(self) -> None:
        """Show nothing of the tenant any more."""
        for gauge in (TENANT_USAGE, TENANT_LIMIT):
            gauge.remove_by_labels({"tenant": self._tenant})
