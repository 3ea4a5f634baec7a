"""Policies for the door's tests, applied as another process would: the door learns of them by itself."""

from __future__ import annotations

import json
from typing import Any, Final

from shared.domain.policy import read_policy
from shared.store.policies import apply_policy
from tests.admission.house import House

USE: Final = ("session.open", "session.read", "session.close", "command.submit")
"""What a caller does with sessions."""


def allow(principal: str, *actions: str, **more: Any) -> dict[str, Any]:
    """A rule that allows these actions, all on sessions where none is named."""
    return {"principals": [principal], "actions": list(actions or USE), "effect": "allow", **more}


def deny(principal: str, *actions: str, **more: Any) -> dict[str, Any]:
    """A rule that denies these actions, all on sessions where none is named."""
    return {**allow(principal, *actions, **more), "effect": "deny"}


async def rule(door: House, *rules: dict[str, Any], tenant: str = "acme") -> str:
    """Make these rules the tenant's policy; gives its revision."""
    document = read_policy(json.dumps({"rules": rules}).encode())
    return (await apply_policy(door.admin, tenant, document, "test")).revision
