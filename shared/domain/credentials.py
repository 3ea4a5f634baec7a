"""Bearer tokens and the roles they name. Pure: making secrets and reading clocks happen elsewhere.

``lg1.<tenant>.<authority8>.<token id>.<secret>``: the tenant and the authority are part of the token, so that
a process that never saw the tenant can tell a lost store (503) from a bad token (401); see DESIGN section 6.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from shared.domain.errors import Denied, InvalidInput
from shared.domain.ids import IdKind, check

PREFIX: Final = "lg1"
_TOKEN: Final = re.compile(
    r"lg1\.([a-z0-9](?:-?[a-z0-9])*)\.([0-9a-f]{8})\.([0-9a-f]{16})\.([A-Za-z0-9_-]{43})", re.ASCII
)
_PLAIN_ROLES: Final = frozenset({"caller", "operator", "local-host"})


class Token(msgspec.Struct, frozen=True):
    """The parts of a presented token; nothing in it is believed before its record was found."""

    tenant: str
    authority8: str
    token_id: str
    secret: str

    def text(self) -> str:
        """The presented form."""
        return f"{PREFIX}.{self.tenant}.{self.authority8}.{self.token_id}.{self.secret}"


class TokenRecord(msgspec.Struct, frozen=True):
    """What the store keeps of a token: never its secret. Instants in ms; ``expires_ms`` 0 means never."""

    principal: str
    roles: tuple[str, ...]
    secret_sha256: str
    created_ms: int
    expires_ms: int = 0


class Caller(msgspec.Struct, frozen=True):
    """Who an authenticated request speaks for; tenant and principal come from the token alone (RT-CTX-02)."""

    tenant: str
    principal: str
    roles: frozenset[str]
    token_id: str

    @property
    def operator(self) -> bool:
        return "operator" in self.roles


def parse_token(text: str) -> Token:
    """Split a presented token; Denied (unauthenticated) where it is not one."""
    match = _TOKEN.fullmatch(text) if len(text) <= 200 else None
    if match is None or len(match[1]) > 63:
        raise Denied("the bearer token is not one of this service's", unauthenticated=True)
    return Token(match[1], match[2], match[3], match[4])


def secret_digest(secret: str) -> str:
    """SHA-256 (hex) of a secret; secrets carry 256 random bits, so a plain hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def check_role(role: str) -> str:
    """Accept caller, operator, local-host and peer:<peer>."""
    if role in _PLAIN_ROLES:
        return role
    kind, _, peer = role.partition(":")
    if kind != "peer":
        raise InvalidInput("role", "is one of caller, operator, local-host, peer:<peer>")
    check(IdKind.PEER, peer)
    return role
