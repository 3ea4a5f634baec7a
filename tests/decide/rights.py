"""Rights as tests give and take them."""

from __future__ import annotations

from collections.abc import Collection

from shared.domain.decide import Rights
from shared.domain.errors import Unavailable
from shared.domain.guard import MAX_SAFE_INTEGER
from shared.domain.policy import Action, Authorization

Asked = tuple[Action, str, int]
"""One question: action, peer, attempt."""


def without(*denied: str, expires_ms: int = MAX_SAFE_INTEGER, asked: list[Asked] | None = None) -> Rights:
    """Rights to everything but these actions and these peers; what is asked goes to ``asked``."""

    def ask(action: Action, branch: int, peer: str, attempt: int) -> Authorization:
        assert branch == 0
        if asked is not None:
            asked.append((action, peer, attempt))
        return Authorization(action not in denied and peer not in denied, "1", expires_ms)

    return ask


def expiring(peers: dict[str, int]) -> Rights:
    """Rights that end at another instant for every peer (ms)."""

    def ask(_action: Action, _branch: int, peer: str, _attempt: int) -> Authorization:
        return Authorization(True, "1", peers[peer])

    return ask


def only(allowed: Collection[str]) -> Rights:
    """Rights to these actions alone."""

    def ask(action: Action, _branch: int, _peer: str, _attempt: int) -> Authorization:
        return Authorization(action in allowed, "1", MAX_SAFE_INTEGER)

    return ask


def unreadable(_action: Action, _branch: int, _peer: str, _attempt: int) -> Authorization:
    """Nobody knows."""
    raise Unavailable("the tenant's policy cannot be read")
