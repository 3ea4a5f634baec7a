"""Every way in which a caller's permission to read a session ends."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from shared.domain.policy import read_policy
from shared.store.policies import apply_policy
from shared.store.registry import revoke_token
from tests.admission.house import Client, House

TakeAway = Callable[[House, Client], Awaitable[None]]
_EVERYTHING: Final = ["session.open", "session.read", "session.close", "command.submit"]
_TRUSTED: Final = {"principals": ["trusted"], "actions": _EVERYTHING, "sessions": ["*"], "effect": "allow"}


def rule(principal: str, *actions: str, effect: str = "allow", **more: Any) -> dict[str, Any]:
    """A rule about one principal."""
    return {"principals": [principal], "actions": list(actions or _EVERYTHING), "effect": effect, **more}


async def apply(door: House, *rules: dict[str, Any]) -> None:
    """Make these the tenant's rules; whoever is called ``trusted`` may use every session."""
    document = json.dumps({"rules": [*rules, _TRUSTED]}).encode()
    await apply_policy(door.admin, "acme", read_policy(document), "olga")


async def revoke(door: House, client: Client) -> None:
    """The token is revoked."""
    await revoke_token(door.admin, "acme", client.token.split(".")[3])


async def remove_rule(door: House, client: Client) -> None:
    """The rule that allowed it is not there any more."""
    await apply(door, rule("alice", "session.open", "command.submit"))


async def deny(door: House, client: Client) -> None:
    """A rule that denies it comes first."""
    await apply(door, rule("alice", "session.read", effect="deny"), rule("alice"))


async def leave_no_rule(door: House, client: Client) -> None:
    """No rule names its principal any more."""
    await apply(door)


async def deny_all(door: House, client: Client) -> None:
    """Everything is denied to its principal."""
    await apply(door, rule("alice", effect="deny"), rule("alice"))


WAYS: Final[dict[str, TakeAway]] = {"revoke": revoke, "remove_rule": remove_rule, "deny": deny}
"""How reading ends; by policy it is reading alone."""
WHOLLY: Final[dict[str, TakeAway]] = {"revoke": revoke, "no_rule": leave_no_rule, "deny_all": deny_all}
"""How everything ends."""
