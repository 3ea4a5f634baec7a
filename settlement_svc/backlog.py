"""How much of this process's share is due and how late it is: two figures for the process, never one per
tenant, so that tenants cannot grow the number of series.
"""

from __future__ import annotations

import time
from typing import Final

from shared import telemetry


class Backlog:
    """What was due at each tenant's last look."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[int, float]] = {}

    def saw(self, tenant: str, items: int, oldest_ms: int) -> None:
        """``items`` are due, the oldest of them for ``oldest_ms``; none is the end of a backlog."""
        if items:
            self._due[tenant] = items, time.monotonic() - oldest_ms / 1000
        else:
            self._due.pop(tenant, None)

    def items(self) -> int:
        """Due items of all tenants."""
        return sum(items for items, _ in list(self._due.values()))

    def oldest_s(self) -> float:
        """How long the oldest of them has been due, in seconds; it grows until that tenant is looked at
        again.
        """
        since = min((since for _, since in list(self._due.values())), default=None)
        return 0.0 if since is None else time.monotonic() - since


BACKLOG: Final = Backlog()
"""This process's, as its metrics show it."""
telemetry.DUE.set_function(BACKLOG.items)
telemetry.DUE_SECONDS.set_function(BACKLOG.oldest_s)
